"""An object store in this process that fails on request: a real fsspec file system under flaky://."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FlakyStore(MemoryFileSystem):
    """A store in memory, whose next calls raise `errors`, one error per call."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    errors: ClassVar[list[Exception]] = []
    calls: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def _answer(self, call: str) -> None:
        self.calls.append(call)
        if self.errors:
            raise self.errors.pop(0)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._answer("cat_file")
        file = self.store[self._strip_protocol(path)] if self.exists(path) else None
        if file is None:
            raise FileNotFoundError(path)
        return bytes(file.getvalue()[start:end])

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._answer("info")
        return super().info(path, **kwargs)

    def exists(self, path: str, **kwargs: Any) -> bool:
        return self._strip_protocol(path) in self.store

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._answer("pipe_file")
        super().pipe_file(path, value, mode, **kwargs)


fsspec.register_implementation("flaky", FlakyStore, clobber=True)


@contextmanager
def flaky_store() -> Iterator[type[FlakyStore]]:
    """Yield the store, emptied and without errors to raise."""
    for values in (FlakyStore.store, FlakyStore.errors, FlakyStore.calls):
        values.clear()
    yield FlakyStore


def put(location: str, files: dict[str, bytes]) -> None:
    """Write files into a store without raising its `errors`."""
    system, root = fsspec.core.url_to_fs(location)
    for name, data in files.items():
        MemoryFileSystem.pipe_file(system, f"{root}/{name}", data)
