"""GPUs as NVML reports them, without CUDA: driver, state, and connections between them."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from z2all_ds.base import machine
from z2all_ds.base.console import human_bytes
from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Finding

BUSY_SHARE = 0.05
"""Share of a GPU's memory; the driver itself takes less."""
HOT = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's reasons for a low clock that are faults: hardware slowdown, heat (software, hardware), power brake."""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    memory: int
    used: int
    """Bytes in use by any process."""
    lanes: tuple[int, int]
    """PCIe lanes: in use, and possible in this slot."""
    slowed: int
    """Reasons for a low clock, as NVML's bits."""
    uncorrected: int
    """Uncorrectable memory errors since the driver was loaded."""
    numa: int | None


@dataclass(frozen=True)
class Gpus:
    """All GPUs of the machine, also those that CUDA_VISIBLE_DEVICES hides."""

    driver: str
    cuda: str
    """Newest CUDA version that the driver supports."""
    gpus: tuple[Gpu, ...]
    links: dict[tuple[int, int], str]
    """How each pair reads the other's memory: nvlink, pcie or none."""


def check() -> list[Finding]:
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
        fix = "Run `pip install 'z2all_ds[gpu]'`: without it, state and topology of GPUs are unknown."
        return [Finding("nvidia-ml-py", WARN, "not installed", fix)]
    except RuntimeError as error:
        fix = "Reload or update the NVIDIA driver; in a container, start it with `--gpus all`."
        return [Finding("GPU driver", WARN, f"does not answer ({error})", fix)]
    return [judge_driver(found, machine.torch_cuda_version() or ""), *judge_states(found.gpus), *judge_links(found)]


def judge_driver(found: Gpus, torch_cuda: str) -> Finding:
    """Compare major versions: a driver runs CUDA of its own major version and older."""
    value = f"{found.driver}, for CUDA up to {found.cuda}; torch is built with {torch_cuda or 'none'}"
    major = re.match(r"\d+", torch_cuda)
    if major and int(found.cuda.split(".")[0]) < int(major[0]):
        fix = f"Update the driver to one for CUDA {torch_cuda}, or install a torch built for CUDA {found.cuda}."
        return Finding("GPU driver", FAIL, value, fix)
    return Finding("GPU driver", OK, value)


def judge_states(gpus: Sequence[Gpu]) -> list[Finding]:
    """Report memory in use, memory errors, low clocks and missing PCIe lanes."""
    problems: list[tuple[int, str, str]] = []
    for index, gpu in enumerate(gpus):
        if gpu.used > BUSY_SHARE * gpu.memory:
            value = f"{human_bytes(gpu.used)} of {human_bytes(gpu.memory)} in use"
            problems.append((index, value, "Find the process with `nvidia-smi`; plans assume that all memory is free."))
        if gpu.uncorrected:
            fix = f"Reset it (`nvidia-smi -r -i {index}`); if they return, replace it."
            problems.append((index, f"{gpu.uncorrected} uncorrectable memory errors", fix))
        if gpu.slowed & HOT:
            fix = "Check cooling and power: `nvidia-smi -q -d PERFORMANCE`."
            problems.append((index, "slowed down by heat or lack of power", fix))
        if gpu.lanes[0] < gpu.lanes[1]:
            value = f"{gpu.lanes[0]} of {gpu.lanes[1]} PCIe lanes in use"
            problems.append((index, value, "Reseat the GPU or its riser; offload and loading are slower."))
    findings = [Finding(f"GPU {index}", WARN, value, fix) for index, value, fix in problems]
    kinds = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
    value = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    if len(kinds) > 1:
        fix = "Leave out the slower ones with CUDA_VISIBLE_DEVICES: every step waits for the slowest."
        return [Finding("GPU kinds", WARN, value, fix), *findings]
    memory = min(gpu.memory for gpu in gpus)
    return [Finding("GPU kinds", OK, f"{value}, {human_bytes(memory)}"), *findings]


def judge_links(found: Gpus) -> list[Finding]:
    """Report how each pair reads the other's memory, and the NUMA node of each GPU."""
    findings = []
    nodes = {gpu.numa for gpu in found.gpus}
    if len(nodes) > 1:
        value = ", ".join(f"GPU {index} at node {gpu.numa}" for index, gpu in enumerate(found.gpus))
        findings.append(Finding("NUMA nodes of GPUs", OK, f"{value}; ranks bind themselves (train.bind_cpus)"))
    if not found.links:
        return findings
    counts = Counter(found.links.values())
    value = ", ".join(f"{counts[link]} by {link}" for link in ("nvlink", "pcie", "none") if counts[link])
    without = [f"{a}-{b}" for (a, b), link in found.links.items() if link == "none"]
    if without:
        fix = (
            "NCCL uses main memory between these. In a virtual machine or with IOMMU/ACS on, turn ACS off;"
            " otherwise prefer ZeRO-1, which sends least."
        )
        return [*findings, Finding("pairs of GPUs", WARN, f"{value} ({', '.join(without)})", fix)]
    return [*findings, Finding("pairs of GPUs", OK, value)]


def read_gpus() -> Gpus:
    """Read all GPUs; raise ImportError without nvidia-ml-py, RuntimeError if the driver does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        newest = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Gpus(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            cuda=f"{newest // 1000}.{newest % 1000 // 10}",
            gpus=tuple(_read(pynvml, handle) for handle in handles),
            links={(a, b): _link(pynvml, handles[a], handles[b]) for a, b in combinations(range(len(handles)), 2)},
        )
    except pynvml.NVMLError as error:
        raise RuntimeError(str(error)) from error


def _read(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)

    def ask(function: str, *arguments: Any, default: Any = 0) -> Any:
        """Call NVML; not every GPU, driver and virtual machine supports every query."""
        with suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, function)(handle, *arguments)
        return default

    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        memory=memory.total,
        used=memory.used,
        lanes=(ask("nvmlDeviceGetCurrPcieLinkWidth"), ask("nvmlDeviceGetMaxPcieLinkWidth")),
        slowed=ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", *kinds),
        numa=_numa_node(ask("nvmlDeviceGetPciInfo", default=None)),
    )


def _numa_node(pci: Any) -> int | None:
    """Read 00000000:1B:00.0 -> /sys/bus/pci/devices/0000:1b:00.0/numa_node, where -1 means none."""
    with suppress(OSError, ValueError):
        node = int((Path("/sys/bus/pci/devices") / pci.busId.lower()[-12:] / "numa_node").read_text()) if pci else -1
        return node if node >= 0 else None
    return None


def _link(nvml: Any, one: Any, other: Any) -> str:
    for link, index in (("nvlink", nvml.NVML_P2P_CAPS_INDEX_NVLINK), ("pcie", nvml.NVML_P2P_CAPS_INDEX_READ)):
        with suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetP2PStatus(one, other, index) == nvml.NVML_P2P_STATUS_OK:
                return link
    return "none"
