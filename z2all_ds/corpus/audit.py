"""Audits a corpus: reads every byte of every shard and says what is not as the manifest promises.

It goes on after a problem, so that one run shows all of them, and needs little memory however large the corpus is.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.console import progress
from z2all_ds.corpus.manifest import ShardInfo, load_manifest
from z2all_ds.corpus.schema import parse_record
from z2all_ds.errors import DataError

BROKEN_LINES_SHOWN = 10
"""Of each shard; the rest is a count. A shard cut in the middle of a disk block has thousands."""


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    shards: int
    documents: int
    bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


class _NumberSet:
    """Integers seen so far, as pages of bits: numbers that lie close together cost one bit each, not 60 bytes."""

    _BITS = 4096

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def add(self, number: int) -> bool:
        """Whether it is new."""
        page, bit = divmod(number, self._BITS)
        bits = self._pages.setdefault(page, bytearray(self._BITS // 8))
        new = not bits[bit // 8] >> (bit % 8) & 1
        bits[bit // 8] |= 1 << (bit % 8)
        return new


def audit_corpus(corpus_dir: str | Path) -> AuditReport:
    """Checks presence, size, hash, every line, the counts, and that no two documents share a gid."""
    corpus_dir = Path(corpus_dir)
    manifest = load_manifest(corpus_dir)
    problems: list[str] = []
    gids = _NumberSet()
    documents = bytes_read = 0
    with progress("audit", sum(shard.bytes for shard in manifest.shards), "bytes") as advance:
        for shard in manifest.shards:
            found, size, faults = _audit_shard(corpus_dir, shard, gids)
            documents, bytes_read = documents + found, bytes_read + size
            problems += faults
            advance(shard.bytes)
    listed = {shard.path for shard in manifest.shards}
    for path in sorted(corpus_dir.rglob("*.jsonl")):
        if path.relative_to(corpus_dir).as_posix() not in listed:
            problems.append(f"{path.relative_to(corpus_dir).as_posix()}: not in the manifest")
    return AuditReport(len(manifest.shards), documents, bytes_read, tuple(problems))


def _audit_shard(corpus_dir: Path, shard: ShardInfo, gids: _NumberSet) -> tuple[int, int, list[str]]:
    """(documents that parse, bytes read, problems) of one shard."""
    problems: list[str] = []
    digest = hashlib.sha256()
    lines = documents = size = broken = 0
    line = b"\n"
    try:
        with open(corpus_dir / shard.path, "rb") as stream:
            for line in stream:
                lines += 1
                size += len(line)
                digest.update(line)
                where = f"{shard.path}:{lines}"
                try:
                    record = parse_record(line, where)
                except DataError as error:
                    broken += 1
                    if broken <= BROKEN_LINES_SHOWN:
                        problems.append(f"{error.what}: {error.rule}")
                    continue
                documents += 1
                if not gids.add(record.gid):
                    problems.append(f"{where}: gid {record.gid} belongs to an earlier document too")
    except FileNotFoundError:
        return 0, 0, [f"{shard.path}: missing"]
    except OSError as error:
        return documents, size, [*problems, f"{shard.path}: not readable ({error.strerror})"]
    if broken > BROKEN_LINES_SHOWN:
        problems.append(f"{shard.path}: {broken - BROKEN_LINES_SHOWN} more broken lines")
    if not line.endswith(b"\n"):
        problems.append(f"{shard.path}: the last line has no end, the file was cut")
    if size != shard.bytes:
        problems.append(f"{shard.path}: {size} bytes, the manifest says {shard.bytes}")
    if digest.hexdigest() != shard.sha256:
        problems.append(f"{shard.path}: its SHA-256 is not that of the manifest, the content was changed")
    if lines != shard.documents:
        problems.append(f"{shard.path}: {lines} documents, the manifest says {shard.documents}")
    return documents, size, problems
