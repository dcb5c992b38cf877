"""Tests for `z2all evaluate probes` on checkpoints: order, stored results, exit codes."""

import json
import shutil
from pathlib import Path

import pytest

from tests.evaluate.conftest import MODEL as TINY_MODEL
from tests.helpers.checkpoints import checkpoint_of, write_run
from tests.helpers.command import z2all
from tests.helpers.probe_files import write_probes
from z2all_ds.base.errors import CheckpointError, ConfigError, DataError, TrainingError
from z2all_ds.base.reports import print_lines
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.retention import remove
from z2all_ds.evaluate.probe_report import ModelAnswers, ProbeAnswer, ProbeResults, describe, failed_probes
from z2all_ds.evaluate.probe_runs import has_form, run_probes
from z2all_ds.evaluate.probes import CompletionProbe, FormatProbe

MODEL = TINY_MODEL.model_copy(update={"max_position_embeddings": 64})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> RunFolder:
    """Write a run with three checkpoints, the second one damaged."""
    folder = write_run(tmp_path_factory.mktemp("probes") / "run", MODEL, small_corpus, small_tokenizer, 2, 5, 9)
    (checkpoint_of(folder, 5) / "trainer.json").write_text("{", encoding="utf-8")
    write_probes(folder.root.parent)
    return folder


def test_the_command_evaluates_every_checkpoint_and_fails_with_strict(run: RunFolder) -> None:
    arguments = ("evaluate", "probes", "run", "--file", "small.yaml", "--json", "--strict")
    answer = z2all(*arguments, cwd=run.root.parent)
    assert answer.returncode == TrainingError.exit_code
    assert answer.stderr.splitlines()[-1].startswith("TrainingError: probes 首都")
    assert "skipped: checkpoint" in answer.stderr and "step_00000005" in answer.stderr
    (content,) = json.loads(answer.stdout)
    first, last = content["rows"]
    assert (first["step"], last["step"]) == (2, 9)
    assert first["values"].keys() == {probe["name"] for probe in content["probes"]}
    assert first["values"]["首都"] != last["values"]["首都"]
    assert "plain" not in first["passed"] and last["passed"]["plain"]  # its expectation applies from step 8 on
    assert last["details"]["json"]["form_kept"] is True
    kept = json.loads((run.evaluations / "probes_small.json").read_text(encoding="utf-8"))
    for row in content["rows"]:
        del row["details"]
    assert kept == content


def test_the_table_shows_every_checkpoint_and_marks_failures(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(run.root.parent / "small.yaml")
    asked = run_probes([run.root, checkpoint_of(run, 2)], file, True, "fp32", 8)
    assert [[one.step for one in series] for series in asked.series] == [[2, 9], [2]]
    assert {name: answer.value for name, answer in asked.series[0][0].answers.items()} == pytest.approx(
        {name: answer.value for name, answer in asked.series[1][0].answers.items()}, rel=1e-5
    )
    print_lines(describe(asked))
    shown = capsys.readouterr().out
    assert "step 2" in shown and "step 9" in shown
    assert next(line for line in shown.splitlines() if "首都" in line and "completion" in line).count("FAIL") == 1
    assert f"{run.root} step 9: probes" in shown.replace("\n", " ")
    assert "首都" in failed_probes(asked)


def test_evaluating_only_the_newest_checkpoint_stores_nothing(run: RunFolder, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.root, copy, ignore=shutil.ignore_patterns("evaluations"))
    asked = run_probes([copy], str(run.root.parent / "small.yaml"), False, "fp32", 8)
    assert [one.step for one in asked.series[0]] == [9]
    assert not (copy / "evaluations").exists()


def test_stored_results_outlive_their_checkpoint_but_not_a_change_of_the_probes(
    run: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy, file = RunFolder(tmp_path / "copy"), tmp_path / "few.yaml"
    shutil.copytree(run.root, copy.root, ignore=shutil.ignore_patterns("evaluations"))
    file.write_text("- {name: a, prompt: 中国的首都是, completion: 北京}\n", encoding="utf-8")

    def kept(file: Path) -> dict[int, float]:
        run_probes([copy.root], str(file), True, "fp32", 8)
        rows = json.loads((copy.evaluations / "probes_few.json").read_text(encoding="utf-8"))["rows"]
        return {row["step"]: row["values"]["a"] for row in rows}

    both = kept(file)
    assert list(both) == [2, 9]
    assert remove(checkpoint_of(copy, 2))
    assert kept(file) == both
    other = tmp_path / "other" / "few.yaml"
    other.parent.mkdir()
    shutil.copy2(file, other)
    assert kept(other) == both  # the same probes in another file
    file.write_text("- {name: a, prompt: 中国的首都是, completion: 上海}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"probes_few\.json: holds the results of .*/other/few\.yaml\. Rename one"):
        kept(file)
    shutil.copy2(file, other)
    changed = kept(other)
    assert list(changed) == [9] and changed[9] != both[9]
    assert "probes_few.json starts over" in capfd.readouterr().err


def test_missing_or_broken_models_are_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        run_probes([tmp_path / "none"], "zh_en", True, "fp32", 8)
    (tmp_path / "young/checkpoints").mkdir(parents=True)
    with pytest.raises(DataError, match="has no checkpoint yet"):
        run_probes([tmp_path / "young"], "zh_en", True, "fp32", 8)
    shutil.copytree(checkpoint_of(run, 5), tmp_path / "young/checkpoints/step_00000005")
    with pytest.raises(CheckpointError):
        run_probes([tmp_path / "young"], "zh_en", True, "fp32", 8)


@pytest.mark.parametrize(
    ("answer", "is_json", "matches"),
    [
        ('\n{"a": [1, 2]} and more', True, True),
        ("[1]", True, False),
        ('{"a": ', False, True),
        ("3", False, False),
        ("Sure: {}", False, False),
        ("", False, False),
    ],
)
def test_answers_are_checked_for_json_or_a_pattern(answer: str, is_json: bool, matches: bool) -> None:
    common = {"name": "a", "prompt": "x", "starts_with": "{"}
    assert has_form(FormatProbe.model_validate({**common, "json": True}), answer) == is_json
    assert has_form(FormatProbe.model_validate({**common, "matches": r"\s*\{"}), answer) == matches


def test_the_table_of_many_checkpoints_shows_only_some(
    capsys: pytest.CaptureFixture[str],
) -> None:
    probe = CompletionProbe(name="a", prompt="x", completion="y", at_least=0.5)
    line = [ModelAnswers(f"run step {step}", step, {"a": ProbeAnswer(step / 100, True, {})}) for step in range(1, 21)]
    print_lines(describe(ProbeResults("f", [probe], [line])))
    shown = capsys.readouterr().out
    assert [step for step in range(1, 21) if f"{step / 100:.4f}" in shown] == [1, 5, 9, 12, 16, 20]
    assert "6 of 20 checkpoints; --json has all" in shown
