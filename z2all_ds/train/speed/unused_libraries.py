"""Prevents transformers from loading libraries that training does not use.

transformers loads what it finds installed: scikit-learn, and with it SciPy and pandas, for assisted generation, SciPy
for object detection losses, torchao for its quantizers, torchvision and torchaudio for images and sound. On a machine
with all of them they took 5 of 16 seconds of imports without bytecode.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("sklearn", "scipy", "torchao", "torchvision", "torchaudio")


@contextmanager
def left_unloaded(names: tuple[str, ...] = UNUSED) -> Iterator[None]:
    """Hide these libraries from imports inside the block; libraries already loaded stay."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is Python's own sign for "not there"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
