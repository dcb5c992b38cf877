"""Comparison of the reported dtypes with those of DeepSpeed's tensors, on two real ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fp16
from tests.helpers.training import launch_script
from tests.zero.engines import TINY_SHAPE

BF16 = {"bf16": {"enabled": True}}
OWN = {
    "stage1_sends_bf16": {**BF16, "zero_optimization": {"stage": 1}, "communication_data_type": "bf16"},
    "stage2_sends_bf16": {**BF16, "zero_optimization": {"stage": 2}, "communication_data_type": "bf16"},
    "stage1_adds_up_bf16": {
        **BF16,
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "bf16"},
    },
    "stage2_adds_up_bf16": {
        **BF16,
        "zero_optimization": {"stage": 2},
        "data_types": {"grad_accum_dtype": "bf16"},
    },
    "stage3_fp16": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 3}},
}
EXPECTED = {
    # compute, accumulation, communication, master
    "zero1": ("bf16", "fp32", "fp32", "fp32"),
    "zero2": ("bf16", "fp32", "fp32", "fp32"),
    "zero3": ("bf16", "fp32", "fp32", "fp32"),
    "zero2_offload": ("bf16", "fp32", "fp32", "fp32"),
    "zero3_offload_param": ("bf16", "fp32", "fp32", "fp32"),
    "zero1_fp16": ("fp16", "fp32", "fp32", "fp32"),
    "stage1_sends_bf16": ("bf16", "fp32", "bf16", "fp32"),
    "stage2_sends_bf16": ("bf16", "fp32", "bf16", "fp32"),
    "stage1_adds_up_bf16": ("bf16", "bf16", "bf16", "fp32"),
    "stage2_adds_up_bf16": ("bf16", "bf16", "bf16", "fp32"),
    "stage3_fp16": ("fp16", "fp32", "fp32", "fp32"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("dtypes")
    for name, content in OWN.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    names = [name for name in EXPECTED if fp16.is_known_here() or not name.endswith("fp16")]
    jsons = [folder / f"{name}.json" if name in OWN else name for name in names]
    plan = folder / "plan"
    plan.write_text(json.dumps([[*TINY_SHAPE, f"deepspeed={name}"] for name in jsons]))
    result = launch_script(Path(__file__).with_name("dtype_ranks.py"), str(plan))
    assert result.returncode == 0, result.stderr
    return dict(zip(names, json.loads((folder / "dtypes.json").read_text()), strict=True))


@pytest.mark.parametrize("name", EXPECTED)
def test_reported_dtypes_are_those_of_deepspeeds_tensors(name: str, answers: dict[str, Any]) -> None:
    if name not in answers:
        pytest.skip(fp16.WHY_NOT)
    expected = dict(zip(("compute", "accumulation", "communication", "master"), EXPECTED[name], strict=True))
    assert answers[name]["said"] == expected
    assert answers[name]["found"] == expected
