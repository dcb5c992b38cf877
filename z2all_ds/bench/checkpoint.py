"""`z2all bench checkpoint`: how long saves keep training waiting, and how fast they get to the disk and back.

DeepSpeed's and torch's own ways and the disk itself are measured in the same run of the same engine.
"""

import statistics
from pathlib import Path
from typing import Any

from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import MachineError
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.in_ranks import figures_of_ranks
from z2all_ds.bench.shared import require_at_least, scratch_folder
from z2all_ds.train.command import default_ranks

RANK_MODULE = "z2all_ds.bench.checkpoint_ranks"
SECONDS_PER_MINUTE = 60.0
WAYS = {
    "z2all": "snapshot, written during training",
    "z2all_waiting": "the same files, while training waits",
    "deepspeed": "engine.save_checkpoint",
    "torch_dcp": "torch.distributed.checkpoint.save",
}


def bench_checkpoint(
    config: str | None, overrides: list[str], ranks: int | None, folder: Path | None, rounds: int
) -> dict[str, Any]:
    """All figures; checkpoint_ranks.py says how they are measured."""
    require_at_least(2, rounds=rounds)  # the first save of each way also pays for memory
    load_run_config(config, overrides)  # a mistake of the user's is one line
    ranks = default_ranks() if ranks is None else ranks
    with scratch_folder(folder) as scratch:
        arguments = ["--dir", str(scratch), "--rounds", str(rounds), *overrides]
        found = figures_of_ranks(RANK_MODULE, config, arguments, ranks, scratch / "log", "measuring saves")
    if isinstance(found, str):
        raise MachineError("measuring saves", f"the ranks failed: {found}", "Give a smaller model.")
    return summarised(found)


def summarised(figures: dict[str, Any]) -> dict[str, Any]:
    """The ratios: of what training loses, and of the disk's own speed."""
    size, disk = figures["state_bytes"], figures["disk_bytes_per_second"]
    for way in WAYS:
        of_way = figures[way]
        of_way["blocked_seconds_median"] = _later(of_way["blocked_seconds"])
        of_way["total_seconds_median"] = _later(of_way["total_seconds"])
        of_way["bytes_per_second"] = size / of_way["total_seconds_median"]
        of_way["share_of_disk_speed"] = of_way["bytes_per_second"] / disk
        of_way["share_of_time_at_one_a_minute"] = of_way["blocked_seconds_median"] / SECONDS_PER_MINUTE
    figures["deepspeed_blocks_times_as_long"] = (
        figures["deepspeed"]["blocked_seconds_median"] / figures["z2all"]["blocked_seconds_median"]
    )
    return figures


def describe(figures: dict[str, Any]) -> Shown:
    """Yields the state and the disk, a table of ways to save, and what they mean for training."""
    size, disk = human_bytes(figures["state_bytes"]), human_bytes(figures["disk_bytes_per_second"])
    where = f"{figures['device']} × {figures['ranks']}, {figures['deepspeed_json']} {figures['dtype']}"
    yield f"{where}: {size} of state; the disk itself writes {disk}/s"
    yield Table(
        ("way", "blocked", "on disk", "of disk", "at one per minute", "restore"),
        [
            (
                name,
                f"{of_way['blocked_seconds_median']:.3f} s",
                f"{of_way['total_seconds_median']:.2f} s",
                f"{of_way['share_of_disk_speed']:.0%}",
                f"{of_way['share_of_time_at_one_a_minute']:.2%}",
                f"{of_way['restore_seconds']:.2f} s" if "restore_seconds" in of_way else "-",
            )
            for name, of_way in ((name, figures[way]) for way, name in WAYS.items())
        ],
    )
    ours, longer = figures["z2all"], figures["deepspeed_blocks_times_as_long"]
    yield f"DeepSpeed's save keeps training waiting {longer:.1f} times as long"
    yield f"back to the snapshot in memory: {ours['restore_from_memory_seconds']:.2f} s"
    if ours["step_seconds_beside"]:
        alone, during = figures["step_seconds_alone"], ours["step_seconds_beside"]
        yield f"a step: {alone:.3f} s alone, {during:.3f} s while a checkpoint is being written"


def _later(seconds: list[float]) -> float:
    """Returns the median without the first save, which makes what the others use again."""
    return statistics.median(seconds[1:])
