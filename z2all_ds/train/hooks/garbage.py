"""Python's garbage collector, at the same steps on all ranks.

Left to itself it runs whenever a rank has made so many objects, on each rank at another moment, and all others wait for
that one in their next collective. What is there when training begins (modules, the model, the engine) stays until the
end and is not looked through any more.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Around imports: they make 600,000 objects that all stay, and looking through them was a tenth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class GarbageInStep:
    """From its making to `close` nothing else collects."""

    def __init__(self, every_steps: int) -> None:
        """0 leaves it to Python."""
        self._every_steps = every_steps
        if every_steps:
            gc.collect()
            gc.freeze()
            gc.disable()

    def after_step(self, step: int) -> None:
        if self._every_steps and step % self._every_steps == 0:
            # With the collector off everything new is of the youngest kind, and all of it is looked through here; what
            # outlives this and the next time is left alone.
            gc.collect(1)

    def close(self) -> None:
        if self._every_steps:
            gc.unfreeze()
            gc.enable()
