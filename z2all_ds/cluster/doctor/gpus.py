"""GPUs as their driver's library (NVML) tells of them, without CUDA: driver, state, and how they reach each other."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from z2all_ds.base import machine
from z2all_ds.base.console import human_bytes
from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Finding

BUSY_SHARE = 0.05
"""Of a GPU's memory: what the driver itself takes is less."""
HOT = 0x8 | 0x20 | 0x40 | 0x80
"""Reasons why the clock is low that are faults: hardware slowdown, heat by software and hardware, power brake."""


@dataclass(frozen=True)
class Gpu:
    """What we ask of each."""

    name: str
    memory: int
    used: int
    """Bytes, by whomever."""
    lanes: tuple[int, int]
    """Of PCIe: now, and at most here."""
    slowed: int
    """Why the clock is low, as NVML's bits."""
    uncorrected: int
    """Memory errors since the driver was loaded that could not be put right."""
    numa: int | None


@dataclass(frozen=True)
class Gpus:
    """All that the driver shows, also those that CUDA_VISIBLE_DEVICES hides."""

    driver: str
    cuda: str
    """The newest that the driver can run."""
    gpus: tuple[Gpu, ...]
    ways: dict[tuple[int, int], str]
    """nvlink, pcie or none for each pair: how one reads the other's memory."""


def accelerator() -> list[Finding]:
    count = machine.gpu_count()
    if count == 0:
        return [Finding("GPU", OK, "none visible: training runs on the CPU")]
    if machine.torch_build_name().endswith("_cpu"):
        return [Finding("GPU", WARN, f"{count} visible, but torch is a CPU build", "Install a CUDA build of torch.")]
    return [Finding("GPU", OK, f"{count} visible"), *details()]


def details() -> list[Finding]:
    try:
        found = read_gpus()
    except ImportError:
        fix = "Run `pip install 'z2all_ds[gpu]'`: without it neither state nor topology of GPUs can be told."
        return [Finding("nvidia-ml-py", WARN, "not installed", fix)]
    except RuntimeError as error:
        fix = "Reload or update the NVIDIA driver; in a container, start it with `--gpus all`."
        return [Finding("GPU driver", WARN, f"does not answer ({error})", fix)]
    return [judge_driver(found, machine.torch_cuda_version() or ""), *judge_states(found.gpus), *judge_ways(found)]


def judge_driver(found: Gpus, torch_cuda: str) -> Finding:
    """A driver runs every CUDA of its own major version and older ones."""
    told = f"{found.driver}, for CUDA up to {found.cuda}; torch is built with {torch_cuda or 'none'}"
    major = re.match(r"\d+", torch_cuda)
    if major and int(found.cuda.split(".")[0]) < int(major[0]):
        fix = f"Update the driver to one for CUDA {torch_cuda}, or install a torch built for CUDA {found.cuda}."
        return Finding("GPU driver", FAIL, told, fix)
    return Finding("GPU driver", OK, told)


def judge_states(gpus: Sequence[Gpu]) -> list[Finding]:
    """Memory in use, errors, clocks held down, lanes missing."""
    findings = []
    for index, gpu in enumerate(gpus):
        name = f"GPU {index}"
        if gpu.used > BUSY_SHARE * gpu.memory:
            told = f"{human_bytes(gpu.used)} of {human_bytes(gpu.memory)} in use"
            findings.append(Finding(name, WARN, told, "See whose with `nvidia-smi`; a run's plan counts on all of it."))
        if gpu.uncorrected:
            told = f"{gpu.uncorrected} memory errors that could not be put right"
            findings.append(
                Finding(name, WARN, told, f"Reset it (`nvidia-smi -r -i {index}`); if they return, replace it.")
            )
        if gpu.slowed & HOT:
            fix = "Look at cooling and power: `nvidia-smi -q -d PERFORMANCE`."
            findings.append(Finding(name, WARN, "slowed down by heat or lack of power", fix))
        if gpu.lanes[0] < gpu.lanes[1]:
            told = f"{gpu.lanes[0]} of {gpu.lanes[1]} PCIe lanes at work"
            findings.append(Finding(name, WARN, told, "Reseat the card or its riser; offload and loading are slower."))
    kinds = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
    told = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    if len(kinds) > 1:
        fix = "Leave the slower ones out by CUDA_VISIBLE_DEVICES: every step waits for the slowest."
        return [Finding("GPU kinds", WARN, told, fix), *findings]
    memory = min(gpu.memory for gpu in gpus)
    return [Finding("GPU kinds", OK, f"{told}, {human_bytes(memory)}"), *findings]


