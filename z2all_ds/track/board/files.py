"""Where a run's files are: this machine or another, asked in the same words."""

import time
from dataclasses import dataclass
from typing import Protocol

from z2all_ds.track.board import remote_agent


class Files(Protocol):
    """A machine's files. Every call may raise OSError; `Unreachable` where the machine does not answer."""

    @property
    def is_far(self) -> bool:
        """Every byte goes over a network."""

    def signs(self, paths: list[str]) -> tuple[float, list[list[float]]]:
        """The machine's clock, and size, time and number of each file, zeros where it is missing."""

    def read(self, path: str, offset: int, length: int) -> bytes: ...

    def lines_at(self, path: str, offsets: list[int]) -> list[tuple[int, bytes]]: ...

    def lines_with(self, path: str, words: list[str], offset: int, length: int) -> list[tuple[int, bytes]]: ...

    def run_folders(self, path: str) -> list[str]: ...

    def file_names(self, path: str) -> list[str]: ...

    def close(self) -> None: ...


class Unreachable(OSError):
    """The machine cannot be asked now; the text says why in one line."""


class LocalFiles:
    """This machine's."""

    is_far = False

    def signs(self, paths: list[str]) -> tuple[float, list[list[float]]]:
        return time.time(), [remote_agent.sign(path) for path in paths]

    def read(self, path: str, offset: int, length: int) -> bytes:
        return remote_agent.read(path, offset, length)

    def lines_at(self, path: str, offsets: list[int]) -> list[tuple[int, bytes]]:
        return remote_agent.lines_at(path, offsets)

    def lines_with(self, path: str, words: list[str], offset: int, length: int) -> list[tuple[int, bytes]]:
        return remote_agent.lines_with(path, words, offset, length)

    def run_folders(self, path: str) -> list[str]:
        return remote_agent.run_folders(path)

    def file_names(self, path: str) -> list[str]:
        return remote_agent.file_names(path)

    def close(self) -> None:
        """Nothing is held open."""


@dataclass(frozen=True)
class OneFile:
    """One of them, as LineTail wants it."""

    files: Files
    path: str

    def size(self) -> int:
        return int(self.files.signs([self.path])[1][0][0])

    def read(self, offset: int, length: int) -> bytes:
        return self.files.read(self.path, offset, length)
