"""Compares shards with the checksums of their manifest while a run reads them.

A shard is queued when it is first opened, and one thread per process reads the queued files, at low priority. A file
that differs is an error at the next opening in its folder: the thread itself reports nothing. Files in object stores
are left out, as each would have to be downloaded completely.

The processes of a launch on one node divide the files: the first to open a file locks it, and keeps the lock for as
long as it lives, unless the file differs. All locks are byte ranges of one file, so they need no cleaning up.
"""

import atexit
import fcntl
import hashlib
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from z2all_ds.base.errors import DataError, MachineError
from z2all_ds.base.machine import private_temp_dir
from z2all_ds.base.storage import Folder, Stamp
from z2all_ds.corpus.reading.shards import content_changed

CHUNK_BYTES = 1 << 20
SHARE_OF_TIME = 0.25
"""Part of the time in which the thread works; the rest it waits. So it takes no more than this part of the speed of a
slow disk, and of one core."""


class _File(NamedTuple):
    path: str
    stamp: Stamp
    sha256: str


class ShardVerifier:
    """The files that this process has verified or is going to verify, each once unless it changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[_File] = set()
        self._waiting: deque[tuple[_File, Folder, str, str]] = deque()
        """Each with its folder, its name in it, and the fix of its error."""
        self._errors: dict[str, DataError] = {}
        """By location of the folder, until it is raised."""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._claims: int | None = None

    def opened(self, folder: Folder, name: str, sha256: str | None, fix: str) -> None:
        """Verify a file in the background, unless that is done. Raise if a file of this folder was found to differ."""
        if not folder.is_local or sha256 is None:
            return
        with self._lock:
            error = self._errors.pop(folder.location, None)
        if error is not None:
            raise error
        try:
            file = _File(folder.where(name), folder.stamp(name), sha256)
        except OSError:  # the reader reports it
            return
        with self._lock:
            if file in self._known or self._stop.is_set() or not self._claim(file):
                return
            self._known.add(file)
            self._waiting.append((file, folder, name, fix))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="z2all-verify-shards", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread. It is not waited for if it hangs in a read."""
        self._stop.set()
        if (thread := self._thread) is not None:
            thread.join(timeout=1.0)

    def reset_in_child(self) -> None:
        """Forget everything after a fork: thread, locks and verified files belong to the parent."""
        if self._claims is not None:
            os.close(self._claims)
        self.__init__()  # type: ignore[misc]

    def _work(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread only
        while True:
            with self._lock:
                if self._stop.is_set() or not self._waiting:
                    self._thread = None
                    return
                file, folder, name, fix = self._waiting.popleft()
            with suppress(OSError):  # what cannot be read is reported by the reader that needs it
                if self._differs(file, folder, name):
                    with self._lock:
                        self._errors[folder.location] = content_changed(file.path, fix)
                        self._known.discard(file)  # verified again at the next opening, if the error stopped nothing
                        self._release(file)

    def _differs(self, file: _File, folder: Folder, name: str) -> bool:
        digest, started = hashlib.sha256(), time.monotonic()
        for chunk in folder.chunks(name, CHUNK_BYTES):
            digest.update(chunk)
            if self._stop.wait((time.monotonic() - started) * (1 / SHARE_OF_TIME - 1)):
                return False
            started = time.monotonic()
        return digest.hexdigest() != file.sha256

    def _claim(self, file: _File) -> bool:
        """Return False if another process verifies the file, or has found that it is as it should be."""
        try:
            if self._claims is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._claims = os.open(private_temp_dir() / "verified_shards", flags, 0o600)
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _lock_offset(file))
        except BlockingIOError:
            return False
        except (OSError, MachineError):
            pass  # no locks here: every process verifies for itself
        return True

    def _release(self, file: _File) -> None:
        if self._claims is not None:
            with suppress(OSError):
                fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, _lock_offset(file))


def _lock_offset(file: _File) -> int:
    launch = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return int.from_bytes(hashlib.sha256(repr((launch, file)).encode()).digest()[:8], "little") >> 2


VERIFIER = ShardVerifier()
os.register_at_fork(after_in_child=VERIFIER.reset_in_child)
atexit.register(VERIFIER.stop)