def judge_ways(found: Gpus) -> list[Finding]:
    """How each pair reads the other's memory, and the NUMA node of each GPU."""
    findings = []
    nodes = {gpu.numa for gpu in found.gpus}
    if len(nodes) > 1:
        told = ", ".join(f"GPU {index} at node {gpu.numa}" for index, gpu in enumerate(found.gpus))
        findings.append(Finding("NUMA nodes of GPUs", OK, f"{told}; ranks bind themselves (train.bind_cpus)"))
    if not found.ways:
        return findings
    told = ", ".join(
        f"{count} by {way}" if way != "none" else f"{count} by none"
        for way in ("nvlink", "pcie", "none")
        if (count := sum(taken == way for taken in found.ways.values()))
    )
    lost = [f"{a}-{b}" for (a, b), way in found.ways.items() if way == "none"]
    if lost:
        fix = (
            "NCCL goes through main memory between these. In a virtual machine or with IOMMU/ACS on, turn ACS off;"
            " else prefer ZeRO-1, which sends least."
        )
        return [*findings, Finding("pairs of GPUs", WARN, f"{told} ({', '.join(lost)})", fix)]
    return [*findings, Finding("pairs of GPUs", OK, told)]


def read_gpus() -> Gpus:
    """ImportError without nvidia-ml-py, RuntimeError where the driver does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        newest = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Gpus(
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            cuda=f"{newest // 1000}.{newest % 1000 // 10}",
            gpus=tuple(_read(pynvml, handle) for handle in handles),
            ways={(a, b): _way(pynvml, handles[a], handles[b]) for a, b in combinations(range(len(handles)), 2)},
        )
    except pynvml.NVMLError as error:
        raise RuntimeError(str(error)) from error


def _read(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)

    def ask(function: str, *arguments: Any, otherwise: Any) -> Any:
        """Not every card, driver and virtual machine answers everything."""
        with suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, function)(handle, *arguments)
        return otherwise

    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory=memory.total,
        used=memory.used,
        lanes=(
            ask("nvmlDeviceGetCurrPcieLinkWidth", otherwise=0),
            ask("nvmlDeviceGetMaxPcieLinkWidth", otherwise=0),
        ),
        slowed=ask("nvmlDeviceGetCurrentClocksThrottleReasons", otherwise=0),
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", *kinds, otherwise=0),
        numa=_numa_node(ask("nvmlDeviceGetPciInfo", otherwise=None)),
    )


def _numa_node(pci: Any) -> int | None:
    """By the kernel: 00000000:1B:00.0 -> /sys/bus/pci/devices/0000:1b:00.0/numa_node; -1 there means none."""
    if pci is None:
        return None
    with suppress(OSError, ValueError):
        node = int((Path("/sys/bus/pci/devices") / _text(pci.busId).lower()[-12:] / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def _way(nvml: Any, one: Any, other: Any) -> str:
    for way, index in (("nvlink", nvml.NVML_P2P_CAPS_INDEX_NVLINK), ("pcie", nvml.NVML_P2P_CAPS_INDEX_READ)):
        with suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetP2PStatus(one, other, index) == nvml.NVML_P2P_STATUS_OK:
                return way
    return "none"


def _text(words: str | bytes) -> str:
    return words.decode() if isinstance(words, bytes) else words


CHECKS: tuple[Callable[[], list[Finding]], ...] = (accelerator,)
