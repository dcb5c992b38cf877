"""Measurements in training processes: they start like the ranks of a training run, and rank 0 prints one JSON line."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from z2all_ds.base.child_process import run_group
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import Z2allError
from z2all_ds.base.machine import default_environment, free_port
from z2all_ds.base.parent_watch import follow_owner
from z2all_ds.base.world import World
from z2all_ds.bench.shared import error_line
from z2all_ds.train.processes.local_ranks import local_command


def measure_in_ranks(
    module: str, config: str | None, arguments: list[str], ranks: int, log: Path, label: str
) -> dict[str, Any] | str:
    """Run a module in `ranks` processes. Return the figures of rank 0, or the error line if a rank fails."""
    command = local_command([*(["--config", config] if config else []), *arguments], ranks, free_port(), module)
    with heartbeat(label):
        code = run_group(command, {**os.environ, **default_environment(ranks)}, log, stderr_to_log=True)
    output = log.read_text(encoding="utf-8", errors="replace")
    found = [line for line in output.splitlines() if line.startswith("{")]
    if code or not found:
        return error_line(output)
    figures: dict[str, Any] = json.loads(found[-1])
    return figures


def rank_main(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    measure: Callable[[RunConfig, argparse.Namespace, World], dict[str, Any]],
) -> int:
    """Run `measure` in one rank, with the options of `parser` and those of every rank. Return the exit code."""
    parser.add_argument("--config", help="run YAML, or the name of a preset")
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    follow_owner()
    world = World.from_environment()
    try:
        figures = measure(load_run_config(options.config, options.overrides), options, world)
    except Z2allError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    if world.is_main:
        print("\n" + json.dumps(figures), flush=True)  # libraries may leave an incomplete line
    return 0
