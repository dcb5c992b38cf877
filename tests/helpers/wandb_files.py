"""A reader of the history rows in W&B's offline files, which are LevelDB logs of protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES, HEADER_BYTES, FILE_HEADER_BYTES = 32768, 7, 7
WHOLE, LAST = 1, 4


def offline_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of all sessions of a run, in the order in which the sessions started."""
    files = sorted(run_dir.glob("sinks/wandb/offline-run-*/run-*.wandb"))
    return [row for file in files for row in history(file)]


def history(path: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


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
