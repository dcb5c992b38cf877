"""End-to-end tests for benchmarks: a model that memorized the answers is detected, an untrained one is not."""

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import z2all
from tests.helpers.memorised import TASKS, en_school_with_an_odd_question, load, memorised, untrained
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import to_json
from z2all_ds.cli import app
from z2all_ds.evaluate.harness import run as run_module
from z2all_ds.evaluate.harness.questions import RESHAPINGS
from z2all_ds.evaluate.harness.report import ScoreRow, verdicts
from z2all_ds.evaluate.harness.run import HarnessReport, evaluate_tasks
from z2all_ds.evaluate.harness.settings import HarnessSettings, parse_reshapings
from z2all_ds.evaluate.harness.tasks import load_tasks, quiet, task_manager
from z2all_ds.evaluate.loading import LoadedModel

SCHOOL = ("zh_school", "en_school")


def harness_verb(*arguments: object) -> None:
    app(["evaluate", "harness", *map(str, arguments)], standalone_mode=False)


def report_of(model: LoadedModel, *tasks: str, **changes: object) -> HarnessReport:
    settings = HarnessSettings(tasks=tasks, **{"reshape": RESHAPINGS, "shuffles": 2, **changes})  # type: ignore[arg-type]
    return evaluate_tasks(model, load(*tasks), settings)


def row(report: HarnessReport, task: str, metric: str = "acc") -> ScoreRow:
    (found,) = [one for one in report.rows if (one.task, one.metric) == (task, metric)]
    return found


def test_memorised_answers_are_detected(small_tokenizer: Path) -> None:
    report = report_of(memorised(small_tokenizer), "school", "sums")
    for name in SCHOOL:
        found = row(report, name)
        assert found.score == 1.0
        assert (
            found.reshaped["letters"].beyond_two_standard_errors
            and found.reshaped["shuffled"].beyond_two_standard_errors
        )
        assert found.reshaped["shuffled"].drop > 0.4
        assert found.reshaped["shuffled"].right_then_wrong > found.questions / 2
    pooled = row(report, "all")
    assert pooled.questions == 42 and pooled.reshaped["letters"].drop > 0.5
    assert pooled.reshaped["letters"].drop == pytest.approx(
        sum(row(report, name).reshaped["letters"].drop * row(report, name).questions for name in SCHOOL) / 42
    )
    assert row(report, "school").score == 1.0
    assert row(report, "sums", "exact_match (stripped)").score == 1.0, "the generative task"
    text = "\n".join(verdicts(report.rows))
    assert "zh_school (acc)" in text and "answers may be memorised" in text
    assert report.notes == ["sums: no letters, others_wrong, shuffled (not multiple choice with one right option)"]


def test_an_untrained_model_has_no_significant_drop(small_tokenizer: Path) -> None:
    report = report_of(untrained(small_tokenizer), *SCHOOL)
    for name, chance in zip(SCHOOL, (0.25, 1 / 3), strict=True):
        found = row(report, name)
        assert found.chance == pytest.approx(chance)
        assert abs(found.score - chance) < 4 * math.sqrt(chance * (1 - chance) / found.questions)
        assert not any(drop.beyond_two_standard_errors for drop in found.reshaped.values())
    assert verdicts(report.rows) == []


def test_scores_equal_those_of_the_harness_itself(small_tokenizer: Path) -> None:
    pytest.importorskip("accelerate", reason="the harness's own model needs accelerate")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = untrained(small_tokenizer)
    names = ["zh_school", "science"]
    theirs = simple_evaluate(
        model=HFLM(pretrained=model.model, tokenizer=model.tokenizer, batch_size=4),
        tasks=list(load(*names)["tasks"].values()),
        num_fewshot=2,
        limit=12,
        bootstrap_iters=10,
        fewshot_random_seed=1234,
        task_manager=task_manager(TASKS, with_defaults=False),
    )
    report = report_of(model, *names, reshape=(), shots=2, limit=12)
    compared = 0
    for name in names:
        for metric in ("acc", "acc_norm"):
            ours = row(report, name, metric)
            assert ours.score == theirs["results"][name][f"{metric},none"]
            assert ours.standard_error == pytest.approx(theirs["results"][name][f"{metric}_stderr,none"])
            compared += 1
    assert compared == 4
    assert report.about["shots"] == dict.fromkeys(names, 2)


def test_the_plain_score_does_not_depend_on_the_reshapings(small_tokenizer: Path) -> None:
    model = untrained(small_tokenizer)
    alone = row(report_of(model, "zh_school", reshape=(), shots=1), "zh_school")
    together = row(report_of(model, "zh_school", shots=1), "zh_school")
    assert (alone.score, alone.standard_error) == (together.score, together.standard_error)
    assert set(together.reshaped) == set(RESHAPINGS) and alone.reshaped == {}


def test_json_holds_settings_and_versions(small_tokenizer: Path) -> None:
    content = json.loads(to_json(report_of(untrained(small_tokenizer), "en_school", "sums", limit=3).content()))
    assert content["settings"]["limit"] == 3 and content["settings"]["reshape"] == list(RESHAPINGS)
    assert {"lm_eval", "transformers", "torch", "z2all_ds", "datasets"} <= set(content["versions"])
    assert content["task_versions"] == {"en_school": 1.0, "sums": 1.0}
    first = content["rows"][0]
    assert (first["task"], first["questions"]) == ("en_school", 3)
    assert set(first["reshaped"]) == set(RESHAPINGS)


