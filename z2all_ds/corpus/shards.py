"""Makes shards from parts: they are planned from the lengths of the documents, and each is made independently.

A large part with all its documents becomes a shard by a hard link. Small parts and parts that lost documents are copied
together until a shard is full.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from z2all_ds.base.atomic import HashedFile, explain_disk_errors, write_whole
from z2all_ds.base.errors import DataError
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.corpus.parts import Part

BLOCK_BYTES = 524_288
SMALLEST_SHARE = 16
"""A complete part of at least 1/16 of the maximum size becomes a shard of its own."""


@dataclass(frozen=True)
class PartSlice:
    """The documents `start` to `stop` - 1 of one part, which go into one shard."""

    part: Part
    start: int
    stop: int
    documents: int
    """Number of selected documents among them."""

    @property
    def is_whole_part(self) -> bool:
        return self.documents == self.part.documents


@dataclass(frozen=True)
class ShardTask:
    """The input of one shard."""

    folder: str
    name: str
    domain: str
    pieces: tuple[PartSlice, ...]


def plan_shards(parts: Sequence[Part], folder: Path, domain: str, prefix: str, max_shard_bytes: int) -> list[ShardTask]:
    """Fills one shard after the other. Keeps the lengths of only one part in memory."""
    tasks: list[ShardTask] = []
    pieces: list[PartSlice] = []
    room = max_shard_bytes

    def close() -> None:
        nonlocal room
        if pieces:
            tasks.append(ShardTask(str(folder), f"{prefix}-{len(tasks):05d}.jsonl", domain, tuple(pieces)))
        pieces.clear()
        room = max_shard_bytes

    for part in parts:
        if not part.keep and max(1, max_shard_bytes // SMALLEST_SHARE) <= part.bytes <= max_shard_bytes:
            close()
            pieces.append(PartSlice(part, 0, part.documents, part.documents))
            close()
            continue
        kept = part.kept()
        ends = np.cumsum(part.lengths()[kept], dtype=np.int64)
        done = 0
        while done < len(kept):
            before = int(ends[done - 1]) if done else 0
            fits = int(np.searchsorted(ends, before + room, side="right"))
            if fits > done:
                pieces.append(PartSlice(part, int(kept[done]), int(kept[fits - 1]) + 1, fits - done))
                room -= int(ends[fits - 1]) - before
                done = fits
            elif pieces:
                close()
            else:
                rule = f"{int(ends[done]) - before:,} bytes of JSON, more than a whole shard ({max_shard_bytes:,})"
                fix = "Lower --max-record-bytes to skip such documents, or raise max_shard_bytes."
                raise DataError(f"document {part.first_id + int(kept[done])} of domain {domain}", rule, fix)
    close()
    return tasks


def make_shard(task: ShardTask) -> ShardInfo:
    """Makes the shard unless it is finished. Its description is written last and marks it as finished."""
    path = Path(task.folder) / task.name
    description = path.with_suffix(".json")
    if description.exists():
        return ShardInfo(**json.loads(description.read_bytes()))
    with explain_disk_errors(path.parent):
        info = _link(task, path) or _copy(task, path)
        write_whole(description, json.dumps(asdict(info)))
    return info


def _link(task: ShardTask, path: Path) -> ShardInfo | None:
    """Links a complete part under the name of the shard. The part stays, so a build can be interrupted at any time."""
    if len(task.pieces) != 1 or not task.pieces[0].is_whole_part:
        return None
    part = task.pieces[0].part
    path.unlink(missing_ok=True)
    try:
        os.link(part.path, path)
    except OSError:  # a file system without hard links
        return None
    return ShardInfo(task.name, task.domain, part.documents, part.bytes, part.sha256)


def _copy(task: ShardTask, path: Path) -> ShardInfo:
    with HashedFile(path) as file:
        for piece in task.pieces:
            for block in _blocks(piece):
                file.write(block)
        file.finish(path)
    documents = sum(piece.documents for piece in task.pieces)
    return ShardInfo(task.name, task.domain, documents, file.size, file.sha256)


def _blocks(piece: PartSlice) -> Iterator[bytes]:
    """Yields the selected lines, in order."""
    with open(piece.part.path, "rb") as stream:
        for begin, end in _byte_ranges(piece):
            stream.seek(begin)
            while begin < end:
                block = stream.read(min(BLOCK_BYTES, end - begin))
                if not block:
                    raise DataError(piece.part.path, "is shorter than when it was written", "Remove it, build again.")
                begin += len(block)
                yield block


def _byte_ranges(piece: PartSlice) -> Iterator[tuple[int, int]]:
    """Returns (begin, end) of each run of selected documents."""
    kept = piece.part.kept()
    kept = kept[np.searchsorted(kept, piece.start) : np.searchsorted(kept, piece.stop)]
    last_of_run = np.flatnonzero(np.diff(kept) != 1)
    firsts = kept[np.concatenate([[0], last_of_run + 1])]
    lasts = kept[np.concatenate([last_of_run, [len(kept) - 1]])]
    borders = np.concatenate([[0], np.cumsum(piece.part.lengths(), dtype=np.int64)])
    return zip(borders[firsts].tolist(), borders[lasts + 1].tolist(), strict=True)
