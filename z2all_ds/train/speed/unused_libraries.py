"""Keeps libraries that training has no use for from being loaded along with transformers.

transformers looks for what is installed and loads it with its models: scikit-learn, and with that SciPy and pandas, for
assisted generation, SciPy for losses of object detection, torchao for its quantizers, torchvision and torchaudio for
images and sound. On a machine that had them all they were 5 of 16 seconds of imports without bytecode.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("sklearn", "scipy", "torchao", "torchvision", "torchaudio")


@contextmanager
def left_unloaded(names: tuple[str, ...] = UNUSED) -> Iterator[None]:
    """Inside, whoever looks for them finds nothing; what is loaded already stays."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is Python's own sign for "not there"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
