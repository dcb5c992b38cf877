"""Script that starts a training, kills it with SIGKILL at a chosen moment, and starts it again, many times.

Loading torch and DeepSpeed takes ten times as long as the short trainings here, so every rank is a fork of this
process: it runs the whole of `pretrain.main`, with its own process group, engine and files.

The file named on the command line holds the plan: `arguments` of the run, `run_dir`, `ranks` and `kills`. A kill has:
- `place`: where saves are observed, `memory` or `disk`;
- `changes`: the number of changes to wait for there;
- `half_done`: whether to wait for an incomplete save there afterwards;
- `delay_seconds`: the time between that moment and the kill;
- `victims`: the ranks to kill;
- `with_children`: whether the ranks' writers are killed at the same time, as when a container is killed; otherwise
  they notice it by themselves;
- `forget_memory`: whether to remove the snapshots in memory afterwards, as a reboot would.
The last run is not killed. The script prints what it found after each kill to stdout, as JSON.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from z2all_ds.base.machine import default_environment, free_port
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import layout, memory

END_PATIENCE_SECONDS = 60.0
STEPS_OF_LAST_RUN = 5


def start(arguments: list[str], rank: int, ranks: int, port: int) -> int:
    """Fork a new rank, and return its pid."""
    number = os.fork()
    if number:
        return number
    os.setsid()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from z2all_ds.train.pretrain import main

    code = 99
    try:
        code = main(arguments)
    finally:
        os._exit(code)


def seen(folder: RunFolder, place: str) -> Any:
    """Return a value that changes whenever a save starts, progresses or ends."""
    if place == "memory":
        return in_memory(folder)
    names = sorted(os.listdir(folder.checkpoints)) if folder.checkpoints.is_dir() else []
    return names, [layout.newest_step(folder.checkpoints)]


def half_done(folder: RunFolder, place: str) -> bool:
    """Return whether a save is incomplete; in memory, only one of two slots is complete while the other is written."""
    return len(in_memory(folder)) == 1 if place == "memory" else bool(partial(folder))


def wait_for(folder: RunFolder, kill: dict[str, Any], processes: list[int]) -> None:
    """Wait for the moment of a kill; changes count from the run's event `started`, because it cleans up before."""
    deadline = time.monotonic() + END_PATIENCE_SECONDS
    begun = _times_started(folder)
    while _times_started(folder) == begun:
        _still_there(processes, deadline)
    place = kill["place"]
    before = seen(folder, place)
    for _ in range(kill["changes"]):
        while (now := seen(folder, place)) == before:
            _still_there(processes, deadline)
        before = now
    while kill["half_done"] and not half_done(folder, place):
        _still_there(processes, deadline)


def _times_started(folder: RunFolder) -> int:
    return folder.events.read_bytes().count(b'"started"') if folder.events.exists() else 0


def _still_there(processes: list[int], deadline: float) -> None:
    for number in processes:
        ended, status = os.waitpid(number, os.WNOHANG)
        assert not ended, f"a rank ended by itself with {status}"
    assert time.monotonic() < deadline, "nothing was saved"
    time.sleep(0.0002)


def end_of(number: int) -> None:
    deadline = time.monotonic() + END_PATIENCE_SECONDS
    while os.waitpid(number, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(number, signal.SIGKILL)
            raise AssertionError("a rank that lost another did not end")
        time.sleep(0.01)


def _steps(folder: RunFolder) -> int:
    return folder.metrics.read_bytes().count(b"\n")


def partial(folder: RunFolder) -> list[str]:
    return [path.name for path in folder.checkpoints.glob(f"{layout.TEMPORARY_PREFIX}*")]


def in_memory(folder: RunFolder) -> list[int]:
    line = memory.snapshot_folder(folder)
    return [snapshot.step for snapshot in line.snapshots()] if line else []


def found_after(folder: RunFolder) -> dict[str, Any]:
    """Return what is on disk and in memory after a kill."""
    newest, damaged = layout.find_latest(folder.checkpoints)
    return {
        "on_disk": newest.step if newest else 0,
        "damaged": damaged,
        "partial": partial(folder),
        "in_memory": in_memory(folder),
    }


def main() -> None:
    plan = json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8"))
    folder, ranks = RunFolder(Path(plan["run_dir"])), plan["ranks"]
    os.environ.update(default_environment(ranks))
    os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads does not survive a fork
    found = []
    for kill in plan["kills"]:
        port = free_port()
        processes = [start(plan["arguments"], rank, ranks, port) for rank in range(ranks)]
        wait_for(folder, kill, processes)
        time.sleep(kill["delay_seconds"])
        for rank in kill["victims"]:
            (os.killpg if kill["with_children"] else os.kill)(processes[rank], signal.SIGKILL)
        for number in processes:
            end_of(number)
        found.append(found_after(folder))
        if kill["forget_memory"]:
            memory.remove_snapshots(folder)
    port, end_step = free_port(), _steps(folder) + STEPS_OF_LAST_RUN
    last = [*plan["arguments"], f"train.stop_at_step={end_step}"]
    codes = [os.waitpid(number, 0)[1] for number in [start(last, rank, ranks, port) for rank in range(ranks)]]
    print("\n" + json.dumps({"found": found, "codes": codes, "end_step": end_step}))


if __name__ == "__main__":
    main()
