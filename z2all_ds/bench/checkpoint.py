"""`z2all bench checkpoint`: how long saves keep training waiting, how fast they come onto the disk and back, beside
DeepSpeed's and torch's own ways and the disk itself, all in one run of the same engine."""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.bench.in_ranks import figures_of_ranks
from z2all_ds.train.command import default_ranks

RANK_MODULE = "z2all_ds.bench.checkpoint_ranks"
SECONDS_PER_MINUTE = 60.0
WAYS = {
    "z2all": "snapshot, written beside training",
    "z2all_waiting": "the same files, while training waits",
    "deepspeed": "engine.save_checkpoint",
    "torch_dcp": "torch.distributed.checkpoint.save",
}


def bench_checkpoint(
    config: str | None, overrides: list[str], ranks: int | None, folder: Path | None, rounds: int
) -> dict[str, Any]:
    """All figures; the way they were measured is told in checkpoint_ranks.py."""
    if rounds < 2:
        raise ConfigError(f"rounds={rounds}", "the first save of each way also pays for memory", "Give at least 2.")
    load_run_config(config, overrides)  # a mistake of the user's is one line
    ranks = default_ranks() if ranks is None else ranks
    with tempfile.TemporaryDirectory(prefix="z2all-bench-", dir=folder) as scratch:
        arguments = ["--dir", scratch, "--rounds", str(rounds), *overrides]
        log = Path(scratch) / "log"
        found = figures_of_ranks(RANK_MODULE, config, arguments, ranks, log, "measuring saves")
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


def to_json(figures: dict[str, Any]) -> str:
    return json.dumps(figures, indent=2)


def to_lines(figures: dict[str, Any]) -> list[str]:
    """For people."""
    size, disk = human_bytes(figures["state_bytes"]), human_bytes(figures["disk_bytes_per_second"])
    where = f"{figures['device']} × {figures['ranks']}, {figures['deepspeed_json']} {figures['dtype']}"
    lines = [f"{where}: {size} of state; the disk itself writes {disk}/s", ""]
    lines.append(f"{'way':<40}{'blocked':>11}{'on disk':>11}{'of disk':>9}{'a minute':>10}{'restore':>11}")
    for way, name in WAYS.items():
        of_way = figures[way]
        restored = of_way.get("restore_seconds")
        lines.append(
            f"{name:<40}{of_way['blocked_seconds_median']:>9.3f} s{of_way['total_seconds_median']:>9.2f} s"
            f"{of_way['share_of_disk_speed']:>9.0%}{of_way['share_of_time_at_one_a_minute']:>10.2%}"
            f"{'-' if restored is None else f'{restored:.2f} s':>11}"
        )
    ours = figures["z2all"]
    longer = figures["deepspeed_blocks_times_as_long"]
    lines += ["", f"DeepSpeed's save keeps training waiting {longer:.1f} times as long"]
    lines.append(f"back to the snapshot in memory: {ours['restore_from_memory_seconds']:.2f} s")
    if ours["step_seconds_beside"]:
        alone, beside = figures["step_seconds_alone"], ours["step_seconds_beside"]
        lines.append(f"a step: {alone:.3f} s alone, {beside:.3f} s while a checkpoint is being written")
    return lines


def _later(seconds: list[float]) -> float:
    """The first of each way makes what the others use again."""
    return statistics.median(seconds[1:])
