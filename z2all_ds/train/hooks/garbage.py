"""Python's garbage collector, at the same steps on all ranks.

Left to itself it runs whenever a rank has made so many objects, on each rank at another moment, and all others wait for
that one in their next collective. What is there when training begins (modules, the model, the engine) stays until the
end and is not looked through any more.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from z2all_ds.base.config import RunConfig
from z2all_ds.train.hooks.hook import Hook, Step


@contextmanager
def loading() -> Iterator[None]:
    """Around imports: they make 600,000 objects that all stay, and looking through them was a tenth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class GarbageCollection(Hook):
    """From the start to `close` nothing else collects."""

    @classmethod
    def is_wanted(cls, run: RunConfig) -> bool:
        return run.train.collect_every > 0  # else it is left to Python

    def on_start(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_record(self, step: Step) -> None:
        if step.number % self.context.run.train.collect_every == 0:
            # With the collector off everything new is of the youngest kind, and all of it is looked through here; what
            # outlives this and the next time is left alone.
            gc.collect(1)

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
