"""Starts the ranks of one machine and waits: `python -m z2all_ds.train.processes.starter RANKS PORT MODULE ...`.

Ends as soon as all are done, or with the code of the first that fails; whoever runs it ends what is left
(`base/child_process.py`).
The deepspeed launcher does this for many machines; for one it would load torch and DeepSpeed two times over, one after
the other, before the first rank begins. This loads neither.
"""

import os
import sys
from collections.abc import Callable

from z2all_ds.base.child_process import start


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torch, DeepSpeed and `World` read; one machine, so that a rank's number there is its number in all."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def start_and_wait(
    ranks: int,
    port: int,
    module: str,
    arguments: list[str],
    environment: Callable[[int, int, int], dict[str, str]] = rank_environment,
) -> int:
    """0, or the code of the first rank that failed, as a shell gives it (128 and the signal's number)."""
    command = [sys.executable, "-u", "-m", module, *arguments]
    running = {
        start(command, {**os.environ, **environment(rank, ranks, port)}, is_owned=False, start_new_session=False).pid
        for rank in range(ranks)
    }
    while running:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if code and pid in running:
            return code if code > 0 else 128 - code
        running.discard(pid)
    return 0


if __name__ == "__main__":
    sys.exit(start_and_wait(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
