"""Predicted memory, compared with runs on an H200 (docs/results), and general rules that it must follow."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base.accounting import count_parameters
from z2all_ds.base.config import load_run_config
from z2all_ds.plan.memory import GpuMemory, gpu_memory, states_of_zero_paper
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.optimizers import KINDS, OptimizerSituation

RESULTS = Path(__file__).parents[2] / "docs" / "results"
MEASURED = json.loads((RESULTS / "2026-11-16_h200_bench_memory.json").read_text(encoding="utf-8"))["cases"]
WITHIN = 0.07
Z2ALL_1B = ("train.global_batch=512", "train.micro_batch=2")


def memory_of(config: str | None, overrides: list[str], ranks: int) -> GpuMemory:
    run = load_run_config(config, overrides)
    return gpu_memory(run, resolve(run, ranks, "cuda", elsewhere=True), ranks)


@pytest.mark.parametrize("case", MEASURED, ids=[case["name"] for case in MEASURED])
def test_predicted_peaks_are_close_to_measured_ones(case: dict[str, Any]) -> None:
    predicted = memory_of(case["config"], case["overrides"], case["ranks"])
    assert predicted.allocated == pytest.approx(case["allocated"], rel=WITHIN)
    # With CUDA's own memory and fragmentation, it is the driver's figure, which covers all ranks on the GPU.
    assert predicted.total == pytest.approx(case["device"] / case["ranks"], rel=0.12)
    if "offload" in case["name"]:
        assert predicted.host == pytest.approx(case["host"], rel=WITHIN)


STEPS = json.loads((RESULTS / "2026-11-18_h200_optimizer_step.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", STEPS["cases"], ids=[case["name"] for case in STEPS["cases"]])
def test_temporary_tensors_of_the_optimizer_step_are_part_of_the_peak(case: dict[str, Any]) -> None:
    predicted = memory_of(case["config"], case["overrides"], case["ranks"])
    assert predicted.allocated == pytest.approx(case["allocated"], rel=0.025)


@pytest.mark.parametrize("flat", STEPS["flat_tensors"], ids=lambda flat: f"{flat['kind']}-{flat['parameters']}")
def test_stated_step_bytes_are_those_measured(flat: dict[str, Any]) -> None:
    bf16 = flat["weights"] == "bf16"
    situation = OptimizerSituation("cuda", stage=2, offload=False, bf16_master=bf16, bf16_states=bf16)
    assert KINDS[flat["kind"]].step_bytes_per_parameter(situation) == pytest.approx(
        flat["step_bytes_per_parameter"], rel=1e-3
    )


def test_a_7b_model_with_8_bit_moments_needs_more_than_its_states_in_the_step() -> None:
    """Two fp32 tensors of the size of the partition: 26 GiB each at 7B on one GPU."""
    small = ["deepspeed=zero2", "train.micro_batch=1", "train.global_batch=2", "train.activation_checkpointing=full"]
    plain, eight = (memory_of("z2all_7b", [*small, f"optimizer.kind={kind}"], 1) for kind in ("adamw", "adamw_8bit"))
    parameters = count_parameters(load_run_config("z2all_7b").model.shape).total
    assert eight.moments < plain.moments / 3.9
    in_step = eight.buckets + eight.activations + eight.logits
    assert in_step == pytest.approx(8.03125 * parameters, rel=0.01)


def test_enough_cases_are_measured_and_none_has_failed() -> None:
    assert len(MEASURED) >= 12
    assert not [case["name"] for case in MEASURED if case["failed"]]
    jsons = {word for case in MEASURED for word in case["overrides"] if word.startswith("deepspeed=")}
    assert len(jsons) >= 8


def test_predicted_peaks_are_close_to_those_of_a_run_with_validation() -> None:
    """The committed training run took 43.1 GB, and 45.3 GB from its first validation on."""
    records = [json.loads(line) for line in (RESULTS / "2026-11-16_h200_training_metrics.jsonl").open(encoding="utf-8")]
    run = ["deepspeed=zero1", "train.micro_batch=8", "train.global_batch=32"]
    without, with_it = (memory_of("z2all_1b", [*run, *more], 1) for more in ([], ["validation.corpus=held_out"]))
    peaks = {record["step"]: record["peak_memory_bytes"] for record in records}
    assert without.allocated == pytest.approx(peaks[1], rel=0.02)
    assert with_it.allocated == pytest.approx(peaks[720], rel=0.02)


def test_the_predicted_largest_micro_batch_is_close_to_the_measured_one() -> None:
    """The predicted largest micro-batch is at least 90 % of the largest one that trained, and at most equal to it."""
    for name in ("fit_zero1", "fit_zero2_4096"):
        fit = json.loads((RESULTS / f"2026-11-16_h200_{name}.json").read_text(encoding="utf-8"))
        assert 0.9 * fit["largest"] <= fit["predicted"] <= fit["largest"]


def test_the_plan_assumes_the_chunk_size_of_the_chunked_loss() -> None:
    from z2all_ds.ops import cross_entropy
    from z2all_ds.plan import activations

    assert activations.CHUNK_LOGITS == cross_entropy.CHUNK_LOGITS


def test_flat_gradients_are_copied_only_if_they_fit_into_one_bucket() -> None:
    one, two = (memory_of("z2all_120m", ["deepspeed=zero1", "train.global_batch=512"], ranks) for ranks in (1, 2))
    parameters = count_parameters(load_run_config("z2all_120m").model.shape).total
    assert (one.buckets, two.buckets) == (0, 4 * parameters)
    assert memory_of("z2all_1b", ["deepspeed=zero1", *Z2ALL_1B], 2).buckets == 0


def test_linear_backends_without_gradient_sinks_keep_their_gradients() -> None:
    usual, bypassing = (
        memory_of("z2all_1b", ["deepspeed=zero1", *Z2ALL_1B, f"ops.linear={name}"], 1)
        for name in ("fp8", "fp8_torchao")
    )
    assert (usual.gradients, bypassing.gradients) == (0, bypassing.weights)


def test_the_parts_of_memory_add_up_to_the_total() -> None:
    memory = memory_of("z2all_1b", ["deepspeed=zero2", *Z2ALL_1B], 8)
    parts = {name: size for name, size in asdict(memory).items() if name not in ("host", "disk")}
    assert sum(parts.values()) == memory.total
    assert memory.allocated == memory.total - memory.context - memory.fragmentation


@pytest.mark.parametrize(("stage", "share"), [("zero1", 2 + 4 + 12 / 8), ("zero2", 2 + 16 / 8), ("zero3", 18 / 8)])
def test_states_are_those_of_the_zero_paper_with_fp32_gradient_sums(stage: str, share: float) -> None:
    """States are bf16 weights, fp32 gradient sums (4 bytes instead of the paper's 2), master weights and moments."""
    memory = memory_of("z2all_1b", [f"deepspeed={stage}", *Z2ALL_1B], 8)
    states = memory.weights + memory.accumulation + memory.master_weights + memory.moments
    parameters = count_parameters(load_run_config("z2all_1b").model.shape).total
    assert states == pytest.approx(share * parameters, rel=1e-6)


JSONS = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_offload_param", "zero3_nvme")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(JSONS), st.sampled_from([1, 2, 8, 64]), st.sampled_from([1, 2, 4, 8]))
def test_memory_depends_on_ranks_micro_batch_and_checkpointing_as_expected(name: str, ranks: int, micro: int) -> None:
    """More ranks never increase the states of a rank. Larger micro-batches and less checkpointing never save memory."""

    def of(ranks: int, micro: int, checkpointing: str = "none") -> GpuMemory:
        batch = [f"train.micro_batch={micro}", "train.global_batch=65536"]
        return memory_of(
            "z2all_1b", [f"deepspeed={name}", *batch, f"train.activation_checkpointing={checkpointing}"], ranks
        )

    one = of(ranks, micro)
    states = ("weights", "gradients", "accumulation", "master_weights", "moments", "disk")
    for state in states:
        assert getattr(of(2 * ranks, micro), state) <= getattr(one, state)
    assert one.allocated <= of(ranks, 2 * micro).allocated < of(ranks, 64 * micro).allocated
    kept = [of(ranks, micro, mode).activations for mode in ("full", "selective", "none")]
    assert kept == sorted(kept)
    assert min(asdict(one).values()) >= 0


def test_offload_moves_optimizer_states_to_the_host_or_the_disk() -> None:
    here = memory_of("z2all_1b", ["deepspeed=zero3", *Z2ALL_1B], 2)
    away = memory_of("z2all_1b", ["deepspeed=zero3_offload", *Z2ALL_1B], 2)
    disk = memory_of("z2all_1b", ["deepspeed=zero3_nvme", *Z2ALL_1B], 2)
    assert away.master_weights == away.moments == away.accumulation == 0
    assert away.host - here.host >= here.master_weights + here.moments
    assert disk.disk == here.master_weights + here.moments + here.master_weights and disk.host < away.host


def test_the_run_stage_that_needs_most_determines_the_memory() -> None:
    short = memory_of("z2all_1b", ["deepspeed=zero2", *Z2ALL_1B], 1)
    longer = "stages=[{name: a, steps: 10}, {name: b, sequence_length: 4096}]"
    both = memory_of("z2all_1b", ["deepspeed=zero2", *Z2ALL_1B, longer, "model.max_position_embeddings=4096"], 1)
    assert both.activations > 1.9 * short.activations


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_figures_of_the_zero_paper_are_reproduced(stage: int, gigabytes: float) -> None:
    """The paper has 7.5 B parameters, 64 GPUs and mixed-precision Adam (K = 12), and rounds 31.41, 16.64 and 1.875."""
    assert round(states_of_zero_paper(7_500_000_000, 64, stage) / 1e9, 1) == gigabytes


@given(st.integers(1, 10**12), st.integers(1, 4096))
def test_a_higher_zero_stage_never_needs_more_memory(parameters: int, gpus: int) -> None:
    totals = [states_of_zero_paper(parameters, gpus, stage) for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == 16 * parameters
    # All shards together hold every state once, rounded up by less than one parameter per GPU.
    assert 16 * parameters <= totals[3] * gpus < 16 * (parameters + gpus)
