"""Tests of the findings about GPUs: simulated GPUs on any machine, and real GPUs where there are any."""

from typing import Any

import pytest

from tests.ops.comparing import on_gpu
from z2all_ds.cluster.doctor.gpus import Gpu, Gpus, judge_driver, judge_links, judge_states, read_gpus

GOOD = Gpu("NVIDIA H100 80GB HBM3", 80 * 2**30, 2**30, (16, 16), slowed=1, uncorrected=0, numa=0)
"""A healthy GPU; NVML's reason 1 for a low clock means that it is idle."""


def changed(**changes: Any) -> Gpu:
    return Gpu(**{**vars(GOOD), **changes})


def box(*gpus: Gpu, way: str = "nvlink", cuda: str = "13.0") -> Gpus:
    pairs = [(a, b) for b in range(len(gpus)) for a in range(b)]
    return Gpus("580.1", cuda, gpus, dict.fromkeys(pairs, way))


@pytest.mark.parametrize(
    ("driver", "torch", "status"),
    [("13.0", "13.0", "ok"), ("13.0", "12.8", "ok"), ("12.4", "12.8", "ok"), ("12.8", "13.0", "fail")],
)
def test_a_driver_supports_its_own_major_cuda_version_and_older_ones(driver: str, torch: str, status: str) -> None:
    assert judge_driver(box(GOOD, cuda=driver), torch).status == status


def test_healthy_gpus_are_reported_in_one_line() -> None:
    (finding,) = judge_states([GOOD, GOOD])
    assert (finding.status, finding.value) == ("ok", "2 x NVIDIA H100 80GB HBM3, 80.0 GiB")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"used": 30 * 2**30}, "30.0 GiB of 80.0 GiB in use"),
        ({"uncorrected": 3}, "3 uncorrectable memory errors"),
        ({"slowed": 0x40}, "slowed down by heat or lack of power"),
        ({"lanes": (8, 16)}, "8 of 16 PCIe lanes in use"),
    ],
)
def test_a_faulty_gpu_is_named(changes: dict[str, object], said: str) -> None:
    _, finding = judge_states([GOOD, changed(**changes)])
    assert (finding.name, finding.status, finding.value) == ("GPU 1", "warn", said)
    assert finding.fix


def test_different_gpu_models_in_one_machine_are_a_warning() -> None:
    finding, *_ = judge_states([GOOD, changed(name="NVIDIA A100")])
    assert finding.status == "warn" and finding.value == "1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100"


def test_links_between_gpus_are_counted_and_mixed_links_are_a_warning() -> None:
    assert judge_links(box(GOOD)) == []
    (all_linked,) = judge_links(box(GOOD, GOOD, GOOD))
    assert (all_linked.status, all_linked.value) == ("ok", "3 by nvlink")
    mixed = box(GOOD, GOOD, changed(numa=1))
    mixed.links[0, 2] = "none"
    nodes, ways = judge_links(mixed)
    assert nodes.value.startswith("GPU 0 at node 0, GPU 1 at node 0, GPU 2 at node 1")
    assert (ways.status, ways.value) == ("warn", "2 by nvlink, 1 by none (0-2)")


@on_gpu[0]
@on_gpu[1]
def test_findings_about_real_gpus_agree_with_torch() -> None:
    import torch

    found = read_gpus()
    assert len(found.gpus) >= torch.cuda.device_count()
    assert torch.cuda.get_device_name(0) in {gpu.name for gpu in found.gpus}
    assert found.gpus[0].memory >= torch.cuda.get_device_properties(0).total_memory
    assert judge_driver(found, torch.version.cuda or "").status == "ok"
    assert [finding for finding in judge_states(found.gpus) if finding.name == "GPU kinds"]
