"""`z2all bench data`: a small run without peers; peers are tested if their environment is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import one_line, z2all
from z2all_ds.base.errors import MachineError
from z2all_ds.bench.data.cases import MICRO_BATCH, PEER_SOURCES, SEQUENCE_LENGTH, Case, Cases, Runner
from z2all_ds.bench.data.inputs import Inputs, make_large_corpus, prepare_inputs
from z2all_ds.bench.peers import environments
from z2all_ds.bench.shared import error_line
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.data.data_plan import open_documents
from z2all_ds.data.tokens.reading import load_token_manifest
from z2all_ds.tokenizer import load_tokenizer

TEXT_BYTES = 600_000
ENVIRONMENT = Path(os.environ.get("Z2ALL_BENCH_PEERS") or environments.default_folder())


@pytest.fixture(scope="module")
def inputs(small_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return prepare_inputs(tmp_path_factory.mktemp("inputs"), small_corpus, small_tokenizer, TEXT_BYTES)


def texts_of(inputs: Inputs, folder: Path) -> list[str]:
    """Return all texts, decoded from tokens; the tokenizer of the tests is lossless."""
    tokenizer = load_tokenizer(inputs.tokenizer)
    found = []
    for domain in open_documents(folder, tokenizer).domains.values():
        block = domain.open_block(0, domain.num_documents)
        found += [tokenizer.decode(block.tokens(number)[:-1].tolist()) for number in range(domain.num_documents)]
    return found


@pytest.mark.extended
def test_a_run_without_peers_measures_speed_resume_and_scale(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    folders = ("--corpus", small_corpus, "--tokenizer", small_tokenizer)
    size = ("--megabytes", "1", "--repeats", "1", "--shards", "16", "--shard-megabytes", "1")
    command = [sys.executable, "-m", "z2all_ds", "bench", "data", *folders, *size, "--no-peers", "--json"]
    answer = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr
    costs = json.loads(answer.stdout)
    speed = {one["name"]: one["figures"] for one in costs["speed"]}
    only = ["tokenizer only", "tokenizer only, mixed"]
    assert list(speed) == [*only, "raw jsonl", "raw parquet", "raw parquet, one row group", "tokens"]
    batch = MICRO_BATCH * SEQUENCE_LENGTH
    for name, one in speed.items():
        assert one["tokens_per_cpu_second"] == pytest.approx(one["tokens"] / one["cpu_seconds"])
        if name in only:
            assert (
                one["tokens"] == costs["num_tokens"] - costs["documents"]
            )  # without the <|endoftext|> of each document
        else:
            assert one["tokens"] == costs["num_tokens"] // batch * batch
    assert {one["name"]: one["figures"]["exact"] for one in costs["resume"]} == {
        "raw jsonl, shuffled": True,
        "tokens, shuffled": True,
    }
    sizes = [one["figures"]["state_bytes"] for one in costs["resume"]]
    assert max(sizes) - min(sizes) < 10, "they differ only in the sizes of the domains, in bytes or in tokens"
    assert max(sizes) < 10_000
    assert [one["name"] for one in costs["scale"]] == [
        f"{kind} at {part}" for kind in ("raw jsonl", "tokens") for part in ("1%", "50%", "99%")
    ]
    for one in costs["scale"]:
        figures = one["figures"]
        assert 0 < figures["first_batch_seconds"] < figures["all_lanes_seconds"]
        assert figures["peak_memory_bytes"] > 50_000_000
    assert costs["scale_shards"] == 16 and costs["scale_bytes"] >= 16 * 1_000_000
    assert costs["packages"]["ours"].keys() == {"tokenizers", "torch", "numpy", "pyarrow", "orjson"}


@pytest.mark.extended
def test_every_format_contains_the_same_documents(inputs: Inputs) -> None:
    lines = texts_of(inputs, inputs.jsonl)
    assert len(lines) == inputs.documents > 50
    assert sum(len(text.encode()) for text in lines) == inputs.text_bytes
    for folder in (inputs.parquet, inputs.parquet_one_group, inputs.tokens):
        assert texts_of(inputs, folder) == lines
    tokens = np.fromfile(inputs.plain_tokens, inputs.dtype)
    assert len(tokens) == inputs.num_tokens
    encoded = load_tokenizer(inputs.tokenizer).encode_batch(lines)
    assert tokens.tolist() == [token for one in encoded for token in (*one, inputs.eot_id)]


@pytest.mark.extended
def test_all_shards_of_the_large_corpus_are_hard_links_to_one_file(inputs: Inputs, tmp_path: Path) -> None:
    large = make_large_corpus(tmp_path, inputs, shards=9, shard_bytes=TEXT_BYTES // 3)
    raw, tokens = load_manifest(large.raw), load_token_manifest(large.tokens)
    assert len(raw.shards) == len(tokens.shards) == 9
    assert tokens.corpus_fingerprint == raw.fingerprint
    assert len({shard.domain for shard in raw.shards}) == 8
    assert len({(large.raw / shard.path).stat().st_ino for shard in raw.shards}) == 1
    assert large.bytes == sum(shard.bytes for shard in raw.shards) >= 9 * TEXT_BYTES // 3
    assert large.num_tokens == sum(shard.tokens for shard in tokens.shards)
    before = {path: path.stat().st_mtime_ns for path in large.raw.iterdir()}
    texts = texts_of(inputs, large.raw)
    assert texts == texts_of(inputs, large.tokens)
    assert texts[: len(texts) // 9] == texts[-(len(texts) // 9) :]
    assert {path: path.stat().st_mtime_ns for path in large.raw.iterdir()} == before  # no index was rebuilt


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--megabytes", "0"], "ConfigError: megabytes=0: must be at least 1."),
        (["--repeats", "0"], "ConfigError: repeats=0: must be at least 1."),
        (["--shards", "-1"], "ConfigError: shards=-1: must be at least 0."),
    ],
)
def test_options_out_of_range_are_refused(tmp_path: Path, arguments: list[str], start: str) -> None:
    assert one_line(z2all("bench", "data", *arguments, cwd=tmp_path), 2).startswith(start)


# Peers


def test_a_peer_that_cannot_be_installed_is_reported_as_failed(inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    cases, runner = Cases(inputs, tmp_path), Runner(tmp_path, tmp_path / "file", repeats=1)
    runner.prepare_peers(cases)
    peer = next(case for case in cases.speed() if case.by == "hf_datasets")
    (alone,) = runner.measure("speed", [peer])
    assert alone.by == "hf_datasets" and alone.figures == {}
    assert str(tmp_path / "file") in alone.failed


def test_error_line_finds_the_error_in_an_output() -> None:
    assert error_line("a\nERROR: No matching distribution\n\nhint: b\n") == "ERROR: No matching distribution"
    assert error_line("a\nb\n") == "b"
    assert error_line("") == "no output"


@pytest.mark.extended
def test_a_measurement_that_fails_is_named_in_the_error(inputs: Inputs, tmp_path: Path) -> None:
    case = next(case for case in Cases(inputs, tmp_path).speed() if case.name == "raw jsonl")
    broken = Case(case.name, case.by, {**case.job, "folder": str(tmp_path / "none")})
    with pytest.raises(MachineError, match=r"ours, raw jsonl: failed with exit code 1: .*MANIFEST.json"):
        Runner(tmp_path, ENVIRONMENT, repeats=1).run(broken)


def peer_runner(peer: str, inputs: Inputs, scratch: Path) -> tuple[Cases, Runner]:
    if not environments.is_ready(ENVIRONMENT, peer):
        pytest.skip(f"{peer} is not installed in {ENVIRONMENT}: `z2all bench data` does that, or set Z2ALL_BENCH_PEERS")
    cases, runner = Cases(inputs, scratch), Runner(scratch, ENVIRONMENT, repeats=1)
    runner.prepare_peers(cases, [peer])
    return cases, runner


@pytest.mark.parametrize("peer", sorted(PEER_SOURCES))
def test_peers_resume_in_the_middle_of_an_epoch(peer: str, inputs: Inputs, tmp_path: Path) -> None:
    cases, runner = peer_runner(peer, inputs, tmp_path)
    results = {one.name: one for one in runner.measure_resume([case for case in cases.resume() if case.by == peer])}
    exact = "tokens, streamed, in order" if peer == "hf_datasets" else "tokens, shuffled"
    assert [one.failed for one in results.values()] == [""] * len(results)
    assert results[exact].figures["exact"]
    assert all(one.figures["state_bytes"] > 50 for one in results.values())
