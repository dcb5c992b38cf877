"""GPUs and links by name with the values that a plan uses, and values that `z2all doctor --json` has measured.

Options of `z2all plan` replace every value. Peaks are in `base/accounting.py`. Memory is what nvidia-smi shows. Link
speeds are those of one direction: of NVLink and PCIe per GPU, of networks per adapter. Large messages reach the
share `REACHED` of them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from z2all_ds.base.accounting import peak_flops
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.paths import expanded
from z2all_ds.base.storage.open_files import read_regular

MIB = 2**20
REACHED = 0.8
"""Share of a link's speed that large messages reach; NCCL is near it on NVLink and InfiniBand."""
Known = TypeVar("Known")


@dataclass(frozen=True)
class Gpu:
    """One type of GPU."""

    name: str
    peak: float  # Dense 16-bit operations per second
    memory: int
    link: str  # Default link to the other GPUs of its machine
    has_bf16: bool


@dataclass(frozen=True)
class Link:
    """A connection between GPUs."""

    name: str
    speed: float  # Bytes per second in one direction
    latency: float  # Seconds for an empty message
    is_reached: bool = False  # The speed was measured and is not from a data sheet

    @property
    def usable(self) -> float:
        """Return the bytes per second that large messages reach."""
        return self.speed if self.is_reached else REACHED * self.speed


def _peak(cuda_name: str) -> float:
    peak = peak_flops(cuda_name)
    assert peak is not None, cuda_name
    return peak


GPUS: dict[str, Gpu] = {
    key: Gpu(key, _peak(cuda_name), mebibytes * MIB, link, has_bf16=not key.startswith("v100"))
    for key, cuda_name, mebibytes, link in (
        ("h200", "NVIDIA H200", 143_771, "nvlink4"),
        ("h100", "NVIDIA H100 80GB HBM3", 81_559, "nvlink4"),
        ("h100-pcie", "NVIDIA H100 PCIe", 81_559, "pcie5"),
        ("h800", "NVIDIA H800", 81_559, "nvlink-h800"),
        ("a100-80", "NVIDIA A100-SXM4-80GB", 81_920, "nvlink3"),
        ("a100-40", "NVIDIA A100-SXM4-40GB", 40_960, "nvlink3"),
        ("a800", "NVIDIA A800-SXM4-80GB", 81_920, "nvlink-a800"),
        ("l40s", "NVIDIA L40S", 46_068, "pcie4"),
        ("a6000", "NVIDIA RTX A6000", 49_140, "pcie4"),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 24_564, "pcie4"),
        ("rtx3090", "NVIDIA GeForce RTX 3090", 24_576, "pcie4"),
        ("v100-32", "Tesla V100-SXM2-32GB", 32_768, "nvlink2"),
        ("v100-16", "Tesla V100-SXM2-16GB", 16_384, "nvlink2"),
    )
}

LINKS: dict[str, Link] = {
    name: Link(name, speed, latency)
    for name, speed, latency in (
        ("nvlink4", 450e9, 3e-6),
        ("nvlink-h800", 200e9, 3e-6),
        ("nvlink3", 300e9, 3e-6),
        ("nvlink-a800", 200e9, 3e-6),
        ("nvlink2", 150e9, 3e-6),
        ("pcie5", 64e9, 5e-6),
        ("pcie4", 32e9, 5e-6),
        ("pcie3", 16e9, 5e-6),
        ("ib400", 50e9, 5e-6),
        ("ib200", 25e9, 5e-6),
        ("ib100", 12.5e9, 5e-6),
        ("eth400", 50e9, 15e-6),
        ("eth100", 12.5e9, 20e-6),
        ("eth25", 3.125e9, 30e-6),
        ("eth10", 1.25e9, 30e-6),
        ("eth1", 0.125e9, 50e-6),
    )
}


def gpu_named(name: str) -> Gpu:
    return _named(name, GPUS, "GPU", "Give one of these, or --gpu-memory and --peak-tflops.")


def link_named(name: str) -> Link:
    """Return a link by its name, or by a speed such as 20GB/s or 100Gbit/s, with the latency of fast Ethernet."""
    if re.match(r"[-+.\d]", name.strip()):
        return Link(name.strip(), parse_speed(name), LINKS["eth100"].latency)
    return _named(name, LINKS, "link", "Give one of these, or a speed such as 20GB/s or 100Gbit/s.")


