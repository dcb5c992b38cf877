"""Errors about content from elsewhere, raised by code that expects it to be valid.

Libraries raise whatever their code runs into when a file has a wrong type, shape or reference, and Rust code panics.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from z2all_ds.base.errors import Z2allError

NOT_ABOUT_CONTENT = (Z2allError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)


@contextmanager
def explain_content(kind: type[Z2allError], what: str, rule: str, fix: str) -> Iterator[None]:
    """Turn any error in the block into one line. Use it only where the content of `what` is the likely cause."""
    try:
        yield
    except NOT_ABOUT_CONTENT:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust code
            raise
        first_line = (str(error).strip().splitlines() or [""])[0][:300]
        if isinstance(error, LookupError) or not first_line:
            first_line = f"{type(error).__name__}: {first_line}".removesuffix(": ")
        raise kind(what, f"{rule} ({first_line})", fix) from error
