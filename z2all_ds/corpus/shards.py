"""From parts to shards: which lines go into which shard is planned from their lengths; each is written by itself.

A line gets its numbers here. `gid` runs on over the documents that stay; `id` is the place of a document in its source,
so it does not change when others are dropped.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from z2all_ds.atomic import machine_limits_named, publish, temporary_name, write_whole
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.errors import DataError

BLOCK_BYTES = 524_288
_POWERS_OF_TEN = 10 ** np.arange(1, 19, dtype=np.int64)


@dataclass(frozen=True)
class Part:
    """A finished unit's lines, and which of them stay."""

    path: str
    """Of the `.lines` file; `.lengths` lies beside it."""
    documents: int
    keep: str = ""
    """File with one byte a document, 1 for those that stay; empty if all do."""

    def lengths(self) -> np.ndarray:
        return np.fromfile(Path(self.path).with_suffix(".lengths"), dtype=np.uint32).astype(np.int64)

    def kept(self) -> np.ndarray:
        """Places of the documents that stay."""
        return np.flatnonzero(np.fromfile(self.keep, dtype=np.bool_)) if self.keep else np.arange(self.documents)


@dataclass(frozen=True)
class Piece:
    """The documents of one part, from `start` to before `stop`, that go into one shard."""

    part: Part
    start: int
    stop: int
    first_id: int
    """Of the part's document 0."""


@dataclass(frozen=True)
class ShardTask:
    """Everything that writing one shard needs."""

    folder: str
    name: str
    domain: str
    first_gid: int
    pieces: tuple[Piece, ...]


def line_start(domain: str) -> bytes:
    """What takes the place of a line's opening bracket, as a format for gid and id."""
    return b'{"gid":%%d,"id":%%d,"data_src":%s,' % json.dumps(domain, ensure_ascii=False).encode()


def numbered_bytes(lengths: np.ndarray, gids: np.ndarray, ids: np.ndarray, domain: str) -> np.ndarray:
    """Bytes of lines once they have their numbers."""
    digits = np.searchsorted(_POWERS_OF_TEN, gids, side="right") + np.searchsorted(_POWERS_OF_TEN, ids, side="right")
    return lengths + digits + len(line_start(domain) % (0, 0)) - len(b"{")


def plan_shards(
    parts: Sequence[Part], folder: Path, domain: str, prefix: str, first_gid: int, max_shard_bytes: int
) -> list[ShardTask]:
    """Fills shard after shard. Needs memory for the numbers of one part at a time."""
    tasks: list[ShardTask] = []
    pieces: list[Piece] = []
    shard_gid = gid = first_gid
    first_id, room = 0, max_shard_bytes

    def close() -> None:
        nonlocal shard_gid, room
        tasks.append(ShardTask(str(folder), f"{prefix}-{len(tasks):05d}.jsonl", domain, shard_gid, tuple(pieces)))
        pieces.clear()
        shard_gid, room = gid, max_shard_bytes

    for part in parts:
        kept = part.kept()
        ids = first_id + kept
        ends = np.cumsum(numbered_bytes(part.lengths()[kept], gid + np.arange(len(kept)), ids, domain))
        done = 0
        while done < len(kept):
            before = int(ends[done - 1]) if done else 0
            fits = int(np.searchsorted(ends, before + room, side="right"))
            if fits > done:
                pieces.append(Piece(part, int(kept[done]), int(kept[fits - 1]) + 1, first_id))
                gid += fits - done
                room -= int(ends[fits - 1]) - before
                done = fits
            elif pieces:
                close()
            else:
                rule = f"{int(ends[done]) - before:,} bytes of JSON, more than a whole shard ({max_shard_bytes:,})"
                fix = "Lower --max-record-bytes to leave such documents out, or raise max_shard_bytes."
                raise DataError(f"document {int(ids[done])} of domain {domain}", rule, fix)
        first_id += part.documents
    if pieces:
        close()
    return tasks


def write_shard(task: ShardTask) -> ShardInfo:
    """Writes the shard, or finds it written: its description, renamed last, is the proof."""
    path = Path(task.folder) / task.name
    description = path.with_suffix(".json")
    if description.exists():
        return ShardInfo(**json.loads(description.read_bytes()))
    digest, size, gid = hashlib.sha256(), 0, task.first_gid
    start = line_start(task.domain)
    with machine_limits_named(path.parent):
        temporary = temporary_name(path)
        try:
            with open(temporary, "wb") as stream:
                for piece in task.pieces:
                    for block, documents in _numbered_blocks(piece, gid, start):
                        stream.write(block)
                        digest.update(block)
                        size += len(block)
                        gid += documents
                stream.flush()
                os.fsync(stream.fileno())
            publish(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        info = ShardInfo(task.name, task.domain, gid - task.first_gid, size, digest.hexdigest())
        write_whole(description, json.dumps(asdict(info)))
    return info


def _numbered_blocks(piece: Piece, first_gid: int, start: bytes) -> Iterator[tuple[memoryview, int]]:
    """(whole lines, about `BLOCK_BYTES` of them; their number). A block is good until the next one is asked for.

    Reads into the same memory and writes into the same memory all the time: fresh blocks cost a tenth more.
    """
    part_ends = np.cumsum(piece.part.lengths())
    kept = piece.part.kept()
    kept = kept[np.searchsorted(kept, piece.start) : np.searchsorted(kept, piece.stop)]
    begins = np.where(kept > 0, part_ends[kept - 1], 0) + 1  # without the bracket, whose place the start takes
    ends = part_ends[kept]
    gids, ids = range(first_gid, first_gid + len(kept)), piece.first_id + kept
    done, space, numbered = 0, bytearray(BLOCK_BYTES), BytesIO()
    with open(piece.part.path, "rb") as stream:
        while done < len(kept):
            # at least one document, however large
            upto = max(done + 1, int(np.searchsorted(ends, begins[done] + BLOCK_BYTES, side="right")))
            first, size = int(begins[done]), int(ends[upto - 1] - begins[done])
            if size > len(space):
                space = bytearray(size)
            lines = memoryview(space)[:size]
            stream.seek(first)
            if stream.readinto(lines) != size:
                raise DataError(piece.part.path, "is shorter than it was written", "Remove it and build again.")
            pieces: list[bytes | memoryview] = [b""] * (2 * (upto - done))
            pieces[::2] = [start % numbers for numbers in zip(gids[done:upto], ids[done:upto].tolist(), strict=True)]
            places = zip((begins[done:upto] - first).tolist(), (ends[done:upto] - first).tolist(), strict=True)
            pieces[1::2] = [lines[begin:end] for begin, end in places]
            numbered.seek(0)
            numbered.writelines(pieces)
            with numbered.getbuffer()[: numbered.tell()] as block:
                yield block, upto - done
            done = upto
