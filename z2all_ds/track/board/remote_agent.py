"""What the board asks of the machine that holds a run folder: sizes, bytes, lines near a place, names of run folders.

Here these functions are called as they are. For a run elsewhere the text of this very file is sent over ssh, where a
bare Python 3.7 runs `serve`; so it uses the standard library alone. A request is one line of JSON. An answer is a line
of JSON {"sizes": [...]} or {"error": ...}, followed by that many pieces of bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import IO

NEAR_BYTES = 4096
"""Read at a place to find a whole line; more where lines are longer."""
LONGEST_LINE_BYTES = 1 << 22


def sign(path: str) -> list[float]:
    """Size, moment of the last change and number of the file: other figures where it has changed. Zeros: missing."""
    try:
        found = os.stat(os.path.expanduser(path))
    except (FileNotFoundError, NotADirectoryError):
        return [0, 0.0, 0]
    return [found.st_size, found.st_mtime, found.st_ino]


def read(path: str, offset: int, length: int) -> bytes:
    """Fewer bytes where the file ends, none where it is missing. Opened anew: it may have been replaced."""
    try:
        descriptor = os.open(os.path.expanduser(path), os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    try:
        return os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)


def lines_at(path: str, offsets: list[int]) -> list[tuple[int, bytes]]:
    """The first line that begins at or after each place, with where it begins; none twice, none that is not whole."""
    found: list[tuple[int, bytes]] = []
    try:
        descriptor = os.open(os.path.expanduser(path), os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return found
    try:
        for offset in offsets:
            # From one byte before: where a line ends there, the next one begins at the place itself.
            begin, length = max(0, offset - 1), NEAR_BYTES
            while True:
                content = os.pread(descriptor, length, begin)
                start = 0 if offset == 0 else content.find(b"\n") + 1
                end = content.find(b"\n", start) if start or offset == 0 else -1
                if end >= 0 or len(content) < length or length > LONGEST_LINE_BYTES:
                    break
                length *= 8
            if end >= 0 and (not found or begin + start > found[-1][0]):
                found.append((begin + start, content[start:end]))
    finally:
        os.close(descriptor)
    return found


def lines_with(path: str, words: list[str], offset: int, length: int) -> list[tuple[int, bytes]]:
    """Lines of a part of the file in which one of these words occurs, each with where it begins."""
    content = read(path, offset, length)
    starts = set()
    for word in words:
        place = content.find(word.encode())
        while place >= 0:
            starts.add(content.rfind(b"\n", 0, place) + 1)
            line_end = content.find(b"\n", place)
            place = content.find(word.encode(), line_end) if line_end >= 0 else -1
    found = []
    for start in sorted(starts):
        end = content.find(b"\n", start)
        if end >= 0 and (start > 0 or offset == 0):
            found.append((offset + start, content[start:end]))
    return found


def run_folders(path: str) -> list[str]:
    """The folder itself where it is a run's, else those inside that are; itself also where there is none yet."""
    folder = os.path.expanduser(path)
    if _is_run(folder):
        return [path]
    try:
        inside = sorted(name for name in os.listdir(folder) if _is_run(os.path.join(folder, name)))
    except (FileNotFoundError, NotADirectoryError):
        inside = []
    return [os.path.join(path, name) for name in inside] or [path]


def file_names(path: str) -> list[str]:
    """What the folder holds; nothing where it is missing."""
    try:
        return sorted(os.listdir(os.path.expanduser(path)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_run(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in ("metrics.jsonl", "run.yaml", "events.jsonl"))


def answer(request: dict) -> list[bytes]:
    """What one request asks for, as pieces of bytes."""
    kind = request["ask"]
    if kind == "signs":
        signs = [sign(path) for path in request["paths"]]
        return [json.dumps({"now": time.time(), "signs": signs}).encode()]
    if kind == "read":
        return [read(request["path"], request["offset"], request["length"])]
    if kind == "run_folders":
        return [json.dumps(run_folders(request["path"])).encode()]
    if kind == "file_names":
        return [json.dumps(file_names(request["path"])).encode()]
    if kind == "lines_at":
        found = lines_at(request["path"], request["offsets"])
    else:
        found = lines_with(request["path"], request["words"], request["offset"], request["length"])
    return [json.dumps([offset for offset, _ in found]).encode(), *(line for _, line in found)]


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Until the other side is gone."""
    answers.write(b"z2all board\n")
    answers.flush()
    for line in requests:
        try:
            pieces = answer(json.loads(line))
            answers.write(json.dumps({"sizes": [len(piece) for piece in pieces]}).encode() + b"\n")
        except OSError as error:
            pieces = []
            answers.write(json.dumps({"error": str(error)}).encode() + b"\n")
        for piece in pieces:
            answers.write(piece)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
