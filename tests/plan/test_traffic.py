"""Predicted communication, equal in bytes and calls to what DeepSpeed sends on real ranks."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.training import launch_script
from z2all_ds.base.accounting import ModelShape, count_parameters
from z2all_ds.base.config import load_run_config
from z2all_ds.plan.traffic import Collective, HostTraffic, collectives, host_traffic
from z2all_ds.zero.ds_config import ResolvedDeepSpeed, resolve

SHAPE = [
    "model.vocab_size=512",
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.tie_word_embeddings=false",
    "train.sequence_length=8",
    "train.micro_batch=1",
]
UNEVEN = [
    "model.vocab_size=513",
    "model.hidden_size=30",
    "model.intermediate_size=51",
    "model.num_attention_heads=3",
    "model.num_key_value_heads=1",
    "model.num_hidden_layers=3",
]
"""A model with weights whose number of elements is not a multiple of four."""
FP32, BF16 = "train.precision=fp32", "train.precision=bf16"
TIED, RECOMPUTED = "model.tie_word_embeddings=true", "train.activation_checkpointing=full"
BIASED = "model.attention_bias=true"
STAGE_3 = {"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 1000}
"""Stage 3 that releases matrices of the small model, as the shipped JSONs do with a real model."""
SOME = {**STAGE_3, "stage3_max_reuse_distance": 90_000, "stage3_prefetch_bucket_size": 20_000}
NONE = {**STAGE_3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
OWNERS = {"use_multi_rank_bucket_allreduce": False}
OWN: dict[str, dict[str, Any]] = {
    "all_kept": {"zero_optimization": STAGE_3},
    "some_kept": {"zero_optimization": SOME},
    "few_live": {"zero_optimization": {**SOME, "stage3_max_live_parameters": 60_000}},
    "groups": {"zero_optimization": {**SOME, "stage3_max_reuse_distance": 0, "zero_hpz_partition_size": 2}},
    "groups_some_kept": {"zero_optimization": {**SOME, "zero_hpz_partition_size": 2}},
    "buckets_1": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 30_000}},
    "buckets_3": {"zero_optimization": {**STAGE_3, "reduce_bucket_size": 30_000}},
    "owners_1": {"zero_optimization": {"stage": 1, **OWNERS}},
    "owners_2": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 30_000, **OWNERS}},
    "textbook_2": {"zero_optimization": {"stage": 2, **OWNERS}, "data_types": {"grad_accum_dtype": "bf16"}},
    "textbook_3": {"zero_optimization": NONE, "data_types": {"grad_accum_dtype": "bf16"}},
}
TWO_RANKS = [
    ("zero0", 1, FP32),
    ("zero0", 3, FP32),
    ("zero1", 1, BF16),
    ("zero1", 3, FP32),
    ("zero2", 1, FP32),
    ("zero2", 3, FP32),
    ("zero2", 3, BF16),
    ("zero2_offload", 3, FP32),
    ("zero3", 1, FP32),
    ("zero3", 3, BF16),
    ("zero3_hpz", 3, FP32),
    ("zero3_offload", 3, FP32),
    ("zero3_offload_param", 3, FP32),
    ("some_kept", 1, FP32),
    ("some_kept", 3, FP32, TIED, RECOMPUTED, BIASED),
    ("few_live", 1, FP32),
    ("buckets_1", 1, FP32, BIASED),
    ("buckets_3", 1, FP32, BIASED),
    ("owners_1", 3, FP32),
    ("owners_1", 3, BF16),
    ("owners_2", 3, FP32),
    ("textbook_2", 1, BF16),
    ("textbook_3", 1, BF16),
]
"""JSON, micro-batches per step, and other settings."""
FOUR_RANKS = [
    ("owners_2", 1, FP32, *UNEVEN),
    ("groups", 2, FP32, *UNEVEN),
    ("groups_some_kept", 2, FP32),
]
KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
Case = tuple[Any, ...]


def overrides(case: Case, ranks: int, folder: Path) -> list[str]:
    name, accumulation, *settings = case
    # Stage 3 records the order of modules in the first two micro-batches, which differ from later ones.
    steps = 3 if accumulation == 1 else 2
    json_file = folder / f"{name}.json" if name in OWN else name
    batch = f"train.global_batch={ranks * accumulation}"
    return [*SHAPE, f"deepspeed={json_file}", batch, f"train.steps={steps}", *settings]


def measure(folder: Path, cases: list[Case], ranks: int) -> dict[Case, dict[str, Any]]:
    plan = folder / "plan"
    plan.write_text(json.dumps([overrides(case, ranks, folder) for case in cases]))
    script = Path(__file__).parents[1] / "helpers" / "traffic_ranks.py"
    result = launch_script(script, str(plan), ranks=ranks)
    assert result.returncode == 0, result.stderr
    return dict(zip(cases, json.loads((folder / "traffic.json").read_text()), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the JSONs of OWN."""
    folder = tmp_path_factory.mktemp("traffic")
    for name, content in OWN.items():
        (folder / f"{name}.json").write_text(json.dumps({**content, "bf16": {"enabled": True}}))
    return folder


