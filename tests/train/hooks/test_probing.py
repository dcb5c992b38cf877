"""Probes during real runs: they change no bit of the training, and their values match those of the checkpoints."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.probe_files import PROBES, write_probes
from tests.helpers.training import losses, metrics, run_arguments, train, train_many
from tests.ops.comparing import on_gpu
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.data.packing import make_batch
from z2all_ds.evaluate.probe_rows import ProbeRow
from z2all_ds.evaluate.probe_runs import run_probes
from z2all_ds.track.writer import read_records
from z2all_ds.train.hooks.probing import pack

STAGES = {"zero1": "data.document_mask=false", "zero3": "data.document_mask=true"}
"""The document mask decides the packing: without it every probe has its own sample, with it probes share samples."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("probed")
    # Dropout uses the random state, so probing that changed the state would change the losses.
    common = ("train.steps=6", "model.dropout1=0.1")
    looks: tuple[str, ...] = (f"probes.file={write_probes(folder)}", "probes.every_steps=4")
    looks += ("checkpoint.every_steps=2", "checkpoint.keep_last=3")

    def arguments(name: str, deepspeed: str, *more: str) -> list[str]:
        run = folder / f"{deepspeed}_{name}"
        return run_arguments(run, small_corpus, small_tokenizer, f"deepspeed={deepspeed}", *common, *more)

    plan = []
    for deepspeed, mask in STAGES.items():
        plan += [arguments("plain", deepspeed, mask), arguments("probed", deepspeed, mask, *looks)]
    assert train_many(folder, plan) == [0] * len(plan)
    return folder


@pytest.mark.parametrize("deepspeed", STAGES)
def test_probes_change_no_bit_of_the_training(deepspeed: str, runs: Path) -> None:
    probed, plain = runs / f"{deepspeed}_probed", runs / f"{deepspeed}_plain"
    assert losses(probed) == losses(plain)
    assert [record["grad_norm"] for record in metrics(probed)] == [record["grad_norm"] for record in metrics(plain)]


@pytest.mark.parametrize("name", [f"{deepspeed}_probed" for deepspeed in STAGES])
def test_values_are_those_of_the_checkpoint_of_the_same_step(name: str, runs: Path) -> None:
    recorded = {record["step"]: record for record in metrics(runs / name)}
    probed = [step for step, record in recorded.items() if any(key.startswith("probe_") for key in record)]
    assert probed == [4, 6]  # every four steps, and the last step
    asked = run_probes([runs / name], None, all_checkpoints=True, dtype="fp32", batch=3)
    found = {one.step: one.answers for one in asked.series[0]}
    assert list(found) == [2, 4, 6]
    for step in probed:
        in_run = {key.removeprefix("probe_"): v for key, v in recorded[step].items() if key.startswith("probe_")}
        assert list(in_run) == [probe.name for probe in asked.probes]
        assert in_run == pytest.approx({key: answer.value for key, answer in found[step].items()}, rel=1e-4, abs=1e-6)
    kept = json.loads((runs / name / "evaluations" / "probes_small.json").read_text(encoding="utf-8"))
    assert [row["step"] for row in kept["rows"]] == [2, 4, 6]
    assert kept["rows"][1]["values"] == {key: answer.value for key, answer in found[4].items()}
    expectation = {"at_least": 0.5, "at_most": None, "from_step": 0}
    assert kept["probes"][0] == {"name": "首都", "kind": "completion", **expectation}
    started = next(read_records(RunFolder(runs / name).events))
    assert started["probes"] == kept["probes"]


@on_gpu[0]
@on_gpu[1]
def test_probes_change_no_bit_of_a_training_with_cuda_graphs(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    common = ("deepspeed=zero1", "train.deterministic=true", "train.cuda_graphs=always", "model.hidden_size=256")
    looks: tuple[str, ...] = (f"probes.file={write_probes(tmp_path)}", "probes.every_steps=3")
    for name, more in (("plain", ()), ("probed", looks)):
        answer = train(tmp_path / name, small_corpus, small_tokenizer, *common, *more, ranks=1)
        assert answer.returncode == 0, answer.stderr
    assert losses(tmp_path / "probed") == losses(tmp_path / "plain")
    assert any(key.startswith("probe_") for key in metrics(tmp_path / "probed")[2])


def test_the_log_says_how_many_probes_are_as_expected(runs: Path) -> None:
    log = (runs / "zero3_probed/logs/rank_0000.log").read_text(encoding="utf-8")
    said = re.findall(r"(?m)^\d\d:\d\d:\d\d (probes: .*)$", log)
    assert len(said) == 2
    assert "as expected (not: 首都" in said[-1]
    asked = run_probes([runs / "zero3_probed"], None, all_checkpoints=False, dtype="fp32", batch=8)
    judged = asked.series[0][-1].passed
    assert f"{sum(judged.values()) - judged['json']} of {len(judged) - 1} as expected" in said[-1]


def test_rows_are_packed_as_separate_documents() -> None:
    rows = [ProbeRow((1, 2, 3), 1, 1), ProbeRow((4, 5, 6, 7, 8), 2, 1), ProbeRow((9, 10), 1, 1)]
    samples, places = pack(rows, sequence_length=6, padding_id=0, shares_samples=True)
    batch = {name: column.tolist() for name, column in make_batch(samples).items()}
    assert len(samples) == 2
    for row, (sample, start) in zip(rows, places, strict=True):
        end = start + len(row.ids)
        assert batch["input_ids"][sample][start:end] == list(row.ids)
        assert batch["next_tokens"][sample][start:end] == [*row.ids[1:], -100]
        assert batch["position_ids"][sample][start:end] == list(range(len(row.ids)))
        assert len(set(batch["document_ids"][sample][start:end])) == 1
    assert len({(sample, batch["document_ids"][sample][start]) for sample, start in places}) == len(rows)
    alone, places = pack(rows, sequence_length=6, padding_id=0, shares_samples=False)
    assert places == [(0, 0), (1, 0), (2, 0)]
    assert np.array_equal(alone[2].tokens, [9, 10, 0, 0, 0, 0, 0])


def test_errors_in_probe_files_are_reported_before_the_launch(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    answer = train(tmp_path / "a", small_corpus, small_tokenizer, "probes.file=zh_en")
    assert answer.returncode == DataError.exit_code
    assert len(answer.stderr.splitlines()) == 1 and "a sequence holds 32" in answer.stderr
    wrong = write_probes(tmp_path, PROBES.replace("at_least: 0.5", "at_leest: 0.5"))
    answer = train(tmp_path / "a", small_corpus, small_tokenizer, f"probes.file={wrong}")
    assert answer.returncode == ConfigError.exit_code
    expected = "small.yaml, probe 1 (首都): at_leest: no such setting. Did you mean at_least?"
    assert answer.stderr == f"ConfigError: {expected}\n"
    assert not (tmp_path / "a").exists()
