"""When one rank fails, the others fail with it in their next collective; the reason is the first one's to say."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from z2all_ds.base.errors import ClusterError
from z2all_ds.base.world import World


class LostPeer(ClusterError):
    """Another rank is gone; what happened to it is not known here."""


PATIENCE_SECONDS = 15.0
"""Launchers look after their ranks every second or so, and end all of them with the code of the first that they find
ended. One that failed only because another did must not be found first, nor speak of it."""
LOST_CONNECTION = "gloo/transport"
"""In gloo's message when a rank's connection breaks. NCCL does not notice: its ranks wait to be ended anyway."""


def leave_together(world: World, beat: Callable[[], None]) -> None:
    """Waits for all ranks. Launchers take the code that asks for another start for a failure, and end the others when
    they find one rank ended with it: rank 0 may still be sending its last records."""
    import torch.distributed as dist

    if world.world_size == 1:
        return
    with suppress(RuntimeError):  # another one is gone: there is nobody to wait for
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            beat()
            time.sleep(0.05)


@contextmanager
def defer_peer_errors() -> Iterator[None]:
    """Holds back the error of a lost connection until the launcher had time to end this rank."""
    try:
        yield
    except RuntimeError as error:
        if LOST_CONNECTION not in str(error):
            raise
        time.sleep(PATIENCE_SECONDS)
        rule, fix = "it ended in the middle of a step", "See the logs of all ranks, and go on from the last checkpoint."
        raise LostPeer("another rank", rule, fix) from error
