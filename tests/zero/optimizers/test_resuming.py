"""Tests of resuming: every optimizer that runs on a CPU trains under ZeRO and resumes from a checkpoint bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.training import launch_script
from z2all_ds.base.machine import default_environment
from z2all_ds.zero.op_builds import prebuild
from z2all_ds.zero.optimizers import KINDS, OptimizerSituation

pytestmark = pytest.mark.extended

RANK = Path(__file__).with_name("resuming.py")
STEPS = 8
KINDS_HERE = ["adamw", "adamw_bf16", "lion", "adafactor", "adamw_8bit"]
JSONS = ["zero0", "zero1", "zero2", "zero3"]
BF16_WEIGHTS = ("kahan", "stochastic")
TENSORS = {
    "adamw": {"exp_avg": "torch.float32", "exp_avg_sq": "torch.float32"},
    "adamw_bf16": {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16"},
    "lion": {"momentum": "torch.float32"},
    "adafactor": {"variance": "torch.float32"},
    "ds_cpu_adam": {"exp_avg": "torch.float32", "exp_avg_sq": "torch.float32"},
}


def case(kind: str, deepspeed: str, *overrides: str, name: str = "", **more: str) -> dict[str, Any]:
    name = name or f"{kind}-{deepspeed}"
    lr = 0.2 if kind == "adafactor" else 0.01  # Adafactor's steps are relative to the scale of the weights, 0.02
    return {"name": name, "kind": kind, "lr": lr, "deepspeed": deepspeed, "overrides": list(overrides), **more}


def write_json_of_bf16_weights(folder: Path, stage: int) -> str:
    path = folder / f"bf16_weights_{stage}.json"
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    # bf16 accumulation, because with fp32 accumulation DeepSpeed keeps fp32 master weights at stage 1.
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "bf16": bf16,
                                "data_types": {"grad_accum_dtype": "bf16"}}))  # fmt: skip
    return str(path)


def runs_here(kind: str) -> str | None:
    return KINDS[kind].why_not(OptimizerSituation("cpu", stage=2, offload=False))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the outcome of every case on one rank, by name."""
    folder = tmp_path_factory.mktemp("alone")
    prebuild(["deepspeed_shm_comm", "cpu_adam"])
    plan = [case(kind, name) for kind in KINDS_HERE if runs_here(kind) is None for name in JSONS]
    plan += [case("auto", "zero2"), case("ds_cpu_adam", "zero2_offload"), case("auto", "zero2_offload")]
    plan += [case("adamw_bf16", "zero1", "train.precision=bf16", name="bf16-own-optimizer")]
    for rounding in BF16_WEIGHTS:
        for stage in (1, 2, 3):
            path = write_json_of_bf16_weights(folder, stage)
            settings = ("train.precision=bf16", f"optimizer.rounding={rounding}")
            plan += [case("adamw_bf16", path, *settings, name=f"{rounding}-{stage}")]
    plan += [case("adamw", "zero2", name="to-lion", resume_kind="lion")]
    plan += [case("lion", "zero3", name="to-adamw", resume_kind="adamw")]
    file = folder / "plan.json"
    file.write_text(json.dumps(plan))
    command = [sys.executable, str(RANK), str(file)]
    result = subprocess.run(
        command, env={**os.environ, **default_environment(1)}, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return dict(json.loads((folder / "outcomes_0.json").read_text()))


def assert_resumed_bitwise(outcome: dict[str, Any]) -> None:
    assert outcome["resumed"] == outcome["losses"][STEPS // 2 :]
    assert outcome["resumed_state"] == outcome["state"]
    assert outcome["losses"][-1] < 0.9 * outcome["losses"][0]
    assert len(outcome["losses"]) == STEPS


@pytest.mark.parametrize("name", JSONS)
@pytest.mark.parametrize("kind", KINDS_HERE)
def test_a_resumed_run_is_bit_identical(kind: str, name: str, alone: dict[str, dict[str, Any]]) -> None:
    if refusal := runs_here(kind):
        pytest.skip(f"{kind}: {refusal}")
    outcome = alone[f"{kind}-{name}"]
    assert_resumed_bitwise(outcome)
    if kind in TENSORS and not (kind == "adafactor" and name == "zero0"):
        kept = {key: dtype for key, dtype, _ in outcome["state"] if key not in ("weight", "step")}
        assert kept == TENSORS[kind]


def test_adafactor_factors_only_without_zero(alone: dict[str, dict[str, Any]]) -> None:
    keys = {name: {key for key, *_ in alone[f"adafactor-{name}"]["state"]} for name in JSONS}
    assert {"row_var", "col_var"} <= keys["zero0"]
    assert not any({"row_var", "col_var"} & keys[name] for name in JSONS[1:])


@pytest.mark.parametrize("rounding", BF16_WEIGHTS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_weights_resume_bitwise(rounding: str, stage: int, alone: dict[str, dict[str, Any]]) -> None:
    outcome = alone[f"{rounding}-{stage}"]
    assert_resumed_bitwise(outcome)
    kept = {key: dtype for key, dtype, _ in outcome["state"]}
    assert kept.pop("compensation", None) == ("torch.int16" if rounding == "kahan" else None)
    assert kept == {"weight": "torch.bfloat16", "exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16"}


def test_deepspeeds_own_optimizer_for_bf16_has_an_fp32_master(alone: dict[str, dict[str, Any]]) -> None:
    outcome = alone["bf16-own-optimizer"]
    assert_resumed_bitwise(outcome)
    kept = {key: dtype for key, dtype, _ in outcome["state"]}
    assert kept == {"weight": "torch.float32", "exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16"}


@pytest.mark.parametrize("kind", ["ds_cpu_adam", "auto"])
def test_offloaded_state_resumes_bitwise(kind: str, alone: dict[str, dict[str, Any]]) -> None:
    outcome = alone[f"{kind}-zero2_offload"]
    assert_resumed_bitwise(outcome)
    assert {key: dtype for key, dtype, _ in outcome["state"] if key != "weight"} == TENSORS["ds_cpu_adam"]
    assert outcome == alone["ds_cpu_adam-zero2_offload"]


def test_auto_is_torchs_adamw(alone: dict[str, dict[str, Any]]) -> None:
    assert alone["auto-zero2"] == alone["adamw-zero2"]


def test_lion_gives_the_same_losses_under_every_stage(alone: dict[str, dict[str, Any]]) -> None:
    """The steps of Lion do not depend on the layout of the weights, so stages differ only by rounding of sums."""
    for name in JSONS[1:]:
        assert alone[f"lion-{name}"]["losses"] == pytest.approx(alone["lion-zero0"]["losses"], rel=1e-4)


@pytest.mark.parametrize(("name", "saved", "asked"), [("to-lion", "adamw", "lion"), ("to-adamw", "lion", "adamw")])
def test_the_state_of_another_kind_is_refused(
    name: str, saved: str, asked: str, alone: dict[str, dict[str, Any]]
) -> None:
    assert alone[name]["error"] == (
        f"CheckpointError: the checkpoint's optimizer is {saved}: this run uses {asked}, which has an"
        f" incompatible optimizer state. Set optimizer.kind={saved}, or export the checkpoint and start a new run."
    )


def test_two_ranks_resume_bitwise(tmp_path: Path) -> None:
    plan = [case("adamw_bf16", name) for name in ("zero0", "zero2", "zero3")]
    bf16_weights = write_json_of_bf16_weights(tmp_path, 2)
    plan += [case("adamw_bf16", bf16_weights, "train.precision=bf16", name="kahan"), case("lion", "zero1")]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    result = launch_script(RANK, str(file), ranks=2)
    assert result.returncode == 0, result.stderr[-5000:]
    ranks = [json.loads((tmp_path / f"outcomes_{rank}.json").read_text()) for rank in range(2)]
    for outcomes in ranks:
        for one in plan:
            assert_resumed_bitwise(outcomes[one["name"]])
    # Replicas use the same noise and stay equal; partitions hold different weights.
    assert ranks[0]["adamw_bf16-zero0"]["state"] == ranks[1]["adamw_bf16-zero0"]["state"]
    assert ranks[0]["adamw_bf16-zero2"]["state"] != ranks[1]["adamw_bf16-zero2"]["state"]