def test_questions_that_cannot_be_reshaped_are_counted(small_tokenizer: Path) -> None:
    settings = HarnessSettings(tasks=("en_school",), reshape=("letters",))
    report = evaluate_tasks(untrained(small_tokenizer), en_school_with_an_odd_question(), settings)
    assert report.notes == ["en_school: 1 of 18 questions cannot be reshaped by letters: they are asked unchanged"]


@pytest.fixture(scope="module")
def scored_by_a_function(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with a generative task that has its own metric `acc` and a date as version."""
    load("sums")  # enables offline mode and a data cache for tests
    folder = tmp_path_factory.mktemp("tasks")
    shutil.copytree(TASKS / "data", folder / "data")
    (folder / "own.py").write_text("def score(document, results):\n    return {'acc': 1.0}\n", encoding="utf-8")
    yaml = (TASKS / "sums.yaml").read_text(encoding="utf-8")
    for old, new in (
        ("sums\n", "sums\nprocess_results: !function own.score\n"),
        ("exact_match", "acc"),
        ("1.0", "2026-01-31"),
    ):
        assert old in yaml
        yaml = yaml.replace(old, new, 1)
    (folder / "sums.yaml").write_text(yaml.replace(", ignore_case: true", ""), encoding="utf-8")
    return folder


def test_generated_answers_have_no_chance_score(small_tokenizer: Path, scored_by_a_function: Path) -> None:
    with quiet():
        loaded = load_tasks(["sums"], scored_by_a_function, allow_code=True)
    report = evaluate_tasks(untrained(small_tokenizer), loaded, HarnessSettings(tasks=("sums",), limit=2))
    found = row(report, "sums", "acc (stripped)")
    assert (found.score, found.chance) == (1.0, None)


def test_scores_are_written_before_the_report(
    small_tokenizer: Path, scored_by_a_function: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, out = untrained(small_tokenizer), tmp_path / "results" / "harness.json"
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")

    def ask() -> None:
        included = ("--include", scored_by_a_function, "--allow-task-code")
        harness_verb(tmp_path / "model", "--tasks=sums", *included, "--limit=2", "--out", out)

    with monkeypatch.context() as broken:
        broken.setattr(run_module, "_rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask()
    assert json.loads(out.read_text(encoding="utf-8"))["scores"]["sums"]["acc,stripped"] == 1.0
    ask()
    assert json.loads(out.read_text(encoding="utf-8"))["task_versions"] == {"sums": "2026-01-31"}


@pytest.mark.parametrize(
    "changes", [{"shots": -1}, {"limit": 0}, {"batch": 0}, {"shuffles": 0}, {"fields": "question"}], ids=str
)
def test_invalid_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(changes))}"):
        HarnessSettings(tasks=("a",), **changes)  # type: ignore[arg-type]


def test_reshapings_are_selected_by_name() -> None:
    assert parse_reshapings("all") == RESHAPINGS
    assert parse_reshapings("none") == ()
    assert parse_reshapings("shuffled, letters") == ("shuffled", "letters")
    with pytest.raises(ConfigError, match="Known: letters"):
        parse_reshapings("mirrored")


def test_prompts_use_the_chat_template(small_tokenizer: Path) -> None:
    model = untrained(small_tokenizer)
    loaded = load("zh_school")
    evaluate_tasks(model, loaded, HarnessSettings(tasks=("zh_school",), chat=True, shots=1, limit=2))
    prompt, answer = loaded["tasks"]["zh_school"].instances[1].args
    assert prompt.count("<|im_start|>user") == 2 and "答案：<|im_end|>\n<|im_start|>assistant\nB<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n") and answer == "B"


def test_chat_needs_a_template(small_tokenizer: Path) -> None:
    tokenizer = copy.copy(untrained(small_tokenizer).tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="--chat"):
        report_of(replace(untrained(small_tokenizer), tokenizer=tokenizer), "sums", chat=True)


@pytest.mark.extended
def test_the_command_reports_memorised_answers_and_writes_scores(small_tokenizer: Path, tmp_path: Path) -> None:
    known = memorised(small_tokenizer)
    known.model.save_pretrained(tmp_path / "model")
    known.tokenizer.save_pretrained(tmp_path / "model")
    arguments: list[Any] = ["evaluate", "harness", tmp_path / "model", "--include", TASKS, "--tasks", "zh_school,sums"]
    answer = z2all(
        *arguments, "--reshape", "letters", "--out", tmp_path / "results" / "harness.json", cwd=tmp_path,
        HF_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "answers may be memorised" in answer.stdout and "zh_school" in answer.stdout
    assert not any(word in answer.stderr for word in ("WARNING", "INFO", "it/s", "examples/s", "Traceback"))
    content = json.loads((tmp_path / "results" / "harness.json").read_text(encoding="utf-8"))
    scores = {(one["task"], one["metric"]): one["score"] for one in content["rows"]}
    assert scores[("zh_school", "acc")] == 1.0 and scores[("sums", "exact_match (stripped)")] == 1.0


def test_incomplete_commands_are_refused() -> None:
    with pytest.raises(ConfigError, match="--include DIR"):
        harness_verb("--list")
    with pytest.raises(ConfigError, match="MODEL: is missing"):
        harness_verb("--tasks=sums")
    with pytest.raises(ConfigError, match="is a folder"):
        harness_verb(TASKS, "--tasks=sums", f"--out={TASKS}")
