"""`z2all bench checkpoint`: how long saves block training, and how fast they reach the disk and are read back.

The saves of DeepSpeed and torch and the raw disk are measured in the same run of the same engine.
"""

import statistics
from pathlib import Path
from typing import Any

from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import MachineError
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.in_ranks import measure_in_ranks
from z2all_ds.bench.shared import require_at_least, scratch_folder
from z2all_ds.train.command import default_ranks

RANK_MODULE = "z2all_ds.bench.checkpoint_ranks"
SECONDS_PER_MINUTE = 60.0
METHODS = {
    "z2all": "snapshot, written during training",
    "z2all_waiting": "the same files, training waits",
    "deepspeed": "engine.save_checkpoint",
    "torch_dcp": "torch.distributed.checkpoint.save",
    "torch_dcp_async": "torch.distributed.checkpoint.async_save",
}


def bench_checkpoint(
    config: str | None, overrides: list[str], ranks: int | None, folder: Path | None, rounds: int
) -> dict[str, Any]:
    """Return all figures; `checkpoint_ranks.py` measures them."""
    require_at_least(2, rounds=rounds)  # the first save of each method also allocates memory and is not counted
    load_run_config(config, overrides)
    ranks = default_ranks() if ranks is None else ranks
    with scratch_folder(folder) as scratch:
        arguments = ["--dir", str(scratch), "--rounds", str(rounds), *overrides]
        figures = measure_in_ranks(RANK_MODULE, config, arguments, ranks, scratch / "log", "measuring saves")
    if isinstance(figures, str):
        raise MachineError("measuring saves", f"the ranks failed: {figures}", "Give a smaller model.")
    for method in METHODS:
        one = figures[method]
        one["blocked_seconds_median"] = statistics.median(one["blocked_seconds"][1:])
        one["total_seconds_median"] = statistics.median(one["total_seconds"][1:])
        one["bytes_per_second"] = figures["state_bytes"] / one["total_seconds_median"]
        one["share_of_disk_speed"] = one["bytes_per_second"] / figures["disk_bytes_per_second"]
        one["share_of_time_at_one_a_minute"] = one["blocked_seconds_median"] / SECONDS_PER_MINUTE
    ours, theirs = (figures[method]["blocked_seconds_median"] for method in ("z2all", "deepspeed"))
    return {**figures, "deepspeed_blocks_times_as_long": theirs / ours}


def describe(figures: dict[str, Any]) -> Shown:
    """Yield the state and the disk, a table of methods, and the effect on training."""
    size, disk = human_bytes(figures["state_bytes"]), human_bytes(figures["disk_bytes_per_second"])
    where = f"{figures['device']} × {figures['ranks']}, {figures['deepspeed_json']} {figures['dtype']}"
    yield f"{where}: {size} of state; the raw disk writes {disk}/s"
    rows = []
    for method, name in METHODS.items():
        one = figures[method]
        seconds = (f"{one['blocked_seconds_median']:.3f} s", f"{one['total_seconds_median']:.2f} s")
        shares = (f"{one['share_of_disk_speed']:.0%}", f"{one['share_of_time_at_one_a_minute']:.2%}")
        rows.append((name, *seconds, *shares, f"{one['restore_seconds']:.2f} s" if "restore_seconds" in one else "-"))
    head = ("method", "training waits", "on disk after", "of disk speed", "of the time at one per minute", "restore")
    yield Table(head, rows)
    ours = figures["z2all"]
    yield f"DeepSpeed's save blocks training {figures['deepspeed_blocks_times_as_long']:.1f} times as long"
    yield f"restore from the snapshot in memory: {ours['restore_from_memory_seconds']:.2f} s"
    if ours["step_seconds_beside"]:
        alone, during = figures["step_seconds_alone"], ours["step_seconds_beside"]
        yield f"a step takes {alone:.3f} s, and {during:.3f} s while a checkpoint is being written"
