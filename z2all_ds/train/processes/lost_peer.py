"""When one rank fails, the others fail in their next collective; only the first should report the cause."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from z2all_ds.base.errors import ClusterError
from z2all_ds.base.world import World


class LostPeer(ClusterError):
    """Another rank is gone; its error is not known here."""


PATIENCE_SECONDS = 15.0
"""Launchers poll their ranks about once per second, and end all of them with the code of the first one found to have
ended. A rank that failed only because another did must not be found first, nor report its error."""
LOST_CONNECTION = "gloo/transport"
"""Part of gloo's message when a connection breaks. NCCL does not notice: its ranks wait until they are ended."""


def leave_together(world: World, beat: Callable[[], None]) -> None:
    """Wait for all ranks. Launchers treat the requeue exit code as a failure and end the other ranks when they find a
    rank that ended with it, while rank 0 may still be sending its last records."""
    import torch.distributed as dist

    if world.world_size == 1:
        return
    with suppress(RuntimeError):  # another rank is gone: nothing to wait for
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            beat()
            time.sleep(0.05)


@contextmanager
def defer_peer_errors() -> Iterator[None]:
    """Delay the error of a lost connection until the launcher had time to end this rank."""
    try:
        yield
    except RuntimeError as error:
        if LOST_CONNECTION not in str(error):
            raise
        time.sleep(PATIENCE_SECONDS)
        rule, fix = "it ended during a step", "See the logs of all ranks, then resume from the last checkpoint."
        raise LostPeer("another rank", rule, fix) from error
