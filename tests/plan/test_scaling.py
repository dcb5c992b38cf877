"""Predicted scaling: rules for the curve, its plot, and goodput in closed form compared with simulated failures."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import print_lines, to_json
from z2all_ds.plan import Risks, Wishes, estimate, make_fleet
from z2all_ds.plan.outlook import look_ahead
from z2all_ds.plan.scaling import (
    MOST_GPUS,
    SWEPT,
    Sweep,
    at_size,
    content_of,
    describe,
    draw,
    missing,
    parse_sweep,
    show_sweep,
    sweep,
)

RUN = load_run_config("z2all_1b")
SIZES = (8, 64, 512, 4096)
FIXED_WORK = (64, 512, 4096, 32_768)
"""From 64 GPUs on, each GPU has one micro-batch of 8 samples, and beyond 64 the batch grows from 512."""


@cache
def swept(network: str = "ib400", sizes: tuple[int, ...] = SIZES, gpu: str = "h100", adapters: int = 4) -> Sweep:
    fleet = make_fleet(Wishes(gpus=max(sizes), gpu=gpu, network=network, adapters=adapters))
    return sweep(RUN, fleet, sizes, 10**12, Risks())


@pytest.mark.parametrize(
    ("text", "sizes"), [("gpus=8", [8]), ("gpus=64,8, 512", [8, 64, 512]), (" gpus =1,1,1000000", [1, 1_000_000])]
)
def test_valid_sweeps_are_parsed(text: str, sizes: list[int]) -> None:
    assert parse_sweep(text) == sizes


@given(st.lists(st.integers(1, MOST_GPUS), min_size=1))
def test_sizes_of_a_sweep_are_sorted_and_unique(sizes: list[int]) -> None:
    assert parse_sweep(f"gpus={','.join(map(str, sizes))}") == sorted(set(sizes))


@pytest.mark.parametrize(
    "text",
    ["", "8,64", "gpus", "gpus=", "gpus=0", "gpus=-8", "gpus=8,,64", "gpus=1000001", "layers=3", "gpus=8.5", "gpus=²"],
)
def test_invalid_sweeps_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must read gpus=N,N") as raised:
        parse_sweep(text)
    assert str(raised.value).startswith(f"--sweep {text}") and "\n" not in str(raised.value)


@pytest.mark.parametrize("network", ["eth10", "eth100", "ib400"])
def test_efficiency_never_rises_with_constant_work_per_gpu(network: str) -> None:
    found = swept(network, FIXED_WORK)
    for name in ("zero1", "zero2", "zero3", "zero3_hpz"):
        points = found.points[name]
        assert [point.gpus for point in points] == list(FIXED_WORK)
        work = {point.of.tokens_per_step // point.gpus for point in points}
        assert work == {8 * RUN.train.sequence_length}
        for smaller, larger in pairwise(points):
            assert larger.efficiency[0] <= smaller.efficiency[0] and larger.efficiency[1] <= smaller.efficiency[1]


@pytest.mark.parametrize("network", ["eth1", "ib400"])
def test_efficiency_is_between_zero_and_one(network: str) -> None:
    for points in swept(network).points.values():
        for point in points:
            low, high = point.efficiency
            assert 0 < low <= high <= 1


def test_communication_dominates_sooner_on_a_slow_network() -> None:
    sizes = (8, 16, 32, 64)
    slow, fast = swept("eth1", sizes, adapters=1), swept("ib400", sizes, adapters=8)
    for name in ("zero1", "zero2", "zero3"):
        assert slow.takes_over(name) == 16  # the smallest size with a network between machines
        assert fast.takes_over(name) is None
    time = slow.points["zero1"][1].of.time
    assert time is not None and time.hidden + time.exposed > time.compute


def test_the_batch_is_kept_while_it_can_be_split_and_grows_beyond_that() -> None:
    batches = {size: at_size(RUN, size).train.global_batch for size in (1, 2, 8, 64, 128, 512, 4096)}
    assert batches == {1: 512, 2: 512, 8: 512, 64: 512, 128: 1024, 512: 4096, 4096: 32_768}
    assert at_size(RUN, 24).train.global_batch == 3 * 8 * 24  # the nearest possible batch
    for size, batch in batches.items():
        found = estimate(at_size(RUN, size), make_fleet(Wishes(gpus=size, gpu="h100")))
        assert found.micro_batch * found.resolved.accumulation * size == batch


def test_goodput_falls_with_size() -> None:
    for name in ("zero1", "zero2", "zero3"):
        shares = [point.outlook.goodput for point in swept().points[name]]
        assert len(shares) == len(SIZES) and all(larger < smaller for smaller, larger in pairwise(shares))
        assert 0 < shares[-1] < shares[0] < 1


@pytest.mark.parametrize("restart", [60.0, 1200.0])
def test_simulated_failures_of_ten_thousand_gpus_agree_with_the_closed_form(restart: float) -> None:
    fleet = make_fleet(Wishes(gpus=10_000, gpu="h100", network="ib400", adapters=4))
    outlook = look_ahead(estimate(at_size(RUN, 10_000), fleet), 10**16, Risks(restart_seconds=restart))
    assert outlook is not None
    seen = outlook.simulated
    assert seen.failures > 100  # enough failures to compare
    assert abs(seen.goodput - outlook.goodput) < 4 * seen.error + 2e-3
    assert 0 < seen.error < 0.01


def test_hpz_needs_several_machines() -> None:
    assert [point.gpus for point in swept().points["zero3_hpz"]] == [64, 512, 4096]


def test_a_gpu_without_bf16_is_swept_in_fp16() -> None:
    found = swept(gpu="v100-32", sizes=(8, 64))
    assert found.points["zero2"] == ()
    reported = missing(RUN, found)
    assert any(line.startswith("zero2 is left out on 8, 64 GPUs") for line in reported)
    assert {point.of.resolved.dtype for points in found.points.values() for point in points} <= {"fp16"}


def test_jsons_that_do_not_fit_are_reported() -> None:
    run = load_run_config("z2all_7b")
    fleet = make_fleet(Wishes(gpus=64, gpu="rtx4090"))
    found = sweep(run, fleet, (8, 64), 10**12, Risks())
    assert found.points["zero1"] == () and [point.gpus for point in found.points["zero3"]] == [64]
    reported = missing(run, found)
    assert reported[0].startswith("zero1 is left out on 8, 64 GPUs: it does not fit with micro-batches of 1")
    assert any(line.startswith("zero3 is left out on 8 GPUs: it does not fit") for line in reported)


def test_partial_machines_and_unknown_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--sweep gpus=12: must be whole machines of 8"):
        sweep(RUN, make_fleet(Wishes(gpus=64, gpu="h100")), (12, 64), 10**12, Risks())
    with pytest.raises(ConfigError, match=r"^--sweep: needs the speed of a GPU. Give --gpu"):
        sweep(RUN, make_fleet(Wishes(gpus=64)), (8, 64), 10**12, Risks())


# Text, JSON and plot


def test_the_printed_table_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(describe(swept(), ("one thing",)))
    text = capsys.readouterr().out
    assert "…" not in text and "- one thing" in text
    for size in SIZES:
        (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{size:,} ")]
        assert line.count("%") >= 6
    for name in SWEPT:
        first = swept().takes_over(name)
        reported = f"from {first:,} GPUs on" if first else "on none of these"
        assert f"{name}: sending takes longer than computing {reported}." in text


def test_long_spans_of_days_are_not_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = make_fleet(Wishes(gpus=4096, gpu="h100", network="eth1"))
    found = sweep(RUN, fleet, SIZES, 10**16, Risks())
    print_lines(describe(found, ()))
    text = capsys.readouterr().out
    low, high = found.points["zero3"][1].outlook.days
    assert low > 10_000 and f"{low:,.1f} to {high:,.1f}" in text and "…" not in text


def test_the_json_of_a_sweep_has_consistent_figures() -> None:
    document = json.loads(to_json(content_of(swept("eth10"), ("one thing",))))
    assert document["assumptions"] == ["one thing"]
    assert document["sending_takes_over_at"]["zero2"] == 64
    for point in document["points"]["zero2"]:
        seconds = point["step_seconds"]
        assert point["efficiency"][0] == pytest.approx(seconds["compute"] / seconds["most"])
        assert point["memory_bytes"] > 0 and 0 < point["outlook"]["goodput"] < 1


@pytest.mark.parametrize(("name", "start"), [("curve.png", b"\x89PNG\r\n\x1a\n"), ("new/curve.svg", b"<?xml")])
def test_the_plot_is_written(name: str, start: bytes, tmp_path: Path) -> None:
    out = draw(swept(sizes=(8, 64)), tmp_path / name)
    assert out.read_bytes().startswith(start)
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["curve.pdf", "curve", "folder.png"])
def test_invalid_plot_paths_are_refused_before_anything_is_printed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    asked: dict[str, Any] = {"tokens": None, "risks": Risks(), "as_json": False, "out": tmp_path / name}
    with pytest.raises(ConfigError) as raised:
        show_sweep(RUN, Wishes(gpu="h100"), "gpus=8", **asked)
    assert "\n" not in str(raised.value) and str(tmp_path / name) in str(raised.value)
    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]
