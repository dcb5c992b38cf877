"""The plan as people and programs read it."""

import io
import json

import pytest

from z2all_ds.errors import ConfigError
from z2all_ds.plan import plan_table, render, to_json


def test_rows_say_what_is_left() -> None:
    plan = plan_table(7_500_000_000, 64, gpu_memory_bytes=40 * 10**9)
    by_name = {row.name: row for row in plan.rows}
    assert list(by_name) == ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
    assert by_name["zero0"].bytes_left == 40 * 10**9 - 120 * 10**9
    assert by_name["zero0"].states_fit is False
    assert by_name["zero1"].states_fit is True


def test_printed_plan_admits_what_is_missing() -> None:
    printed = io.StringIO()
    render(plan_table(7_500_000_000, 64, gpu_memory_bytes=40 * 10**9), file=printed)
    text = " ".join(printed.getvalue().split())
    assert "zero2 15.0 0.2 0.0 0.5 0.9 16.6 0.0 23.4" in text
    assert "NOT counted yet: activations, logits, communication buckets" in text
    assert "Of the 40.0 GB given per GPU, this is left for the uncounted parts: 8.6 GB (zero1)" in text
    assert "do not fit under zero0" in text


def test_without_memory_nothing_is_claimed_to_fit() -> None:
    plan = plan_table(1000, 1)
    printed = io.StringIO()
    render(plan, file=printed)
    assert "left" not in printed.getvalue().splitlines()[2]
    assert {row.states_fit for row in plan.rows} == {None}


def test_nothing_fits() -> None:
    plan = plan_table(10**12, 1, gpu_memory_bytes=10**9)
    assert any("larger under every choice" in line for line in plan.assumptions)


def test_a_choice_deepspeed_refuses_is_left_out_and_told() -> None:
    plan = plan_table(1000, 2, accumulation_dtype="fp32")
    assert plan.rows[0].name == "zero1"
    assert any(line.startswith("zero0 is left out") for line in plan.assumptions)


def test_json_has_bytes() -> None:
    document = json.loads(to_json(plan_table(1000, 4, gpu_memory_bytes=10**9)))
    assert document["rows"][3]["states"] == {
        "weights": 500,
        "gradients": 500,
        "accumulation": 0,
        "master_weights": 1000,
        "moments": 2000,
        "host": 0,
        "gpu": 4000,
    }
    assert document["rows"][3]["states_fit"] is True


def test_bad_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="GPU memory = 0"):
        plan_table(1000, 4, gpu_memory_bytes=0)