def parse_speed(text: str) -> float:
    """Return bytes per second. '20GB/s' is 20 x 10^9 bytes, '100Gbit/s' is 12.5 x 10^9."""
    found = re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+))\s*([KMGT])(i?)(B|bit|b)(?:/s|ps)", text.strip())
    speed = float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2]) + 1) if found else 0.0
    if found is None or not 0 < speed < math.inf:
        rule = "must be a positive number with a unit: GB/s, MB/s (bytes) or Gbit/s, Mbit/s (bits)"
        raise ConfigError(f"speed {text!r}", rule, "Write it like 20GB/s or 100Gbit/s.")
    return speed if found[4] == "B" else speed / 8


def _named(name: str, table: Mapping[str, Known], what: str, fix: str) -> Known:
    found = table.get(name.strip().lower())
    if found is None:
        raise ConfigError(f"{what} {name!r}", f"is not known; known are: {', '.join(table)}", fix)
    return found


MEASURE = "Write one: `z2all doctor FOLDER --hostfile H --json > FILE`, or without --hostfile for this machine alone."


@dataclass(frozen=True)
class Measured:
    """Measured values of a file; None where the file has no such value."""

    file: str
    link: Link | None = None
    """Slowest connection of two nodes: speed of one TCP stream in its slower direction, half of the round trip. A lower
    bound where NCCL uses InfiniBand or several adapters."""
    all_gather: float | None = None  # Bytes per second between the slowest two nodes, by NCCL (by gloo on CPU nodes)
    disk: float | None = None  # Bytes per second, written and synced in the folder of runs


def read_measured(path: str | Path) -> Measured:
    """Read a file that `z2all doctor --json` has written, for several nodes or for one machine."""
    try:
        content = load_json(read_regular(expanded(path)))
        if isinstance(content, list) and all({"name", "status"} <= entry.keys() for entry in content):
            return _of_one_machine(str(path), content)
        if isinstance(content, dict) and {"findings", "places", "pairs"} <= content.keys():
            return _of_nodes(str(path), content)
        rule = "is JSON of something else than `z2all doctor`"
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
    except ValueError as error:
        rule = f"is not JSON ({error})"
    except (KeyError, TypeError, AttributeError) as error:
        rule = f"is not as `z2all doctor` writes it ({error!r})"
    raise ConfigError(f"file {path}", rule, MEASURE)


def _of_one_machine(file: str, findings: Sequence[Mapping[str, Any]]) -> Measured:
    of_disk = [each.get("measured") for each in findings if each["name"] == "disk speed"]
    speeds = [values["bytes_per_second"] for values in of_disk if values]  # none where nothing could be written
    if not speeds:
        raise ConfigError(f"file {file}", "has no measured figure: neither pairs of nodes nor a disk's speed", MEASURE)
    return Measured(file, disk=_positive(file, "the disk's speed", speeds[0]))


def _of_nodes(file: str, content: Mapping[str, Any]) -> Measured:
    ways: list[tuple[float, float]] = []
    for entry in content["pairs"]:
        pair = (str(entry["from"]), str(entry["to"]))
        latency = _positive(file, f"the latency of {' -> '.join(pair)}", entry["latency_us"]) / 2e6  # of a round trip
        for direction, gigabits in ((pair, entry["gigabits_out"]), (pair[::-1], entry["gigabits_in"])):
            speed = _positive(file, f"the speed of {' -> '.join(direction)}", gigabits) * 1e9 / 8
            ways.append((speed, latency))
    if not ways:
        rule = f"has no pair of nodes that was measured ({len(content['places'])} data interfaces found)"
        raise ConfigError(f"file {file}", rule, "Give `z2all doctor` a hostfile of two nodes or more that connect.")
    turns = (content.get("health") or {}).get("turns", [])
    gathers = [turn["gather_gbps"] for turn in turns if turn["gather_gbps"] is not None]
    all_gather = _positive(file, "the speed of an all-gather", min(gathers)) * 1e9 if gathers else None
    return Measured(file, Link("measured", *min(ways)), all_gather)


def _positive(file: str, what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{what} in {file}", f"is {value!r}, and must be a number above 0", "Measure again.")
    return float(value)
