"""How far the units of a build are: each writes it into a small file of its own, and the driver reads them all.

Files, not pipes or queues: they work the same for a process on this machine and for a task on another one.
"""

import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from z2all_ds.base.console import Advance

EVERY_SECONDS = 0.5
_COUNTS = struct.Struct("<qq")


class ProgressFile:
    """Raw bytes and documents of one unit so far."""

    def __init__(self, path: Path, documents: Callable[[], int]) -> None:
        self._path, self._documents = path, documents
        self._next = 0.0
        self._raw_bytes = 0

    def __enter__(self) -> "ProgressFile":
        self._file = os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o644)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def advance(self, raw_bytes: int) -> None:
        self._raw_bytes += raw_bytes
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY_SECONDS
            os.pwrite(self._file, _COUNTS.pack(self._raw_bytes, self._documents()), 0)


def read_progress(folder: Path) -> tuple[int, int]:
    """(raw bytes, documents) of all units at work."""
    raw_bytes = documents = 0
    for path in folder.glob("*.progress"):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # finished just now
            continue
        if len(data) == _COUNTS.size:
            some_bytes, some_documents = _COUNTS.unpack(data)
            raw_bytes, documents = raw_bytes + some_bytes, documents + some_documents
    return raw_bytes, documents


class UnitProgress:
    """Moves a bar by what units at work have written into their progress files, from a thread of its own."""

    def __init__(self, folder: Path, advance: Advance) -> None:
        self._folder, self._advance = folder, advance
        self._finished_bytes = self._finished_documents = 0
        self._shown_bytes = 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unit-progress", daemon=True)

    def __enter__(self) -> "UnitProgress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._show(0, 0)

    def unit_finished(self, raw_bytes: int, documents: int) -> None:
        with self._lock:
            self._finished_bytes += raw_bytes
            self._finished_documents += documents

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            self._show(*read_progress(self._folder))

    def _show(self, bytes_at_work: int, documents_at_work: int) -> None:
        with self._lock:
            # A unit that ends between the two looks is counted once at most: the bar may wait, it never goes back.
            seen = max(self._shown_bytes, self._finished_bytes + bytes_at_work)
            documents = self._finished_documents + documents_at_work
            self._advance(seen - self._shown_bytes, f"{documents:,} records")
            self._shown_bytes = seen
