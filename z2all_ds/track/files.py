"""Access to the files of runs on this machine.

For a run on another machine, the board sends the text of this file over ssh, and a bare Python 3.7 there runs `serve`.
So this file uses only the standard library. Requests and answers are JSON objects on one line after MARK, as in
`base/child_process.py`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import time
from contextlib import suppress
from typing import IO

MARK = "z2all: "
MISSING = (FileNotFoundError, NotADirectoryError)
NEAR_BYTES = 4096
"""Read at once to find a line at an offset."""
LONGEST_LINE_BYTES = 1 << 22
MOST_LOST_BYTES = 1 << 25
"""Read at once in search of line ends that are not found."""
RUN_FILES = ("metrics.jsonl", "run.yaml", "events.jsonl")
"""A folder with one of these is a run folder."""


class Files:
    """Reads files of this machine; a missing file is empty. Other errors are raised as OSError.

    Links are refused: what the board reads is sent to others, and a link in a run folder can lead to any file of the
    user who runs the board.
    """

    is_remote = False
    follows_links = False

    def stats(self, paths: list[str]) -> tuple[float, list[list[float]]]:
        """Return this machine's clock, and [size, modification time, inode] of each file, zero if it is missing."""
        return time.time(), [_stat(path) for path in paths]

    def size(self, path: str) -> int:
        return int(self.stats([path])[1][0][0])

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Return fewer bytes at the end of the file. Open it each time, since it may have been replaced."""
        with suppress(*MISSING), self._open(path, 0) as file:
            file.seek(offset)
            return file.read(length)
        return b""

    def lines_at(self, path: str, offsets: list[int]) -> list[tuple[int, bytes]]:
        """Return the first whole line that begins at or after each offset, with its own offset; none twice."""
        found: list[tuple[int, bytes]] = []
        lost_bytes = 0
        with suppress(*MISSING), self._open(path, NEAR_BYTES) as file:
            for offset in offsets:
                if lost_bytes >= MOST_LOST_BYTES:
                    break
                # From one byte before: if a line ends there, the next one begins at the offset itself.
                file.seek(max(0, offset - 1))
                line = file.readline(LONGEST_LINE_BYTES) if offset else b"\n"
                if line.endswith(b"\n"):
                    begin, line = file.tell(), file.readline(LONGEST_LINE_BYTES)
                if not line.endswith(b"\n"):
                    lost_bytes += len(line)
                elif not found or begin > found[-1][0]:
                    found.append((begin, line[:-1]))
        return found

    def lines_with(self, path: str, words: list[str], offset: int, length: int) -> list[tuple[int, bytes]]:
        """Return the whole lines of a part of the file that contain one of these words, with their offsets."""
        *lines, _ = self.read(path, offset, length).split(b"\n")
        found, start = [], offset
        for line in lines:
            is_whole = start > offset or offset == 0
            if is_whole and any(word.encode() in line for word in words):
                found.append((start, line))
            start += len(line) + 1
        return found

    def run_folders(self, path: str) -> list[str]:
        """Return the folder itself if it is a run folder or has none inside, else the run folders inside; raise if it
        does not exist."""
        folder = os.path.expanduser(path)
        if _is_run(folder):
            return [path]
        inside = [name for name in sorted(os.listdir(folder)) if self._is_run_inside(os.path.join(folder, name))]
        return [os.path.join(path, name) for name in inside] or [path]

    def file_names(self, path: str) -> list[str]:
        """Return the names in a folder inside a run folder."""
        folder = os.path.expanduser(path)
        with suppress(*MISSING):
            return sorted(os.listdir(folder)) if self.follows_links or not os.path.islink(folder) else []
        return []

    def _is_run_inside(self, folder: str) -> bool:
        """Return whether a folder is a run folder. Runs are often linked, but a link of another user may lead to a
        folder that only the board's user can read."""
        if os.path.islink(folder) and not self.follows_links:
            with suppress(*MISSING):
                return os.lstat(folder).st_uid in (os.geteuid(), 0) and _is_run(folder)
        return _is_run(folder)

    def close(self) -> None:
        """Close the connection to another machine."""

    def _open(self, path: str, buffering: int) -> IO[bytes]:
        """Open a regular file; O_NONBLOCK, since opening a FIFO would wait for its writer."""

        def opener(name: str, flags: int) -> int:
            try:
                handle = os.open(name, flags | os.O_NONBLOCK | (0 if self.follows_links else os.O_NOFOLLOW))
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise OSError(errno.ELOOP, "a symbolic link, which is not followed", name) from None
            mode = os.fstat(handle).st_mode
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` itself refuses a folder
                return handle
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file", name)

        return open(os.path.expanduser(path), "rb", buffering, opener=opener)


class LinkedFiles(Files):
    """Reads files of this machine for their own user."""

    follows_links = True


def _stat(path: str) -> list[float]:
    with suppress(*MISSING):
        found = os.stat(os.path.expanduser(path))
        return [found.st_size, found.st_mtime, found.st_ino]
    return [0, 0.0, 0]


def _is_run(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in RUN_FILES)


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Call the methods of `Files` that `requests` name, until the board closes the connection."""
    files = Files()
    answers.write(MARK + "{}\n")
    answers.flush()
    for line in requests:
        request = json.loads(line[len(MARK) :])
        try:
            answer = {"result": getattr(files, request["method"])(*request["arguments"])}
        except OSError as error:
            answer = {"error": str(error)}
        # surrogateescape: bytes become a string without loss
        text = json.dumps(answer, default=lambda content: content.decode("utf-8", "surrogateescape"))
        answers.write(MARK + text + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
