"""Runs Python's garbage collector at the same steps on all ranks.

By default it runs after a number of allocations, at a different time on each rank, and all other ranks wait for that
rank in their next collective. Objects that exist when training starts (modules, the model, the engine) stay until the
end and are excluded from collection.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from z2all_ds.base.config import RunConfig
from z2all_ds.train.hooks.hook import Hook, Step


@contextmanager
def loading() -> Iterator[None]:
    """Disable the collector during imports: it took a tenth of their time to scan 600,000 permanent objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class GarbageCollection(Hook):
    """Replaces automatic collection from the start until `close`."""

    @classmethod
    def is_wanted(cls, run: RunConfig) -> bool:
        return run.train.collect_every > 0  # otherwise Python decides

    def on_start(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_record(self, step: Step) -> None:
        if step.number % self.context.run.train.collect_every == 0:
            # With the collector off, all new objects are in the youngest generation and are scanned here; objects that
            # survive two of these calls are not scanned again.
            gc.collect(1)

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
