"""Losses and gradient norms of every ZeRO stage on two real ranks, compared with a plain torch loop; fp32 and bf16."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.training import metrics, run_arguments, train_many
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError, TrainingError
from z2all_ds.base.reports import print_lines, to_json
from z2all_ds.train.parity.command import chosen_jsons, run_parity, settings
from z2all_ds.train.parity.compare import TOLERANCES, Comparison, JsonOutcome, StepValues, differences, largest
from z2all_ds.train.parity.reference import train_reference
from z2all_ds.train.parity.report import content_of, describe

FP32_JSONS, BF16_JSONS = ("zero0", "zero1", "zero2", "zero3"), ("zero1", "zero2", "zero3")
STEPS = {"fp32": 8, "bf16": 3}
"""Fewer steps in bf16, whose matrix products are very slow on a CPU."""
CLIPPED = "train.gradient_clipping=0.4"
"""Every gradient is clipped: norms are near 0.6."""


def overrides_of(precision: str, run_dir: Path, corpus: Path, tokenizer: Path) -> list[str]:
    given = run_arguments(run_dir, corpus, tokenizer, CLIPPED)
    return [*given, *settings(load_run_config(None, given), STEPS[precision], precision)]


def values_of(run_dir: Path) -> tuple[StepValues, ...]:
    return tuple(StepValues(one["step"], one["loss"], one["grad_norm"]) for one in metrics(run_dir))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    """Train every case in one launch of two ranks; return the folder of the runs, named PRECISION_NAME."""
    folder = tmp_path_factory.mktemp("parity")
    plan = []
    for precision, names in (("fp32", FP32_JSONS), ("bf16", BF16_JSONS)):
        for name in names:
            arguments = overrides_of(precision, folder / f"{precision}_{name}", small_corpus, small_tokenizer)
            plan.append([*arguments, f"deepspeed={name}"])
    assert train_many(folder, plan) == [0] * len(plan)
    return folder


@pytest.fixture(scope="module")
def references(
    tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path
) -> dict[str, tuple[StepValues, ...]]:
    found = {}
    for precision, steps in STEPS.items():
        overrides = overrides_of(precision, tmp_path_factory.mktemp("none"), small_corpus, small_tokenizer)
        run = load_run_config(None, overrides)
        found[precision] = tuple(train_reference(run, steps, torch.device("cpu")))
    return found


@pytest.mark.parametrize(
    ("precision", "name"), [*(("fp32", name) for name in FP32_JSONS), *(("bf16", name) for name in BF16_JSONS)]
)
def test_every_zero_stage_matches_plain_torch(
    precision: str, name: str, runs: Path, references: dict[str, tuple[StepValues, ...]]
) -> None:
    values = values_of(runs / f"{precision}_{name}")
    assert [one.step for one in values] == list(range(1, STEPS[precision] + 1))
    found = differences(values, references[precision], TOLERANCES[precision])
    assert [one for one in found if not one.is_within] == []
    assert all(one.grad_norm is not None for one in values)


def test_different_arithmetic_exceeds_the_tolerance(
    runs: Path, references: dict[str, tuple[StepValues, ...]], small_corpus: Path, small_tokenizer: Path
) -> None:
    """Each change is a plausible bug of a training loop, which the comparison must detect."""
    run = load_run_config(None, overrides_of("fp32", runs / "none", small_corpus, small_tokenizer))
    mistakes = [
        ("optimizer", {"weight_decay": 0.0}),
        ("train", {"gradient_clipping": 0.0}),
        ("optimizer", {"betas": (0.9, 0.999)}),
        ("schedule", {"warmup_steps": 4}),
    ]
    for section, change in mistakes:
        wrong = run.model_copy(update={section: getattr(run, section).model_copy(update=change)})
        values = tuple(train_reference(wrong, 4, torch.device("cpu")))
        found = differences(values, references["fp32"][:4], TOLERANCES["fp32"])
        assert not all(one.is_within for one in found), change


def test_the_command_names_the_json_that_differs(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    wrong = tmp_path / "rounded.json"
    wrong.write_text(json.dumps({"zero_optimization": {"stage": 1}, "communication_data_type": "bf16"}))
    command = [sys.executable, "-m", "z2all_ds", "train", "parity", "--ranks", "2", "--stages", "2"]
    options = ["--jsons", str(wrong), "--steps", "2", "--json"]
    arguments = run_arguments(tmp_path / "untouched", small_corpus, small_tokenizer)
    answer = subprocess.run([*command, *options, *arguments], capture_output=True, text=True)
    assert answer.returncode == TrainingError.exit_code, answer.stderr
    content = json.loads(answer.stdout)
    assert [(one["name"], one["within"]) for one in content["jsons"]] == [("zero2", True), (str(wrong), False)]
    assert content["jsons"][0]["dtypes"] == {
        "compute": "fp32",
        "accumulation": "fp32",
        "communication": "fp32",
        "master": "fp32",
    }
    assert (content["precision"], content["ranks"], len(content["reference"])) == ("fp32", 2, 2)
    line = answer.stderr.splitlines()[-1]
    # Gradients are rounded when they are sent between the ranks, so the norm of the first step already differs.
    assert line.startswith(
        f"TrainingError: {wrong} at step 1: its grad norm {content['jsons'][1]['steps'][0]['grad_norm']}"
    )
    assert f"the {content['reference'][0]['grad_norm']} of plain torch" in line
    assert not (tmp_path / "untouched").exists()


@pytest.mark.parametrize(
    ("options", "overrides", "line"),
    [
        ({"stages": "0,5"}, [], "--stages 0,5: '5' is not a ZeRO stage. Use some of 0,1,2,3."),
        ({"stages": "0,,1"}, [], "--stages 0,,1: '' is not a ZeRO stage. Use some of 0,1,2,3."),
        ({"stages": "zero1"}, [], "--stages zero1: 'zero1' is not a ZeRO stage. Use some of 0,1,2,3."),
        ({"jsons": "zero9"}, [], "DeepSpeed JSON 'zero9'"),
        ({"precision": "fp16"}, [], "--precision fp16: has no reference. Use fp32 or bf16."),
        ({"steps": 0}, [], "--steps 0: must be at least 1."),
        ({"stages": "0", "precision": "bf16"}, [], "bf16 with ZeRO stage 0: "),
        ({"ranks": 3}, [], "train.global_batch=32: must be a multiple of"),
        ({}, ["model.dropout1=0.1"], "model.dropout1=0.1: dropout depends on the number of ranks"),
        ({}, ["optimizer.kind=lion"], "optimizer.kind=lion: the reference uses torch's AdamW."),
    ],
)
def test_what_cannot_be_compared_is_a_one_line_error(
    options: dict[str, object], overrides: list[str], line: str
) -> None:
    chosen = {"stages": "", "jsons": "", "ranks": 1, "steps": 2, "precision": "", **options}
    with pytest.raises(ConfigError) as caught:
        run_parity(None, overrides, **chosen)  # type: ignore[arg-type]
    assert str(caught.value).startswith(line)
    assert len(str(caught.value).splitlines()) == 1


def test_jsons_are_chosen_by_stage_by_name_or_by_precision() -> None:
    assert chosen_jsons("", "", "fp32") == ["zero0", "zero1", "zero2", "zero3"]
    assert chosen_jsons("", "", "bf16") == ["zero1", "zero2", "zero3"]
    assert chosen_jsons("", "a.json, zero2_offload", "fp32") == ["a.json", "zero2_offload"]
    assert chosen_jsons("2,1,2", "zero1,b", "fp32") == ["zero2", "zero1", "b"]


def test_the_schedule_is_that_of_the_whole_run_but_only_first_steps_are_taken() -> None:
    run = load_run_config(None, ["train.steps=500"])
    assert load_run_config(None, ["train.steps=500", *settings(run, 20, "fp32")]).train.steps == 500
    # The reference initializes its weights randomly, so the compared runs must do so too.
    assert load_run_config(None, ["train.init_from=llama", *settings(run, 20, "fp32")]).train.init_from == ""
    longer = load_run_config(None, settings(run, 600, "fp32"))
    assert (longer.train.steps, longer.train.stop_at_step, longer.checkpoint.every_steps) == (600, 600, 601)


REFERENCE = (StepValues(1, 4.0, 2.0), StepValues(2, 2.0, 1.0))


def comparison(*outcomes: tuple[str, tuple[StepValues, ...]]) -> Comparison:
    return Comparison("fp32", 2, REFERENCE, tuple(JsonOutcome(name, values, None) for name, values in outcomes))


def test_differences_are_relative_and_the_largest_is_found() -> None:
    values = (StepValues(1, 4.0, None), StepValues(2, 2.5, 1.0))
    found = differences(values, REFERENCE, TOLERANCES["fp32"])
    assert [(one.quantity, one.step, one.relative) for one in found] == [
        ("loss", 1, 0.0),
        ("loss", 2, 0.25),
        ("grad_norm", 2, 0.0),
    ]
    assert largest(found, "loss") == found[1]
    assert largest(found[:2], "grad_norm") is None
    broken = differences((StepValues(1, math.nan, 2.0), values[1]), REFERENCE, TOLERANCES["fp32"])
    assert not broken[0].is_within
    assert largest(broken, "loss") == broken[0]


def test_bf16_norms_have_a_larger_tolerance_after_the_first_step() -> None:
    off = tuple(StepValues(one.step, one.loss, one.grad_norm * 1.01) for one in REFERENCE if one.grad_norm)
    norms = [one for one in differences(off, REFERENCE, TOLERANCES["bf16"]) if one.quantity == "grad_norm"]
    assert [(one.step, one.is_within) for one in norms] == [(1, False), (2, True)]


def test_the_error_names_the_first_json_beyond_the_tolerance_and_the_others() -> None:
    good, late = REFERENCE, (REFERENCE[0], StepValues(2, 2.0, 1.25))
    comparison(("zero1", good)).refuse_differences()
    expected = (
        "zero2 at step 2: its grad norm 1.25 differs by 2.5e-01 from the 1.0 of plain torch; fp32 allows 1e-06"
        " (also beyond it: zero3)."
    )
    with pytest.raises(TrainingError) as caught:
        comparison(("zero1", good), ("zero2", late), ("zero3", late)).refuse_differences()
    assert str(caught.value).startswith(expected)


def test_the_comparison_is_shown_as_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    dtypes = {"compute": "fp32", "master": "fp32"}
    without_norms = tuple(StepValues(one.step, one.loss, None) for one in REFERENCE)
    shown = Comparison(
        "fp32",
        2,
        REFERENCE,
        (
            JsonOutcome("zero0", without_norms, None),
            JsonOutcome("zero1", (REFERENCE[0], StepValues(2, 2.5, 1.0)), dtypes),
        ),
    )
    print_lines(describe(shown))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["loss", "plain", "torch", "zero0", "zero1"]
    assert lines[4].split() == ["step", "2", "2.0000000", "2.0000000", "2.5000000"]
    assert lines[7].split() == ["step", "1", "2.0000000", "-", "2.0000000"]
    assert lines[-2] == "zero0 | within | loss off by 0.0e+00 (step 1) | grad norm unknown"
    assert lines[-1].startswith("zero1 | BEYOND | loss off by 2.5e-01 (step 2) | grad norm off by 0.0e+00 (step 1) | ")
    assert lines[-1].endswith("compute fp32, master fp32")
    content = json.loads(to_json(content_of(shown)))
    assert content["jsons"][1]["largest_loss_difference"] == 0.25
    assert content["jsons"][0]["largest_grad_norm_difference"] is None
