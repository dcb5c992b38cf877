"""Scaling on paper: the same run on fleets of several sizes, and where sending takes longer than computing.

The global batch stays as it is while every GPU has a micro-batch of it, and grows from there on: a fleet of thousands
cannot share out a small batch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.config import RunConfig
from z2all_ds.base.errors import ConfigError
from z2all_ds.plan.choose import runs_on, with_json
from z2all_ds.plan.estimate import Estimate, estimate
from z2all_ds.plan.fleet import Fleet
from z2all_ds.plan.outlook import Outlook, Risks, look_ahead

SWEPT = ("zero1", "zero2", "zero3", "zero3_hpz")
MOST_GPUS = 1_000_000


@dataclass(frozen=True)
class Point:
    """One JSON on one size of fleet."""

    gpus: int
    of: Estimate
    outlook: Outlook

    @property
    def efficiency(self) -> tuple[float, float]:
        """Share of a step in which GPUs compute: (at least, at most)."""
        time = self.of.time
        assert time is not None
        return time.compute / time.most, time.compute / time.least

    @property
    def sending_takes_over(self) -> bool:
        time = self.of.time
        assert time is not None
        return time.hidden + time.exposed > time.compute


@dataclass(frozen=True)
class Sweep:
    """Points by JSON, each from the smallest fleet to the largest.

    A JSON that does not fit on one misses there, as does one whose dtype the GPU does not have.
    """

    sizes: tuple[int, ...]
    points: dict[str, tuple[Point, ...]]

    def takes_over(self, name: str) -> int | None:
        """The smallest fleet on which sending takes longer than computing; None where it never does."""
        return next((point.gpus for point in self.points[name] if point.sending_takes_over), None)


def parse_sweep(text: str) -> list[int]:
    """`gpus=8,64,512`."""
    name, equals, numbers = text.partition("=")
    sizes = [int(part) if re.fullmatch(r"\s*[0-9]{1,9}\s*", part) else 0 for part in numbers.split(",")]
    if name.strip() != "gpus" or not equals or not all(0 < size <= MOST_GPUS for size in sizes):
        rule = f"must read gpus=N,N,... with numbers from 1 to {MOST_GPUS:,}"
        raise ConfigError(f"--sweep {text}", rule, "For example --sweep gpus=8,64,512,4096.")
    return sorted(set(sizes))


def sweep(run: RunConfig, fleet: Fleet, sizes: Sequence[int], tokens: int, risks: Risks) -> Sweep:
    if fleet.peak is None:
        raise ConfigError("--sweep", "needs the speed of a GPU", "Give --gpu, e.g. --gpu h100, or --peak-tflops.")
    per_node = fleet.network.gpus_per_node
    for size in sizes:
        if size > per_node and size % per_node:
            rule = f"must be whole machines of {per_node}"
            raise ConfigError(f"--sweep gpus={size}", rule, "Give --gpus-per-node, or other sizes.")
    plain = SWEPT if fleet.has_bf16 else ("zero1_fp16", *SWEPT)
    names = plain if run.deepspeed in plain else (*plain, run.deepspeed)
    points: dict[str, tuple[Point, ...]] = {}
    for name in names:
        row = []
        for size in sizes:
            if name == "zero3_hpz" and size <= per_node:
                continue
            of = estimate(at_size(with_json(run, name), size), fleet.of_size(size))
            outlook = look_ahead(of, tokens, risks)
            if of.fits and runs_on(of) and outlook is not None:
                row.append(Point(size, of, outlook))
        points[name] = tuple(row)
    return Sweep(tuple(sizes), points)


def at_size(run: RunConfig, gpus: int) -> RunConfig:
    """With a batch that can be dealt out to so many."""
    once = gpus * run.train.micro_batch
    times = max(1, round(run.train.global_batch / once))
    train = run.train.model_copy(update={"global_batch": times * once})
    return run.model_copy(update={"train": train})


def check_picture(out: Path) -> None:
    if out.suffix not in (".png", ".svg"):
        raise ConfigError(f"--out {out}", "must end in .png or .svg", "Give such a name.")
    if out.is_dir():
        raise ConfigError(f"--out {out}", "is a folder", "Give a file's name.")


def draw(swept: Sweep, out: Path) -> Path:
    """Efficiency over the number of GPUs, a band for each JSON, and beside it the goodput under failures."""
    check_picture(out)
    from matplotlib.figure import Figure

    from z2all_ds.base.atomic import explain_disk_errors, make_folder

    figure = Figure(figsize=(10, 4.5), dpi=120)
    left, right = figure.subplots(1, 2)
    for name, points in swept.points.items():
        if not points:
            continue
        sizes = [point.gpus for point in points]
        low, high = ([point.efficiency[end] for point in points] for end in (0, 1))
        (line,) = left.plot(sizes, low, marker="o", label=name)
        left.fill_between(sizes, low, high, alpha=0.2, color=line.get_color())
        right.plot(sizes, [point.outlook.goodput for point in points], marker="o", label=f"{name}, closed form")
        simulated = [point.outlook.simulated for point in points]
        right.errorbar(
            sizes, [one.goodput for one in simulated], [one.error for one in simulated], fmt="x", color=line.get_color()
        )
    left.set(xlabel="GPUs", ylabel="share of a step in which GPUs compute", ylim=(0, 1.02), xscale="log")
    right.set(xlabel="GPUs", ylabel="share of the time that counts (x: simulated)", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.tight_layout()
    make_folder(out.parent)
    try:
        with explain_disk_errors(out.parent):
            figure.savefig(out)
    except OSError as error:
        raise ConfigError(f"--out {out}", f"cannot be written ({error.strerror})", "Give another place.") from None
    return out
