"""The plan as text and as JSON, with every figure and without claims about unknown values, and as a run config."""

import contextlib
import io
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import print_lines, to_json
from z2all_ds.plan import Plan, Risks, Wishes, content_of, describe, make_fleet, make_plan
from z2all_ds.plan.memory import GpuMemory
from z2all_ds.plan.report import PARTS, span, write_choice

PARAMETERS_1B = 1_255_499_776


def plan_for(model: str = "z2all_1b", *overrides: str, tokens: int | None = None, **wishes: Any) -> Plan:
    return make_plan(load_run_config(model, list(overrides)), make_fleet(Wishes(**wishes)), tokens, Risks())


def printed(plan: Plan) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        print_lines(describe(plan))
    return output.getvalue()


def cells(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{label} ")]
    return line.removeprefix(label).split()


def test_every_part_of_memory_has_a_line() -> None:
    assert set(PARTS) == {part.name for part in fields(GpuMemory)} - {"host", "disk"}


@pytest.mark.parametrize(("model", "gpus"), [("z2all_1b", 1), ("z2all_7b", 64)])
def test_each_json_has_a_column_with_its_figures(model: str, gpus: int) -> None:
    plan = plan_for(model, gpus=gpus, gpu="h100")
    text = printed(plan)
    assert cells(text, "total") == [f"{row.memory.total / 1e9:.1f}" for row in plan.rows]
    assert cells(text, "left of 85.5") == [f"{(row.left or 0) / 1e9:.1f}" for row in plan.rows]
    expected = [f"{row.time.most:.3f}" if row.time else "-" for row in plan.rows]
    assert cells(text, "step, s at most") == expected and expected.count("-") == 1  # zero0 is fp32
    assert "zero3_hpz" in [row.name for row in plan.rows] if gpus > 8 else "hpz" not in text.split("Assumed:")[0]


@pytest.mark.parametrize(
    "wishes",
    [{}, {"gpus": 8, "gpu": "rtx4090"}, {"gpus": 64, "gpu": "h100"}, {"gpus": 64, "gpu": "v100-16"}],
    ids=str,
)
def test_the_printed_plan_is_not_truncated(wishes: dict[str, Any]) -> None:
    text = printed(plan_for(**wishes))
    assert "…" not in text
    table = text[: text.index("tokens/s") if "tokens/s" in text else text.index("host memory")]
    assert max(map(len, table.splitlines())) <= 132


def test_the_users_own_json_is_shown_by_its_file_name(tmp_path: Path) -> None:
    own = tmp_path / ("deep_" * 5 + "own.json")
    own.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    plan = plan_for("z2all_1b", f"deepspeed={own}", gpus=64, gpu="h100")
    table = printed(plan).split("Assumed:")[0]
    assert plan.rows[-1].name == str(own)
    assert "…" not in table and table.count("deep") == 5 + table.count(str(own)) * 5


def test_all_assumptions_are_printed() -> None:
    plan = plan_for(gpus=64, gpu="h100")
    below = " ".join(printed(plan).split("Assumed:")[1].split())
    assert len(plan.assumptions) > 10
    for assumption in plan.assumptions:
        assert f"- {' '.join(assumption.split())}" in below
    for about in ("eth100", "nvlink4", "80%", "pcie4", "50,000 GPU hours", "300 s", "checkpointing none"):
        assert about in below, about


def test_without_gpu_memory_the_plan_does_not_state_what_fits() -> None:
    plan = plan_for(gpus=8)
    text = printed(plan)
    table, assumed = text.split("Assumed:")
    assert "fits" not in table and "left of" not in table and "to spare" not in table
    assert "the plan does not state what fits" in assumed
    document = json.loads(to_json(content_of(plan)))
    assert {row["fits"] for row in document["rows"]} == {None} == {row["bytes_left"] for row in document["rows"]}


def test_without_a_gpu_the_plan_does_not_state_times() -> None:
    plan = plan_for(gpus=8, gpu_memory="80GB")
    table, assumed = printed(plan).split("Assumed:")
    assert "step, s" not in table and "MFU" not in table and "days" not in table and "Failures" not in table
    assert "the plan does not state times" in assumed and "GPU hours" not in assumed
    document = json.loads(to_json(content_of(plan)))
    assert {row["step_seconds"] for row in document["rows"]} == {None}
    assert document["outlook"] is None
    assert plan.words[0].startswith("zero") and "to spare" in plan.words[0]


def test_the_plan_reports_that_nothing_fits() -> None:
    plan = plan_for("z2all_7b", gpu="rtx4090", gpu_memory="4GB")
    assert plan.ranked == () and plan.outlook is None
    least = min(plan.rows, key=lambda row: row.memory.total)
    assert least.left is not None and least.left < 0
    assert f"Nothing fits: the least is {least.name}, {-least.left / 1e9:.1f} GB too large" in printed(plan)
    assert {row["fits"] for row in json.loads(to_json(content_of(plan)))["rows"]} == {False}


def test_json_has_bytes_that_add_up() -> None:
    document = json.loads(to_json(content_of(plan_for(gpus=64, gpu="h100", tokens=10**12))))
    assert (document["parameters"], document["gpus"]) == (PARAMETERS_1B, 64)
    assert document["gpu_memory_bytes"] == 81_559 * 2**20
    rows = [*document["rows"], *document["ranked"]]
    assert len(rows) > 12
    for row in rows:
        memory = row["memory"]
        assert sum(memory[part] for part in PARTS) == memory["total"]
        assert memory["allocated"] == memory["total"] - memory["context"] - memory["fragmentation"]
        assert row["bytes_left"] == document["gpu_memory_bytes"] - memory["total"]
        assert row["fits"] is (row["bytes_left"] >= 0)
        assert sum(one["sent"] for one in row["collectives"]) == row["sent_bytes"] > 0
    by_name = {row["deepspeed"]: row["memory"] for row in document["rows"]}
    share = -(-PARAMETERS_1B // 64)
    assert by_name["zero2"]["weights"] == 2 * PARAMETERS_1B
    assert (by_name["zero3"]["weights"], by_name["zero3"]["master_weights"]) == (2 * share, 4 * share)
    assert by_name["zero1"]["moments"] == 8 * share
    assert document["outlook"]["tokens"] == 10**12


def test_bounds_of_step_time_and_mfu_are_consistent() -> None:
    plan = plan_for(gpus=64, gpu="h100")
    for row in json.loads(to_json(content_of(plan)))["rows"]:
        seconds = row["step_seconds"]
        if seconds is None:
            assert row["deepspeed"] == "zero0"
            continue
        assert 0 < seconds["least"] <= seconds["most"]
        for low, high in row["mfu"].values():
            assert 0 < low <= high < 1
            assert low * seconds["most"] == pytest.approx(high * seconds["least"])


def test_small_spans_keep_their_digits() -> None:
    spans = [span(pair) for pair in ((1234.56, 2000.0), (2.04, 2.01), (0.0271, 0.0341), (0.5, 1.5))]
    assert spans == ["1,234.6 to 2,000.0", "2.0", "0.027 to 0.034", "0.5 to 1.5"]


def test_jsons_that_are_left_out_are_listed_with_their_reasons() -> None:
    plan = plan_for(gpus=8, gpu="h100")
    assert "zero1_fp16 is left out: it is for GPUs without bf16." in plan.assumptions
    assert any(line.startswith("zero3_hpz is left out: with one machine") for line in plan.assumptions)


# The choice written as a run config

OVERRIDES = ["optimizer.lr=3e-4", "run_dir=runs/它's"]


def plan_7b(**wishes: Any) -> Plan:
    return plan_for("z2all_7b", *OVERRIDES, **wishes)


def test_the_written_config_has_the_chosen_settings(tmp_path: Path) -> None:
    plan = plan_7b(gpus=64, gpu="h100")
    out = tmp_path / "new" / "run.yaml"
    write_choice(plan, out)
    own, written, first = load_run_config("z2all_7b", OVERRIDES), load_run_config(str(out)), plan.ranked[0]
    assert plan.outlook is not None
    assert (written.deepspeed, written.train.micro_batch) == (first.name, first.micro_batch)
    assert written.checkpoint.every_steps == plan.outlook.interval_steps
    assert (own.deepspeed, own.train.micro_batch) != (first.name, first.micro_batch)  # the plan changed something
    chosen = {"deepspeed": own.deepspeed, "checkpoint": own.checkpoint, "train": own.train}
    assert written.model_copy(update=chosen) == own
    assert written.train.model_copy(update={"micro_batch": own.train.micro_batch}) == own.train
    assert [path.name for path in out.parent.iterdir()] == ["run.yaml"]


def test_without_times_the_checkpoint_settings_are_unchanged(tmp_path: Path) -> None:
    write_choice(plan_7b(gpus=64, gpu_memory="80GB"), tmp_path / "run.yml")
    written = load_run_config(str(tmp_path / "run.yml"))
    assert written.checkpoint == load_run_config("z2all_7b", OVERRIDES).checkpoint


def refusal(plan: Plan, path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        write_choice(plan, path)
    message = str(raised.value)
    assert "\n" not in message and message.startswith(f"--write {path}: ")
    return message


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    assert "is there already" in refusal(plan_7b(gpus=64, gpu="h100"), path)
    assert path.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["run.txt", "run", "run.json"])
def test_a_file_name_that_is_not_yaml_is_refused(name: str, tmp_path: Path) -> None:
    assert "must end in .yaml" in refusal(plan_7b(gpus=64, gpu="h100"), tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_if_nothing_fits(tmp_path: Path) -> None:
    message = refusal(plan_7b(gpu="rtx4090", gpu_memory="4GB"), tmp_path / "new" / "run.yaml")
    assert "nothing fits" in message and "too large" in message
    assert list(tmp_path.iterdir()) == []


def test_the_written_steps_follow_from_the_requested_tokens(tmp_path: Path) -> None:
    fleet = make_fleet(Wishes(gpus=64, gpu="h100"))
    plan = make_plan(load_run_config("z2all_1b"), fleet, 3_000_000_001, Risks())
    write_choice(plan, tmp_path / "planned.yaml")
    train = load_run_config(str(tmp_path / "planned.yaml")).train
    assert train.steps == -(-3_000_000_001 // (train.global_batch * train.sequence_length)) == 2862


def test_stages_that_the_tokens_do_not_reach_are_refused(tmp_path: Path) -> None:
    staged = "stages=[{name: a, steps: 1000}, {name: b}]"
    plan = make_plan(load_run_config("z2all_1b", [staged]), make_fleet(Wishes(gpus=64, gpu="h100")), 10**6, Risks())
    with pytest.raises(ConfigError, match=r"stage 'a' of 1000 steps: .* train\.steps=1"):
        write_choice(plan, tmp_path / "planned.yaml")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_refused_in_one_line() -> None:
    assert "cannot be written" in refusal(plan_7b(gpus=64, gpu="h100"), Path("/proc/planned.yaml"))
