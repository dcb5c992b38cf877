"""GPUs and links by name, with the figures that a plan rests on. Every one of them can be given instead.

Peaks are in `accounting.py`. Memory is what nvidia-smi shows, which is less than the card is sold with. Speeds of links
are those of one direction: of NVLink and PCIe per GPU, of networks per adapter. What programs reach is less
(`REACHED`), and what one machine reaches is best measured: `z2all doctor --hostfile` prints it for every pair.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from z2all_ds.base.accounting import peak_flops
from z2all_ds.base.errors import ConfigError

MIB = 2**20
Known = TypeVar("Known")


@dataclass(frozen=True)
class Gpu:
    """One GPU as the plan sees it."""

    name: str
    peak: float
    """Dense 16-bit operations a second."""
    memory: int
    link: str
    """To the other GPUs of its machine, where nothing else is said."""
    has_bf16: bool = True


@dataclass(frozen=True)
class Link:
    """A way between GPUs."""

    name: str
    speed: float
    """Bytes a second in one direction."""
    latency: float
    """Seconds for a message of no length."""
    is_reached: bool = False
    """The speed is one that was measured, not one of a data sheet."""

    @property
    def usable(self) -> float:
        """Bytes a second that large messages reach."""
        return self.speed if self.is_reached else REACHED * self.speed


def _gpu(key: str, cuda_name: str, mebibytes: int, link: str, has_bf16: bool = True) -> tuple[str, Gpu]:
    peak = peak_flops(cuda_name)
    assert peak is not None, cuda_name
    return key, Gpu(key, peak, mebibytes * MIB, link, has_bf16)


GPUS: dict[str, Gpu] = dict(
    (
        _gpu("h200", "NVIDIA H200", 143_771, "nvlink4"),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 81_559, "nvlink4"),
        _gpu("h100-pcie", "NVIDIA H100 PCIe", 81_559, "pcie5"),
        _gpu("h800", "NVIDIA H800", 81_559, "nvlink-h800"),
        _gpu("a100-80", "NVIDIA A100-SXM4-80GB", 81_920, "nvlink3"),
        _gpu("a100-40", "NVIDIA A100-SXM4-40GB", 40_960, "nvlink3"),
        _gpu("a800", "NVIDIA A800-SXM4-80GB", 81_920, "nvlink-a800"),
        _gpu("l40s", "NVIDIA L40S", 46_068, "pcie4"),
        _gpu("a6000", "NVIDIA RTX A6000", 49_140, "pcie4"),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 24_564, "pcie4"),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 24_576, "pcie4"),
        _gpu("v100-32", "Tesla V100-SXM2-32GB", 32_768, "nvlink2", has_bf16=False),
        _gpu("v100-16", "Tesla V100-SXM2-16GB", 16_384, "nvlink2", has_bf16=False),
    )
)

LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink4", 450e9, 3e-6),
        Link("nvlink-h800", 200e9, 3e-6),
        Link("nvlink3", 300e9, 3e-6),
        Link("nvlink-a800", 200e9, 3e-6),
        Link("nvlink2", 150e9, 3e-6),
        Link("pcie5", 64e9, 5e-6),
        Link("pcie4", 32e9, 5e-6),
        Link("pcie3", 16e9, 5e-6),
        Link("ib400", 50e9, 5e-6),
        Link("ib200", 25e9, 5e-6),
        Link("ib100", 12.5e9, 5e-6),
        Link("eth400", 50e9, 15e-6),
        Link("eth100", 12.5e9, 20e-6),
        Link("eth25", 3.125e9, 30e-6),
        Link("eth10", 1.25e9, 30e-6),
        Link("eth1", 0.125e9, 50e-6),
    )
}

REACHED = 0.8
"""Share of a link's speed that large messages reach; NCCL on NVLink and InfiniBand is near it."""


def gpu_named(name: str) -> Gpu:
    return _named(name, GPUS, "GPU", "Give one of these, or --gpu-memory and --peak-tflops.")


def link_named(name: str) -> Link:
    """By its name, or by a speed such as 20GB/s or 100Gbit/s, with the latency of a good Ethernet."""
    if re.match(r"[-+.\d]", name.strip()):
        return Link(name.strip(), parse_speed(name), LINKS["eth100"].latency)
    return _named(name, LINKS, "link", "Give one of these, or a speed such as 20GB/s or 100Gbit/s.")


def parse_speed(text: str) -> float:
    """Bytes a second. '20GB/s' is 20 x 10^9 bytes, '100Gbit/s' an eighth of 100 x 10^9."""
    found = re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+))\s*([KMGT])(i?)(B|bit|b)(?:/s|ps)", text.strip())
    speed = float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2]) + 1) if found else 0.0
    if found is None or not 0 < speed < math.inf:
        rule = "must be a positive number with a unit: GB/s, MB/s (bytes) or Gbit/s, Mbit/s (bits)"
        raise ConfigError(f"speed {text!r}", rule, "Write it like 20GB/s or 100Gbit/s.")
    return speed if found[4] == "B" else speed / 8


def _named(name: str, table: Mapping[str, Known], what: str, fix: str) -> Known:
    found = table.get(name.strip().lower())
    if found is None:
        raise ConfigError(f"{what} {name!r}", f"is none that we know: {', '.join(table)}", fix)
    return found
