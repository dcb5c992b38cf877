"""Tests for the batch loader: shapes, the prefetching thread, worker processes, and the state."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.data import loader_ranks
from tests.data.corpus_maker import as_arrays, assert_same, open_stream, small_corpus, write_corpus
from tests.data.test_prefetch import prefetch_threads, wait_until
from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.base.machine import free_port
from z2all_ds.data import BatchLoader, StageSpec
from z2all_ds.data.packing import COLUMNS


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return small_corpus(tmp_path)


def children() -> list[int]:
    """Return the PIDs of the worker processes, without the resource tracker and the warm process."""
    found = psutil.Process().children(recursive=True)
    lasting = ("resource_tracker", "tests.helpers.warm_process")
    return [
        one.pid for one in found if one.is_running() and not any(word in " ".join(one.cmdline()) for word in lasting)
    ]


def test_batches_are_the_samples_in_order(corpus: Path) -> None:
    samples = iter(open_stream(corpus))
    with BatchLoader(open_stream(corpus), micro_batch_size=5) as loader:
        for _, batch in zip(range(8), loader, strict=False):
            assert tuple(batch) == COLUMNS
            assert all(column.shape == (5, 16) and column.dtype == torch.int64 for column in batch.values())
            for row in range(5):
                assert_same({name: column[row] for name, column in batch.items()}, as_arrays(next(samples)))


def test_the_state_is_that_of_the_last_consumed_batch(corpus: Path) -> None:
    """The state equals that of a stream without prefetching, although batches are prepared ahead."""
    plain = open_stream(corpus)
    samples = iter(plain)
    with BatchLoader(open_stream(corpus), micro_batch_size=5, prefetch_batches=3) as loader:
        assert loader.state_dict() == plain.state_dict()
        for _ in range(4):
            next(loader)
            wait_until(lambda: loader._prefetcher._made.qsize() == 3)
            for _ in range(5):
                next(samples)
            assert loader.state_dict() == plain.state_dict()
            assert loader.state_dict()["position"] == plain.state_dict()["position"] > 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_skipped_records_are_counted_when_their_samples_are_consumed(tmp_path: Path, num_workers: int) -> None:
    corpus = write_corpus(tmp_path, {"clean": [7] * 12, "web": [7] * 12}, documents_per_shard=12)
    (shard,) = corpus.glob("web*")
    shard.write_bytes(shard.read_bytes().replace(b'"15 7"', b"null  ").replace(b'"20 7"', b"[0, 7]"))
    # A sample of `web` is exactly one epoch: ten documents of eight tokens, and two bad ones of one token.
    weights = {"clean": 0.5, "web": 0.5}
    stream = open_stream(corpus, sequence_length=82, weights=weights, num_lanes=1, on_bad_record="skip")
    found = []
    with BatchLoader(stream, micro_batch_size=1, num_workers=num_workers) as loader:
        for batch in itertools.islice(loader, 6):
            domain = stream.domain_names[int(batch["domain_ids"][0, 0])]
            assert stream.take_bad_records() == ({"web": 2} if domain == "web" else {})
            found.append(domain)
    assert sorted(found) == ["clean"] * 3 + ["web"] * 3


def test_a_shard_that_differs_from_the_manifest_ends_the_batches(corpus: Path) -> None:
    shard = sorted(corpus.glob("web*"))[0]
    shard.write_bytes(shard.read_bytes().replace("题".encode(), "颗".encode()))
    with BatchLoader(open_stream(corpus), micro_batch_size=5) as loader:
        list(itertools.islice(loader, 40))
    message = rf"{shard.name}: its SHA-256 differs from the manifest"
    with BatchLoader(open_stream(corpus, verify_shards=True), micro_batch_size=5) as loader:
        with pytest.raises(DataError, match=message):
            wait_until(lambda: next(loader) is None)


def test_a_returned_state_does_not_change_later(corpus: Path) -> None:
    with BatchLoader(open_stream(corpus), micro_batch_size=12) as loader:
        next(loader)
        state = loader.state_dict()
        expected = next(loader)
        for _ in range(3):
            next(loader)
        loader.load_state_dict(state)
        assert_same(next(loader), expected)


def test_closing_leaves_no_thread_and_loses_no_batch(corpus: Path) -> None:
    with BatchLoader(open_stream(corpus), micro_batch_size=3) as other:
        expected = [next(other) for _ in range(6)]
    loader = BatchLoader(open_stream(corpus), micro_batch_size=3)
    assert not prefetch_threads()
    for batch in expected:
        assert_same(next(loader), batch)
        assert len(prefetch_threads()) == 1
        loader.close()
        assert not prefetch_threads()


def test_a_missing_shard_raises_an_error_in_the_consumer(corpus: Path) -> None:
    (corpus / "web-00010.jsonl").unlink()
    with BatchLoader(open_stream(corpus), micro_batch_size=4) as loader:
        with pytest.raises(DataError, match=r"web-00010\.jsonl, record"):
            list(itertools.islice(loader, 1000))
        with pytest.raises(DataError):
            next(loader)
    assert not prefetch_threads()


def test_pinning_without_a_gpu_prints_a_message(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with BatchLoader(open_stream(corpus), micro_batch_size=2, pin_memory=True) as loader:
        assert not next(loader)["input_ids"].is_pinned()
    assert "pin_memory" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device")
def test_batches_are_pinned(corpus: Path) -> None:
    with BatchLoader(open_stream(corpus), micro_batch_size=2, pin_memory=True) as loader:
        assert all(column.is_pinned() for column in next(loader).values())


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": 0},
        {"micro_batch_size": 1, "prefetch_batches": 0},
        {"micro_batch_size": 1, "num_workers": -1},
    ],
)
def test_invalid_sizes_are_refused(corpus: Path, settings: dict) -> None:
    with pytest.raises(ConfigError, match="at least"):
        BatchLoader(open_stream(corpus), **settings)


def test_the_micro_batch_size_changes_with_the_stage(corpus: Path) -> None:
    stages = (StageSpec(8, samples=12), StageSpec(24, samples=4), StageSpec(8))
    samples = iter(open_stream(corpus, stages=stages))
    with BatchLoader(open_stream(corpus, stages=stages), [6, 2, 3]) as loader:
        for size in (6, 6, 2, 2, 3, 3):
            batch = next(loader)
            assert len(batch["input_ids"]) == size
            for row in range(size):
                assert_same({name: column[row] for name, column in batch.items()}, as_arrays(next(samples)))


def test_a_stage_that_begins_within_a_micro_batch_is_refused(corpus: Path) -> None:
    stream = open_stream(corpus, stages=(StageSpec(8, samples=12), StageSpec(24)))
    with BatchLoader(stream, 5) as loader, pytest.raises(ConfigError, match="stage 1 begins after 2 samples of it"):
        list(itertools.islice(loader, 5))


# Worker processes


def test_workers_produce_the_same_batches_and_exit_on_close(corpus: Path) -> None:
    """Twelve lanes are read by three workers, then resumed by five, a number that does not divide the lanes."""
    samples = iter(open_stream(corpus, sequence_length=5000))  # one sample per message (TOKENS_PER_MESSAGE)
    state = None
    for num_workers in (3, 5):
        stream = open_stream(corpus, sequence_length=5000)
        with BatchLoader(stream, micro_batch_size=4, num_workers=num_workers) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for _ in range(5):
                batch = next(loader)
                for row in range(4):
                    assert_same({name: column[row] for name, column in batch.items()}, as_arrays(next(samples)))
            assert len(children()) >= num_workers
            state = loader.state_dict()
        wait_until(lambda: not children())


@pytest.mark.extended
def test_an_error_in_a_worker_is_reported_in_one_line(corpus: Path) -> None:
    (corpus / "web-00010.jsonl").unlink()
    with BatchLoader(open_stream(corpus), micro_batch_size=4, num_workers=2) as loader:
        with pytest.raises(DataError, match=r"web-00010\.jsonl, record") as caught:
            list(itertools.islice(loader, 1000))
    assert "\n" not in str(caught.value)
    wait_until(lambda: not children())


@pytest.mark.extended
def test_a_killed_worker_is_reported(corpus: Path) -> None:
    with BatchLoader(open_stream(corpus), micro_batch_size=4, num_workers=1, prefetch_batches=1) as loader:
        next(loader)
        (worker,) = children()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(MachineError, match=r"a data worker: ended unexpectedly.*data\.num_workers \(now 1\)"):
            list(itertools.islice(loader, 100_000))


@pytest.mark.extended
def test_two_ranks_with_two_workers_each_produce_one_sequence(corpus: Path, tmp_path: Path) -> None:
    """Two gloo ranks with DataLoader workers, resumed by one rank without workers, produce the sequence of one rank."""
    script = Path(loader_ranks.__file__)
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.data.loader_ranks", str(corpus), str(tmp_path / "out")],
            cwd=script.parents[2],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = json.loads((tmp_path / "out").read_text())
    plain = open_stream(corpus)
    samples = iter(plain)
    assert found["input_ids"] == [next(samples)["input_ids"].tolist() for _ in range(48)]
    assert found["state"] == plain.state_dict()
    resumed = open_stream(corpus)
    resumed.load_state_dict(found["state"])
    for _ in range(24):
        assert_same(next(iter(resumed)), as_arrays(next(samples)))
