"""The choice of a ZeRO JSON and a micro-batch: all that fit in order, and an explanation that matches the figures."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.plan import Estimate, Fleet, Wishes, estimate, make_fleet, with_json
from z2all_ds.plan.choose import AS_FAST, SHIPPED, candidates, explain, micro_batches, rank
from z2all_ds.plan.estimate import StepTime
from z2all_ds.plan.hardware import GPUS

RUN = load_run_config("z2all_1b")


def fleet_of(**wishes: Any) -> Fleet:
    return make_fleet(Wishes(**wishes))


def ranked_on(run: RunConfig = RUN, **wishes: Any) -> list[Estimate]:
    fleet = fleet_of(**wishes)
    return rank(run, fleet, candidates(run, fleet)[0])


def most(one: Estimate) -> float:
    assert one.time is not None
    return one.time.most


@pytest.mark.parametrize("network", ["eth10", "eth100", "ib400"])
def test_the_fastest_json_that_fits_comes_first(network: str) -> None:
    ranked = ranked_on(gpus=64, gpu="h100", network=network)
    assert len(ranked) > 5
    fastest = min(map(most, ranked))
    assert most(ranked[0]) <= fastest * (1 + AS_FAST)
    for before, after in pairwise(ranked):
        assert most(before) <= most(after) + AS_FAST * fastest


def test_each_json_is_ranked_once_with_its_fastest_micro_batch() -> None:
    fleet = fleet_of(gpus=8, gpu="h100")
    rows = candidates(RUN, fleet)[0]
    ranked = rank(RUN, fleet, rows)
    assert len({one.name for one in ranked}) == len(ranked)
    for chosen in ranked:
        others = [estimate(with_json(RUN, chosen.name, size), fleet) for size in micro_batches(RUN, 8)]
        assert most(chosen) <= (1 + AS_FAST) * min(most(one) for one in others if one.fits)


def test_equally_fast_jsons_go_by_simplicity_and_keep_the_configs_micro_batch() -> None:
    # One GPU sends nothing, and a given share of the peak is the same for all.
    ranked = ranked_on(gpu="h200", reached=0.5)
    alike = [one for one in ranked if most(one) <= (1 + AS_FAST / 2) * most(ranked[0])]
    assert [one.name for one in alike] == ["zero1", "zero2", "zero3"]
    assert {one.micro_batch for one in alike} == {RUN.train.micro_batch}
    assert [SHIPPED.index(one.name) for one in alike] == sorted(SHIPPED.index(one.name) for one in alike)


def test_without_times_the_json_that_offloads_and_sends_least_comes_first() -> None:
    ranked = ranked_on(gpus=8, gpu_memory="80GB")
    over_bus = [one.offload.to_host + one.offload.to_gpu + one.offload.disk_read for one in ranked]
    assert over_bus == sorted(over_bus)
    plain = [one.sent for one, moved in zip(ranked, over_bus, strict=True) if not moved]
    assert len(plain) == 3 and plain == sorted(plain)


def test_a_small_gpu_needs_offload() -> None:
    fleet = fleet_of(gpu="rtx4090")
    rows = candidates(RUN, fleet)[0]
    ranked = rank(RUN, fleet, rows)
    assert ranked and all(one.resolved.offload_optimizer for one in ranked)
    words = explain(ranked, rows)
    assert words[0].startswith(f"{ranked[0].name} (ZeRO-{ranked[0].resolved.stage})")
    assert words[1] == "zero0, zero1, zero2, zero3 would not fit with any micro-batch."


def test_a_json_that_fits_with_a_smaller_micro_batch_is_not_reported_as_too_large() -> None:
    fleet = fleet_of(gpus=8, gpu="h100")
    rows = candidates(RUN, fleet)[0]
    in_fp32 = rows[0]
    assert in_fp32.name == "zero0" and not in_fp32.fits and estimate(with_json(RUN, "zero0", 1), fleet).fits
    assert not any("would not fit" in line for line in explain(rank(RUN, fleet, rows), rows))


def test_if_nothing_fits_the_explanation_refers_to_the_smallest_micro_batch() -> None:
    fleet = fleet_of(gpu="rtx4090", gpu_memory="4GB")
    rows = candidates(RUN, fleet)[0]
    assert rank(RUN, fleet, rows) == []
    least = min((estimate(with_json(RUN, row.name, 1), fleet) for row in rows), key=lambda one: one.memory.total)
    assert least.left is not None
    expected_text = f"{least.name}, {-least.left / 1e9:.1f} GB too large with micro-batches of 1."
    assert explain([], rows)[0].startswith(f"Nothing fits: the least is {expected_text}")


def test_offloaded_states_must_fit_into_main_memory() -> None:
    wide, narrow = (ranked_on(gpu="rtx4090", host_memory=size) for size in ("64GB", "32GB"))
    assert "zero2_offload" in [one.name for one in wide] and all(one.host_bytes <= 64e9 for one in wide)
    # Adam's states take 20 GB, and pinned memory is rounded up; zero3_nvme has them on a disk.
    assert [one.name for one in narrow] == ["zero3_nvme"]
    fleet = fleet_of(gpu="rtx4090", host_memory="8GB")
    rows = candidates(RUN, fleet)[0]
    assert rank(RUN, fleet, rows) == []
    assert explain([], rows)[0].startswith("Nothing fits: zero3_nvme takes ")


def test_a_gpu_without_bf16_gets_only_fp32_and_fp16() -> None:
    fleet = fleet_of(gpus=8, gpu="v100-32")
    rows, left_out = candidates(RUN, fleet)
    assert [row.name for row in rows] == ["zero0", "zero1_fp16"]
    assert {row.resolved.dtype for row in rows} == {"fp32", "fp16"}
    assert "zero2 is left out: this GPU has no bf16." in left_out
    assert {line.split()[0] for line in left_out} == set(SHIPPED) - {"zero0", "zero1_fp16"}
    assert [one.name for one in rank(RUN, fleet, rows)] == ["zero1_fp16"]


def test_a_gpu_without_bf16_accepts_the_users_own_fp16_json(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    fleet = fleet_of(gpus=8, gpu="v100-32")
    rows = candidates(load_run_config("z2all_1b", [f"deepspeed={own}"]), fleet)[0]
    assert [(row.name, row.resolved.dtype) for row in rows][1:] == [("zero1_fp16", "fp16"), (str(own), "fp16")]
    with pytest.raises(ConfigError, match=r"^train.precision=bf16: the GPU that --gpu names has no bf16"):
        candidates(load_run_config("z2all_1b", ["train.precision=bf16"]), fleet)


def test_the_configs_own_json_is_never_left_out_as_useless() -> None:
    run = load_run_config("z2all_1b", ["deepspeed=zero1_fp16"])
    assert "zero1_fp16" in [row.name for row in candidates(run, fleet_of(gpus=8, gpu="h100"))[0]]


@pytest.mark.parametrize(
    ("gpus", "fix"),
    [
        (6, "Give train.global_batch=528, or another --gpus."),
        (128, "Give train.micro_batch=4, train.global_batch=1024, or another --gpus."),
        (100_000, "Give train.global_batch=800000, or another --gpus."),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused_with_a_fix(gpus: int, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        candidates(RUN, fleet_of(gpus=gpus, gpu="h100"))
    rule = f"cannot be split over {gpus:,} GPUs in micro-batches of 8"
    assert str(raised.value) == f"train.global_batch=512: {rule}. {fix}"
    settings_told = re.findall(r"train\.\w+=\d+", fix)
    for setting in settings_told:  # the advice works
        assert candidates(load_run_config("z2all_1b", [setting]), fleet_of(gpus=gpus, gpu="h100"))[0]


def test_a_run_with_batch_warmup_keeps_its_micro_batch() -> None:
    assert ranked_on(load_run_config("z2all_7b"), gpus=64, gpu="h100")[0].micro_batch == 16
    run = load_run_config("z2all_7b", ["train.batch_warmup_from=512", "train.batch_warmup_steps=10"])
    kept = ranked_on(run, gpus=64, gpu="h100")
    assert kept and {one.micro_batch for one in kept} == {1}


def test_the_explanation_gives_the_ratios_of_the_figures() -> None:
    fleet, run = fleet_of(gpus=64, gpu="h100"), load_run_config("z2all_7b")
    rows = candidates(run, fleet)[0]
    ranked = rank(run, fleet, rows)
    first, words = ranked[0], explain(ranked, rows)
    assert first.left is not None
    assert (
        max(abs(other.sent / first.sent - 1) for other in ranked[1:4]) > 0.1
    )  # otherwise an inverted ratio would pass
    assert f"micro-batches of {first.micro_batch}" in words[0] and f"{first.left / 1e9:.1f} GB to spare" in words[0]
    compared = [re.match(r"(\S+) would send ([\d.]+) times the bytes, take ([\d.]+) times as long", w) for w in words]
    found = [match for match in compared if match]
    assert [match[1] for match in found] == [one.name for one in ranked[1:4]]
    for match, other in zip(found, ranked[1:4], strict=True):
        assert float(match[2]) == pytest.approx(other.sent / first.sent, abs=0.051)
        assert float(match[3]) == pytest.approx(most(other) / most(first), abs=0.0051)


def test_the_explanation_gives_the_ratio_of_step_times() -> None:
    fleet = fleet_of(gpus=8, gpu="h100", reached=0.5)
    rows = candidates(RUN, fleet)[0]
    ranked = rank(RUN, fleet, rows)
    slower = replace(ranked[0], time=StepTime(2 * most(ranked[0]), 0, 0))
    assert f"take {2.0:.2f} times as long" in explain([ranked[0], slower], rows)[-1]


@settings(max_examples=25, deadline=None)
@given(
    gpu=st.sampled_from(sorted(GPUS)),
    gpus=st.sampled_from((1, 2, 8, 16, 32)),
    rounds=st.integers(1, 6),
    micro_batch=st.sampled_from((1, 2, 3, 4)),
    network=st.sampled_from(("eth1", "eth100", "ib400")),
)
def test_every_ranked_json_fits_and_has_the_global_batch(
    gpu: str, gpus: int, rounds: int, micro_batch: int, network: str
) -> None:
    batch = rounds * micro_batch * gpus
    run = load_run_config("z2all_1b", [f"train.global_batch={batch}", f"train.micro_batch={micro_batch}"])
    for one in ranked_on(run, gpus=gpus, gpu=gpu, network=network):
        assert one.fits and one.left is not None and one.left >= 0
        assert one.micro_batch * one.resolved.accumulation * gpus == batch
        assert one.fleet.has_bf16 or one.resolved.dtype != "bf16"
