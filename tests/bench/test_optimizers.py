"""`z2all bench optimizers`: the measured state sizes equal those stated in the registry."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.command import one_line, z2all
from tests.ops.comparing import on_gpu
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import print_lines
from z2all_ds.bench.optimizers import bench_optimizers, describe, state_bytes
from z2all_ds.zero.optimizers import KINDS

PARAMETERS = 100_000
ROUNDED_UP = 100_096
CODE_BOOKS = 2 * 256 * 4
"""Bytes that an 8-bit optimizer needs once, for two tables of 256 fp32 values."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    answer = z2all(
        "bench", "optimizers", "--json", "--parameters", str(PARAMETERS), cwd=tmp_path_factory.mktemp("bench")
    )
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout))


def test_fields_of_the_json_report(report: dict[str, Any]) -> None:
    assert set(report) == {"measured_on", "parameters", "optimizers", "refused"}
    assert report["parameters"] == ROUNDED_UP
    assert set(report["measured_on"]) >= {"device", "torch"}
    for row in report["optimizers"]:
        assert list(row) == [
            "kind",
            "weights",
            "rounding",
            "device",
            "state_bytes_stated",
            "state_bytes_measured",
            "step_bytes_stated",
            "step_bytes_measured",
            "milliseconds_per_step",
        ]
        assert row["milliseconds_per_step"] > 0


def test_every_kind_is_measured_or_refused_with_a_reason(report: dict[str, Any]) -> None:
    measured = [row["kind"] for row in report["optimizers"]]
    refused = {row["kind"]: row["reason"] for row in report["refused"]}
    assert {*measured, *refused} == set(KINDS) and not set(measured) & set(refused)
    assert {"adamw", "ds_cpu_adam", "adamw_bf16", "lion", "adafactor"} <= set(measured)
    assert refused["ds_fused_adam"] == refused["apex_adam"] == "needs a GPU, the model is on cpu"
    assert measured.count("adamw_bf16") == 3


def assert_as_stated(row: dict[str, Any], parameters: int) -> None:
    more = (row["state_bytes_measured"] - row["state_bytes_stated"]) * parameters
    assert 0 <= round(more) <= (CODE_BOOKS if row["kind"] == "adamw_8bit" else 0), row


def test_measured_state_sizes_equal_the_stated_ones(report: dict[str, Any]) -> None:
    for row in report["optimizers"]:
        assert_as_stated(row, ROUNDED_UP)
    found = {
        (row["kind"], row["weights"], row["rounding"]): row["state_bytes_measured"] for row in report["optimizers"]
    }
    found = {
        key: value for key, value in found.items() if key[0] != "adamw_8bit"
    }  # only present if torchao is installed
    assert found == {
        ("adamw", "fp32", None): 8,
        ("ds_cpu_adam", "fp32", None): 8,
        ("adamw_bf16", "fp32", None): 4,
        ("lion", "fp32", None): 4,
        ("adafactor", "fp32", None): 4,
        ("adamw_bf16", "bf16", "kahan"): 6,
        ("adamw_bf16", "bf16", "stochastic"): 4,
    }


@pytest.mark.parametrize("marked", [pytest.param("cuda", marks=on_gpu)])
def test_measured_state_sizes_equal_the_stated_ones_on_a_gpu(marked: str) -> None:
    report = bench_optimizers(1 << 20)
    assert report["measured_on"]["device"] == torch.cuda.get_device_name(0)
    for cost in report["optimizers"]:
        assert_as_stated(cost, 1 << 20)
        if cost["step_bytes_stated"]:  # others take small chunks
            assert cost["step_bytes_measured"] == pytest.approx(cost["step_bytes_stated"], rel=0.05)
        assert cost["device"] == ("cpu" if cost["kind"] == "ds_cpu_adam" else marked)
    kinds = {cost["kind"] for cost in report["optimizers"]}
    assert {"adamw", "ds_fused_adam", "ds_cpu_adam", "adamw_bf16", "lion"} <= kinds
    # A library may be missing, but every installed one must work.
    assert not [refusal for refusal in report["refused"] if refusal["reason"].startswith("fails")]


def test_describe_gives_a_table_with_measured_and_refused_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    figures: dict[str, float | None] = {"state_bytes_stated": 6.0, "state_bytes_measured": 6.0}
    figures["milliseconds_per_step"] = 1.25
    figures |= {"step_bytes_stated": 0.0, "step_bytes_measured": None}
    cost = {"kind": "adamw_bf16", "weights": "bf16", "rounding": "kahan", "device": "cpu", **figures}
    refused = {"kind": "apex_adam", "reason": "needs a GPU, the model is on cpu"}
    facts = {"device": "a CPU", "torch": "2"}
    print_lines(describe({"measured_on": facts, "parameters": 10_000, "optimizers": [cost], "refused": [refused]}))
    assert capsys.readouterr().out.splitlines() == [
        "a CPU | torch 2 | 10,000 parameters",
        "kind        weights     state bytes  stated  step bytes  stated  ms/step",
        "adamw_bf16  bf16 kahan         6.00    6.00           -    0.00     1.25",
        "apex_adam   needs a GPU, the model is on cpu",
    ]


def test_state_bytes_ignores_step_counters() -> None:
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.zeros(100)
    assert state_bytes(optimizer) == 0
    optimizer.step()
    assert state_bytes(optimizer) == 800


def test_too_few_parameters_are_refused(tmp_path: Path) -> None:
    line = one_line(z2all("bench", "optimizers", "--parameters", "100", cwd=tmp_path), ConfigError.exit_code)
    assert line.endswith("parameters=100: must be at least 4096. Give more.")