@pytest.fixture(scope="module")
def on_two(folder: Path) -> dict[Case, dict[str, Any]]:
    return measure(folder, TWO_RANKS, 2)


@pytest.fixture(scope="module")
def on_four(folder: Path) -> dict[Case, dict[str, Any]]:
    return measure(folder, FOUR_RANKS, 4)


def resolved_for(case: Case, ranks: int, folder: Path) -> tuple[ResolvedDeepSpeed, ModelShape]:
    run = load_run_config(None, overrides(case, ranks, folder))
    return resolve(run, ranks, "cpu"), run.model.shape


def expected(said: list[Collective]) -> dict[tuple[str, int], tuple[int, int]]:
    """Return {(kind, number of ranks): (bytes, calls)} of a step."""
    sizes, calls = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for one in said:
        sizes[one.kind, one.among] += one.size * one.times
        calls[one.kind, one.among] += one.calls * one.times
    return {key: (size, calls[key]) for key, size in sizes.items() if size}


def found(sent: list[tuple[str, int, int, int]]) -> dict[tuple[str, int], tuple[int, int]]:
    sizes, calls = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for name, size, among, count in sent:
        sizes[KINDS.get(name, name), among] += size * count
        calls[KINDS.get(name, name), among] += count
    return {key: (size, calls[key]) for key, size in sizes.items()}


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: " ".join(map(str, case)))
def test_two_ranks_send_the_predicted_bytes_and_calls(
    case: Case, on_two: dict[Case, dict[str, Any]], folder: Path
) -> None:
    said = collectives(*resolved_for(case, 2, folder), 2)
    assert found(on_two[case]["sent"]) == expected(said)


@pytest.mark.parametrize("case", FOUR_RANKS, ids=lambda case: " ".join(map(str, case[:3])))
def test_four_ranks_send_the_predicted_bytes_and_calls(
    case: Case, on_four: dict[Case, dict[str, Any]], folder: Path
) -> None:
    said = collectives(*resolved_for(case, 4, folder), 4)
    assert found(on_four[case]["sent"]) == expected(said)


def test_gradients_reduced_only_to_their_owners_give_the_same_losses(on_two: dict[Case, dict[str, Any]]) -> None:
    for to_owners, to_all in ((("owners_1", 3, FP32), ("zero1", 3, FP32)), (("owners_2", 3, FP32), ("zero2", 3, FP32))):
        assert on_two[to_owners]["losses"] == on_two[to_all]["losses"]


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_volumes_are_the_textbook_multiples_of_the_parameters(ranks: int, folder: Path) -> None:
    """In bf16 with one micro-batch, a rank sends 3Ψ at stages 1 and 2, 2Ψ if gradients are reduced to their owners,
    3Ψ at stage 3 if it releases all weights after the forward pass, and 2Ψ if it keeps them."""
    elements = {}
    for name in ("zero1", "zero2", "textbook_2", "textbook_3", "all_kept"):
        resolved, shape = resolved_for((name, 1, BF16), ranks, folder)
        sent = sum(one.sent() for one in collectives(resolved, shape, ranks))
        elements[name] = sent / 2 / ((ranks - 1) / ranks) / count_parameters(shape).total
    # Norms are never released and gathered once instead of twice; weights are padded to a multiple of the ranks.
    near = pytest.approx
    assert elements["zero1"] == near(3, rel=1e-2) and elements["zero2"] == near(3, rel=1e-2)
    assert elements["textbook_2"] == near(2, rel=1e-2)
    assert elements["textbook_3"] == near(3, rel=1e-2)
    assert elements["all_kept"] == near(2, rel=1e-2)


