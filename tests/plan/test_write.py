"""The choice as a run config: it loads, has what was chosen, and never takes the place of a file."""

from pathlib import Path
from typing import Any

import pytest
from z2all_ds.plan.write import write_choice

from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.plan import Plan, Risks, Wishes, make_fleet, make_plan

OVERRIDES = ["optimizer.lr=3e-4", "run_dir=runs/它's"]


def plan_for(model: str = "z2all_7b", **wishes: Any) -> Plan:
    return make_plan(load_run_config(model, OVERRIDES), make_fleet(Wishes(**wishes)), None, Risks())


def test_what_is_written_is_what_was_chosen(tmp_path: Path) -> None:
    plan = plan_for(gpus=64, gpu="h100")
    out = tmp_path / "new" / "run.yaml"
    write_choice(plan, out)
    own, written, first = load_run_config("z2all_7b", OVERRIDES), load_run_config(str(out)), plan.ranked[0]
    assert plan.outlook is not None
    assert (written.deepspeed, written.train.micro_batch) == (first.name, first.micro_batch)
    assert written.checkpoint.every_steps == plan.outlook.interval_steps
    assert (own.deepspeed, own.train.micro_batch) != (first.name, first.micro_batch)  # so there was a choice
    chosen = {"deepspeed": own.deepspeed, "checkpoint": own.checkpoint, "train": own.train}
    assert written.model_copy(update=chosen) == own
    assert written.train.model_copy(update={"micro_batch": own.train.micro_batch}) == own.train
    assert [path.name for path in out.parent.iterdir()] == ["run.yaml"]


def test_without_times_checkpoints_stay_as_they_were(tmp_path: Path) -> None:
    write_choice(plan_for(gpus=64, gpu_memory="80GB"), tmp_path / "run.yml")
    written = load_run_config(str(tmp_path / "run.yml"))
    assert written.checkpoint == load_run_config("z2all_7b", OVERRIDES).checkpoint


def refusal(plan: Plan, path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        write_choice(plan, path)
    message = str(raised.value)
    assert "\n" not in message and message.startswith(f"--write {path}: ")
    return message


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    assert "is there already" in refusal(plan_for(gpus=64, gpu="h100"), path)
    assert path.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["run.txt", "run", "run.json"])
def test_other_names_are_refused(name: str, tmp_path: Path) -> None:
    assert "must end in .yaml" in refusal(plan_for(gpus=64, gpu="h100"), tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_fits_nothing_is_written(tmp_path: Path) -> None:
    message = refusal(plan_for(gpu="rtx4090", gpu_memory="4GB"), tmp_path / "new" / "run.yaml")
    assert "nothing fits" in message and "too large" in message
    assert list(tmp_path.iterdir()) == []


def test_steps_are_those_of_the_tokens_asked_for(tmp_path: Path) -> None:
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


def test_a_place_that_takes_no_file_is_one_line() -> None:
    assert "cannot be written" in refusal(plan_for(gpus=64, gpu="h100"), Path("/proc/planned.yaml"))
