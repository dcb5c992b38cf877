"""A reader of history rows and exit codes in W&B's offline files, which are LevelDB logs of protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES, HEADER_BYTES, FILE_HEADER_BYTES = 32768, 7, 7
WHOLE, LAST = 1, 4


def offline_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of all sessions of a run, in the order in which the sessions started."""
    return [row for file in _offline_files(run_dir) for row in history(file)]


def exit_codes(run_dir: Path) -> list[int]:
    """Return the exit code of each session that has ended, in the order in which they started; W&B shows others than 0
    as failed."""
    records = [record for file in _offline_files(run_dir) for record in _parsed(file)]
    return [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]


def history(path: Path) -> Iterator[dict[str, Any]]:
    for record in _parsed(path):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _offline_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("sinks/wandb/offline-run-*/run-*.wandb"))


def _parsed(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        yield record


def _records(data: bytes) -> Iterator[bytes]:
    position, record = FILE_HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEADER_BYTES
        record += data[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            yield record
            record = b""
