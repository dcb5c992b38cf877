"""Makes shards from parts: they are planned from the lengths of the documents, and each is made independently.

A large part with all its documents becomes a shard by a hard link. Small parts and parts that lost documents are copied
together until a shard is full.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from z2all_ds.base.atomic import HashedFile, explain_disk_errors, write_whole
from z2all_ds.base.errors import DataError
from z2all_ds.base.json_text import load_json
from z2all_ds.corpus.building.parts import Part
from z2all_ds.corpus.manifest import ShardInfo

BLOCK_BYTES = 524_288
SMALLEST_SHARE = 16
"""A complete part of at least 1/16 of the maximum size becomes a shard of its own."""


class PartSlice(NamedTuple):
    """The selected documents among the documents `start` to `stop` - 1 of a part."""

    part: Part
    start: int
    stop: int

    @property
    def is_whole_part(self) -> bool:
        return not self.part.keep and (self.start, self.stop) == (0, self.part.documents)

    def selected(self) -> np.ndarray:
        kept = self.part.kept()
        return kept[np.searchsorted(kept, self.start) : np.searchsorted(kept, self.stop)]


@dataclass(frozen=True)
class ShardTask:
    """The input of one shard."""

    path: Path
    domain: str
    slices: tuple[PartSlice, ...]


def plan_shards(parts: Sequence[Part], folder: Path, domain: str, prefix: str, max_shard_bytes: int) -> list[ShardTask]:
    """Fill one shard after the other. Keep the lengths of only one part in memory."""
    tasks: list[ShardTask] = []
    slices: list[PartSlice] = []
    room = max_shard_bytes

    def close() -> None:
        nonlocal room
        if slices:
            tasks.append(ShardTask(folder / f"{prefix}-{len(tasks):05d}.jsonl", domain, tuple(slices)))
        slices.clear()
        room = max_shard_bytes

    for part in parts:
        if not part.keep and max(1, max_shard_bytes // SMALLEST_SHARE) <= part.bytes <= max_shard_bytes:
            close()
            slices.append(PartSlice(part, 0, part.documents))
            close()
            continue
        kept = part.kept()
        ends = np.cumsum(part.lengths()[kept], dtype=np.int64)
        done = 0
        while done < len(kept):
            before = int(ends[done - 1]) if done else 0
            fits = int(np.searchsorted(ends, before + room, side="right"))
            if fits > done:
                slices.append(PartSlice(part, int(kept[done]), int(kept[fits - 1]) + 1))
                room -= int(ends[fits - 1]) - before
                done = fits
            elif slices:
                close()
            else:
                rule = f"{int(ends[done]) - before:,} bytes of JSON, more than a whole shard ({max_shard_bytes:,})"
                fix = "Lower --max-record-bytes to skip such documents, or raise max_shard_bytes."
                raise DataError(f"document {part.first_id + int(kept[done])} of domain {domain}", rule, fix)
    close()
    return tasks


def make_shard(task: ShardTask) -> ShardInfo:
    """Make the shard unless it is finished. Its description is written last and marks it as finished."""
    description = task.path.with_suffix(".json")
    if description.exists() and task.path.exists():
        return ShardInfo(**load_json(description.read_bytes()))
    with explain_disk_errors(task.path.parent):
        info = _link(task) or _copy(task)
        write_whole(description, json.dumps(asdict(info)))
    return info


def _link(task: ShardTask) -> ShardInfo | None:
    """Links a whole part under the name of the shard. The part stays, so a build can be interrupted at any time."""
    part = task.slices[0].part
    if len(task.slices) != 1 or not task.slices[0].is_whole_part:
        return None
    task.path.unlink(missing_ok=True)
    try:
        os.link(part.path, task.path)
    except OSError:  # a file system without hard links
        return None
    return ShardInfo(task.path.name, task.domain, part.documents, part.bytes, part.sha256, _text_bytes(task))


def _copy(task: ShardTask) -> ShardInfo:
    documents = 0
    with HashedFile(task.path) as file:
        for part_slice in task.slices:
            selected = part_slice.selected()
            documents += len(selected)
            for block in _blocks(part_slice.part, selected):
                file.write(block)
        file.finish(task.path)
    return ShardInfo(task.path.name, task.domain, documents, file.size, file.sha256, _text_bytes(task))


def _text_bytes(task: ShardTask) -> int | None:
    sizes = [one.part.text_bytes(one.selected()) for one in task.slices]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _blocks(part: Part, selected: np.ndarray) -> Iterator[bytes]:
    """Yield the lines of the selected documents, in order."""
    last_of_run = np.flatnonzero(np.diff(selected) != 1)
    firsts = selected[np.concatenate([[0], last_of_run + 1])]
    lasts = selected[np.concatenate([last_of_run, [len(selected) - 1]])]
    borders = np.concatenate([[0], np.cumsum(part.lengths(), dtype=np.int64)])
    with open(part.path, "rb") as stream:
        for begin, end in zip(borders[firsts].tolist(), borders[lasts + 1].tolist(), strict=True):
            stream.seek(begin)
            while begin < end:
                block = stream.read(min(BLOCK_BYTES, end - begin))
                if not block:
                    raise DataError(part.path, "is shorter than when it was written", "Remove it and build again.")
                begin += len(block)
                yield block