def test_stage_3_gathers_only_a_large_model_again_in_the_backward_pass() -> None:
    """With the shipped JSON, a 1 B model is gathered about once per micro-batch, a 7 B model almost twice."""
    times = {}
    for preset in ("z2all_1b", "z2all_7b"):
        run = load_run_config(preset, ["deepspeed=zero3", "train.global_batch=64"])
        resolved = resolve(run, 8, "cuda")
        gathered = [one for one in collectives(resolved, run.model.shape, 8) if one.kind == "all_gather"]
        size = sum(one.size * one.times for one in gathered) / resolved.accumulation
        times[preset] = size / 2 / count_parameters(run.model.shape).total
    assert 1 < times["z2all_1b"] < 1.1
    assert 1.7 < times["z2all_7b"] < 2


def test_a_single_rank_sends_nothing(folder: Path) -> None:
    for name in ("zero0", "zero1", "zero2", "zero3"):
        assert collectives(*resolved_for((name, 1, FP32), 1, folder), 1) == []


def offloaded(name: str, accumulation: int, precision: str, folder: Path, ranks: int = 2) -> tuple[HostTraffic, int]:
    """Return the traffic with the host and the number of parameters per rank. All weights are multiples of two."""
    resolved, shape = resolved_for((name, accumulation, precision), ranks, folder)
    return host_traffic(resolved, shape, ranks), count_parameters(shape).total // ranks


def test_without_an_offload_nothing_goes_to_the_host(folder: Path) -> None:
    for name in ("zero0", "zero1", "zero2", "zero3", "zero3_hpz"):
        assert offloaded(name, 3, FP32, folder)[0] == HostTraffic()


def test_an_offload_moves_gradients_to_the_host_and_weights_to_the_gpu(folder: Path) -> None:
    # bf16, one micro-batch: fp32 gradients, bf16 weights; per parameter, Adam 28 bytes, clipping 8, casting 6
    moved, share = offloaded("zero2_offload", 1, BF16, folder)
    assert moved == HostTraffic(to_host=4 * share, to_gpu=2 * share, stepped=42 * share)
    # fp32 sums of bf16 gradients stay on the GPU
    assert offloaded("zero2_offload", 3, BF16, folder)[0] == moved
    # sums in the dtype of the weights do not
    moved, share = offloaded("zero2_offload", 3, FP32, folder)
    assert (moved.to_host, moved.to_gpu) == ((4 + 3 * 4) * share, (4 + 2 * 4) * share)
    # at stage 3, fp32 sums do not stay there either
    moved, share = offloaded("zero3_offload", 3, BF16, folder)
    assert (moved.to_host, moved.to_gpu) == ((4 + 3 * 4) * share, (2 + 3 * 4) * share)


def test_offloaded_weights_that_the_gpu_keeps_are_copied_once_per_step(folder: Path) -> None:
    # The GPU keeps all weights of the small model, so they are copied once per step.
    moved, share = offloaded("zero3_offload_param", 3, BF16, folder)
    assert (moved.to_host, moved.to_gpu) == ((4 + 3 * 4) * share, (3 * 4 + 2) * share)


def test_states_on_a_disk_are_read_and_written_once_per_step(folder: Path) -> None:
    moved, share = offloaded("zero3_nvme", 1, BF16, folder)
    assert (moved.disk_read, moved.disk_written) == (16 * share, 16 * share)
    in_memory, _ = offloaded("zero3_offload", 1, BF16, folder)
    assert (moved.to_host, moved.to_gpu, moved.stepped) == (in_memory.to_host, in_memory.to_gpu, in_memory.stepped)
