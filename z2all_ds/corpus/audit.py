"""Audits a corpus: reads every byte of every shard and says what is not as the manifest promises.

It goes on after a problem, so that one run shows all of them. Each shard is audited alone, so shards can be read in
parallel; what they have in common, the numbers of the documents, comes back as runs of consecutive gids: a shard as the
build writes it is one run, whatever its size.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from z2all_ds.base.console import progress
from z2all_ds.base.errors import DataError
from z2all_ds.corpus.executors import Executor
from z2all_ds.corpus.manifest import Manifest, ShardInfo, load_records_manifest
from z2all_ds.corpus.schema import Record, parse_record

SHOWN_PER_SHARD = 10
"""Broken lines, and gids met before; the rest is a count. A shard cut within a disk block has thousands."""

DAMAGE = {
    "replaced": "hold U+FFFD, the mark of a character that could not be read",
    "nul": "hold a NUL character",
    "empty": "have no content",
}


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    shards: int
    documents: int
    bytes: int
    problems: tuple[str, ...]
    """The corpus is not what its manifest says, or holds what a run cannot read."""
    warnings: tuple[str, ...] = ()
    """It can be read, but some of the text is in a bad state."""

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass
class GidRuns:
    """Documents in the order of the file, as runs in which gid and line both go up by one. 16 bytes a run."""

    first: array = field(default_factory=lambda: array("q"))
    line: array = field(default_factory=lambda: array("i"))
    length: array = field(default_factory=lambda: array("i"))
    _next: tuple[int, int] = (-1, -1)

    def add(self, gid: int, line: int) -> None:
        if (gid, line) == self._next:
            self.length[-1] += 1
        else:
            self.first.append(gid)
            self.line.append(line)
            self.length.append(1)
        self._next = (gid + 1, line + 1)


@dataclass(frozen=True)
class ShardAudit:
    """What was found in one shard. Small and picklable."""

    documents: int = 0
    """Lines that are records."""
    bytes: int = 0
    problems: tuple[str, ...] = ()
    gids: GidRuns = field(default_factory=GidRuns)
    damage: dict[str, int] = field(default_factory=dict)
    """Documents of each kind of DAMAGE."""
    first_damage: dict[str, str] = field(default_factory=dict)
    """Place of the first of each kind."""


def audit_corpus(corpus_dir: str | Path, workers: int | None = 1) -> AuditReport:
    """Checks presence, size, hash, every line, the counts, that no two documents share a gid, and damaged text.

    `workers` is the number of processes; None is one for each core.
    """
    corpus_dir = Path(corpus_dir)
    manifest = load_records_manifest(corpus_dir)
    audits = [ShardAudit()] * len(manifest.shards)
    with progress("audit", sum(shard.bytes for shard in manifest.shards), "bytes") as advance:
        for number, found in Executor(workers).run(partial(audit_shard, corpus_dir), manifest.shards):
            audits[number] = found
            advance(manifest.shards[number].bytes)
    repeated = _gids_met_before(manifest.shards, [audit.gids for audit in audits])
    problems: list[str] = []
    for audit, again in zip(audits, repeated, strict=True):
        problems += [*audit.problems, *again]
    problems += _gids_above_the_next(manifest, audits)
    listed = {shard.path for shard in manifest.shards}
    for path in sorted(corpus_dir.rglob("*.jsonl")):
        inner = path.relative_to(corpus_dir)
        # What begins with a dot is the work of a build that adds to the corpus, or that was stopped.
        if inner.as_posix() not in listed and not any(part.startswith(".") for part in inner.parts):
            problems.append(f"{inner.as_posix()}: not in the manifest")
    documents, size = sum(audit.documents for audit in audits), sum(audit.bytes for audit in audits)
    return AuditReport(len(audits), documents, size, tuple(problems), _warnings(manifest.shards, audits))


def audit_shard(corpus_dir: Path, shard: ShardInfo) -> ShardAudit:
    """All that can be said about one shard without the others."""
    problems: list[str] = []
    gids, damage, first_damage = GidRuns(), dict.fromkeys(DAMAGE, 0), dict[str, str]()
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
                    if not -(2**63) <= record.gid < 2**63 - 1:
                        raise DataError(f"{where}, gid {record.gid}", "it must fit into 64 bits", "")
                except DataError as error:
                    broken += 1
                    if broken <= SHOWN_PER_SHARD:
                        problems.append(f"{error.what}: {error.rule}")
                    continue
                documents += 1
                gids.add(record.gid, lines)
                for kind in _damage(record):
                    damage[kind] += 1
                    first_damage.setdefault(kind, where)
    except FileNotFoundError:
        return ShardAudit(problems=(f"{shard.path}: missing",))
    except OSError as error:
        problems.append(f"{shard.path}: not readable ({error.strerror})")
        return ShardAudit(documents, size, tuple(problems), gids, damage, first_damage)
    if broken > SHOWN_PER_SHARD:
        problems.append(f"{shard.path}: {broken - SHOWN_PER_SHARD} more broken lines")
    if not line.endswith(b"\n"):
        problems.append(f"{shard.path}: the last line has no end, the file was cut")
    if size != shard.bytes:
        problems.append(f"{shard.path}: {size} bytes, the manifest says {shard.bytes}")
    if digest.hexdigest() != shard.sha256:
        problems.append(f"{shard.path}: its SHA-256 is not that of the manifest, the content was changed")
    if lines != shard.documents:
        problems.append(f"{shard.path}: {lines} documents, the manifest says {shard.documents}")
    return ShardAudit(documents, size, tuple(problems), gids, damage, first_damage)


def _damage(record: Record) -> list[str]:
    found = []
    if "\ufffd" in record.content:
        found.append("replaced")
    if "\0" in record.content:
        found.append("nul")
    if not record.content or record.content.isspace():
        found.append("empty")
    return found


def _gids_met_before(shards: Sequence[ShardInfo], runs: Sequence[GidRuns]) -> list[list[str]]:
    """For each shard, the documents whose gid an earlier document has: sorted runs that overlap, then their gids."""
    if not shards:
        return []
    first = np.concatenate([np.array(run.first, dtype=np.int64) for run in runs])
    line = np.concatenate([np.array(run.line, dtype=np.int64) for run in runs])
    length = np.concatenate([np.array(run.length, dtype=np.int64) for run in runs])
    shard = np.repeat(np.arange(len(shards)), [len(run.first) for run in runs])
    suspects = _overlapping(first, first + (length - 1))
    first, line, length, shard = first[suspects], line[suspects], length[suspects], shard[suspects]
    # One entry a document from here on, but only of runs that overlap; in the order of the corpus.
    step = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    gid, at = np.repeat(first, length) + step, np.repeat(line, length) + step
    shard = np.repeat(shard, length)
    order = np.argsort(gid, kind="stable")
    again = np.sort(order[1:][gid[order[1:]] == gid[order[:-1]]])
    problems: list[list[str]] = [[] for _ in shards]
    counts = np.bincount(shard[again], minlength=len(shards))
    for number in np.flatnonzero(counts).tolist():
        path, places = shards[number].path, again[shard[again] == number]
        for place in places[:SHOWN_PER_SHARD].tolist():
            problems[number].append(f"{path}:{at[place]}: gid {gid[place]} belongs to an earlier document too")
        if len(places) > SHOWN_PER_SHARD:
            more = len(places) - SHOWN_PER_SHARD
            problems[number].append(f"{path}: {more} more gids that belong to earlier documents too")
    return problems


def _overlapping(first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Numbers of the intervals that share something with another one, ascending."""
    if len(first) < 2:
        return np.arange(0)
    order = np.argsort(first, kind="stable")
    reach = np.maximum.accumulate(last[order])
    touches = first[order][1:] <= reach[:-1]
    # A cluster is an interval and those after it that begin before everything so far has ended.
    cluster = np.concatenate([[0], np.cumsum(~touches)])
    return np.sort(order[(np.bincount(cluster) > 1)[cluster]])


