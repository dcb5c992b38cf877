"""When one rank fails, the others fail with it in their next collective; the reason is the first one's to say."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from z2all_ds.errors import ClusterError


class LostPeer(ClusterError):
    """Another rank is gone; what happened to it is not known here."""


PATIENCE_SECONDS = 15.0
"""Launchers look after their ranks every second or so, and end all of them with the code of the first that they find
ended. One that failed only because another did must not be found first, nor speak of it."""
LOST_CONNECTION = "gloo/transport"
"""In gloo's message when a rank's connection breaks. NCCL does not notice: its ranks wait to be ended anyway."""


@contextmanager
def others_speak_first() -> Iterator[None]:
    """Holds back the error of a lost connection until the launcher had time to end this rank."""
    try:
        yield
    except RuntimeError as error:
        if LOST_CONNECTION not in str(error):
            raise
        time.sleep(PATIENCE_SECONDS)
        rule, fix = "it ended in the middle of a step", "See the logs of all ranks, and go on from the last checkpoint."
        raise LostPeer("another rank", rule, fix) from error
