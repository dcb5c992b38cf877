"""`z2all bench floor` on a tiny model; the figures are compared with the FLOP accounting."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from tests.helpers.command import one_line, z2all
from tests.helpers.training import MICRO_OVERRIDES
from z2all_ds.base.accounting import count_matmul_parameters, flops_per_token, peak_flops
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.reports import Table, to_json
from z2all_ds.bench import floor as module
from z2all_ds.bench.floor import Attention, describe, measure_floor
from z2all_ds.bench.products import PRODUCTS
from z2all_ds.bench.shared import Report

CPU = torch.device("cpu")
TOKENS = 2 * 32


def micro_run(*changes: str) -> RunConfig:
    return load_run_config(None, [*MICRO_OVERRIDES, *changes])


@pytest.fixture(scope="module")
def floor() -> Report:
    return measure_floor(micro_run(), CPU, rounds=2)


def test_every_product_has_a_row(floor: Report) -> None:
    products = [f"{name} {way}" for name in ("qkv", "o", "gate_up", "down", "head") for way in PRODUCTS]
    assert [row["name"] for row in floor["rows"]] == [*products, "attention forward", "attention backward"]
    assert [row["count"] for row in floor["rows"]] == [2] * 12 + [1] * 3 + [2] * 2
    for row in floor["rows"]:
        assert row["teraflops_per_second"] == pytest.approx(row["flops"] / row["milliseconds"] / 1e9)


def test_the_flops_of_all_rows_equal_the_exact_convention(floor: Report) -> None:
    shape = micro_run().model.shape
    products = sum(row["count"] * row["flops"] for row in floor["rows"] if not row["name"].startswith("attention"))
    attention = sum(row["count"] * row["flops"] for row in floor["rows"] if row["name"].startswith("attention"))
    assert products == TOKENS * 6 * count_matmul_parameters(shape)
    assert products + attention == TOKENS * flops_per_token(shape, 32, "exact")


def test_the_total_time_is_the_sum_of_the_rows(floor: Report) -> None:
    microseconds = sum(row["count"] * row["milliseconds"] for row in floor["rows"]) * 1e3
    assert floor["microseconds_per_token"] == pytest.approx(microseconds / TOKENS)
    assert floor["tokens_per_second"] == pytest.approx(1e6 * TOKENS / microseconds)
    assert floor["mfu_origin"] is None and floor["mfu_exact"] is None  # no peak is known for a CPU


def test_the_json_report_contains_every_figure(floor: Report) -> None:
    read = json.loads(to_json(floor))
    assert read == floor
    assert (read["dtype"], read["micro_batch"], read["sequence_length"], read["rounds"]) == ("float32", 2, 32, 2)


def test_describe_gives_one_table_row_per_measurement(floor: Report) -> None:
    head, table, attention, total = describe(floor)
    assert "2 × 32 tokens" in str(head) and torch.__version__ in str(head)
    assert isinstance(table, Table) and [*table.columns] == ["", "count", "ms", "TFLOP/s"]
    assert [cells[0] for cells in table.rows] == [row["name"] for row in floor["rows"]]
    assert str(attention).startswith("attention: flash ")
    assert f"{floor['tokens_per_second']:,.0f} tok/s" in str(total)


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_attention_is_measured_with_one_and_with_all_key_heads(num_kv_heads: int) -> None:
    shape = micro_run(f"model.num_key_value_heads={num_kv_heads}").model.shape
    seconds = Attention(shape, 1, 7, CPU, torch.float32).measure(SDPBackend.FLASH_ATTENTION)
    assert list(seconds) == ["forward", "backward"] and min(seconds.values()) > 0


@pytest.mark.parametrize("with_flash", [True, False])
def test_an_attention_backend_that_does_not_run_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, with_flash: bool
) -> None:
    kinds = {"efficient": SDPBackend.EFFICIENT_ATTENTION}  # torch has this kernel for GPUs only
    monkeypatch.setitem(
        module.ATTENTION_BACKENDS, "cpu", {**kinds, "flash": SDPBackend.FLASH_ATTENTION} if with_flash else kinds
    )
    if not with_flash:
        with pytest.raises(MachineError, match=r"no backend of torch runs it \(efficient: "):
            measure_floor(micro_run(), CPU, rounds=1)
        return
    floor = measure_floor(micro_run(), CPU, rounds=1)
    efficient, flash = floor["attention_backends"]
    assert efficient["failed"] and not efficient["seconds"]
    assert (flash["name"], flash["failed"], floor["attention_backend"]) == ("flash", "", "flash")
    assert f"efficient does not run ({efficient['failed']})" in str(list(describe(floor))[-2])


def test_the_rows_use_the_fastest_attention_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    monkeypatch.setitem(module.ATTENTION_BACKENDS, "cpu", both)
    floor = measure_floor(micro_run(), CPU, rounds=1)
    fastest = min(floor["attention_backends"], key=lambda one: sum(one["seconds"].values()))
    assert len(floor["attention_backends"]) == 2
    assert floor["attention_backend"] == fastest["name"]
    seconds = [row["milliseconds"] / 1e3 for row in floor["rows"][-2:]]
    assert seconds == pytest.approx(list(fastest["seconds"].values()))


def test_zero_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="rounds=0"):
        measure_floor(micro_run(), CPU, rounds=0)


def test_the_command_prints_all_rows_as_json(tmp_path: Path) -> None:
    answer = z2all("bench", "floor", "--rounds", "1", "--json", *MICRO_OVERRIDES, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert len(json.loads(answer.stdout)["rows"]) == 17


def test_invalid_and_too_large_settings_are_refused_with_one_line(tmp_path: Path) -> None:
    line = one_line(z2all("bench", "floor", "model.hidden_size=0", cwd=tmp_path), 2)
    assert line.startswith("ConfigError: model.hidden_size=0")
    line = one_line(z2all("bench", "floor", "model.vocab_size=2000000000", cwd=tmp_path), 6)
    assert "head (4096 tokens, 2048 to 2000000000) needs" in line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_the_rates_on_a_gpu_are_below_its_peak() -> None:
    changes = ("model.hidden_size=1024", "model.intermediate_size=2816", "model.num_attention_heads=16")
    sizes = ("model.max_position_embeddings=1024", "train.sequence_length=1024", "train.micro_batch=4")
    device = torch.device("cuda", 0)
    floor = measure_floor(micro_run(*changes, *sizes), device, rounds=2)
    assert floor["dtype"] == "bfloat16" and floor["measured_on"]["cuda"]
    assert [one["name"] for one in floor["attention_backends"]] == ["cudnn", "flash", "efficient"]
    assert floor["attention_backend"] in ("cudnn", "flash", "efficient")
    peak = peak_flops(floor["measured_on"]["device"]) or pytest.skip("no peak known for this GPU")
    # A rate above the peak would mean that a call was not waited for, or not executed.
    assert all(0 < row["teraflops_per_second"] * 1e12 < peak for row in floor["rows"])
    assert floor["mfu_exact"] is not None and 0 < floor["mfu_exact"] < 1