def _gids_above_the_next(manifest: Manifest, audits: Sequence[ShardAudit]) -> list[str]:
    """A domain added to a corpus of ours is numbered from next_gid on, so nothing may lie above it."""
    if not manifest.build_keys:
        return []
    found = []
    for shard, audit in zip(manifest.shards, audits, strict=True):
        ends = map(sum, zip(audit.gids.first, audit.gids.length, strict=True))
        highest = max(ends, default=0) - 1
        if highest >= manifest.next_gid:
            found.append(f"{shard.path}: gid {highest}, the manifest says that {manifest.next_gid} is free")
    return found


def _warnings(shards: Sequence[ShardInfo], audits: Sequence[ShardAudit]) -> tuple[str, ...]:
    """One line for each domain and kind of damage."""
    found = []
    for domain in dict.fromkeys(shard.domain for shard in shards):
        of_domain = [audit for shard, audit in zip(shards, audits, strict=True) if shard.domain == domain]
        documents = sum(audit.documents for audit in of_domain)
        for kind, words in DAMAGE.items():
            count = sum(audit.damage.get(kind, 0) for audit in of_domain)
            if count:
                where = next(audit.first_damage[kind] for audit in of_domain if kind in audit.first_damage)
                share = f"{count:,} of {documents:,} documents ({count / documents:.2%})"
                found.append(f"{domain}: {share} {words}; the first is {where}")
    return tuple(found)
