"""Starts the ranks of one machine and waits: `python -m z2all_ds.train.processes.starter RANKS PORT MODULE ...`.

Ends when all ranks are done, or with the code of the first that fails; the caller ends the remaining ones
(`base/child_process.py`). The deepspeed launcher does this for many machines, but it would load torch and DeepSpeed
twice, one after the other, before the first rank starts. This module loads neither.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from z2all_ds.base.child_process import start
from z2all_ds.base.parent_watch import OWNER_VARIABLE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""Schedulers and `docker stop` signal every process. Only the owner, `z2all train`, acts on it: it asks the ranks to
save and stop."""


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block STOP_SIGNALS in this thread. A starter that is started meanwhile inherits that: its interpreter needs some
    tenths of a second until it can ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torch, DeepSpeed and `World` read; on one machine, local rank and rank are equal."""
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
    """Return 0, or the code of the first rank that failed, as in a shell (128 plus the signal number)."""
    if OWNER_VARIABLE in os.environ:
        # The ranks and their children inherit that the signals are ignored; those that were blocked are dropped.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
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
