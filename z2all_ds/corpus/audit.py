"""Audits a corpus, built or adopted: reads every byte of every shard and reports all differences from the manifest.

Shards are audited independently, so they can be read in parallel. Each returns its gids as runs of consecutive numbers
(a shard usually has few), from which documents with the same gid are found in the end.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import open_folder, reason
from z2all_ds.base.storage.open_files import open_regular
from z2all_ds.corpus.adopt import fields_of, first_lines
from z2all_ds.corpus.executors import Executor, run_all
from z2all_ds.corpus.manifest import Manifest, ShardInfo, load_manifest
from z2all_ds.corpus.schema import parse_record
from z2all_ds.corpus.shard_check import DAMAGE, MAX_SHOWN, check_shard, damage_of, is_parquet

Runs = npt.NDArray[np.int64]
"""[runs, 3]: first gid, line of the first gid, and number of documents; gids and lines both increase by one."""


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit."""

    shards: int
    documents: int
    bytes: int
    problems: tuple[str, ...]
    """Differences from the manifest, and records that cannot be read."""
    warnings: tuple[str, ...] = ()
    """Damaged text in valid records."""
    bad_records: int = 0
    """How many of `problems` are invalid records of adopted files, which a run can skip."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def fix(self) -> str:
        """What to do about the problems."""
        if self.bad_records == len(self.problems):
            return "Repair the records and adopt the files again, or read them with data.on_bad_record=skip."
        return "Build or adopt it again."


@dataclass
class ShardAudit:
    """The result for one shard. Small and picklable."""

    documents: int = 0
    """Number of valid records."""
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    bad_records: int = 0
    """How many of `problems` are invalid records of an adopted file."""
    runs: Runs = field(default_factory=lambda: np.empty((0, 3), np.int64))
    damage: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Kind of DAMAGE -> (number of documents, location of the first)."""


def audit_corpus(corpus_dir: str | Path, workers: int | None = 1) -> AuditReport:
    """Check presence, size, hash and every line of all shards, the counts, unique gids, and damaged text.

    `workers` is the number of processes; None means one per core.
    """
    corpus_dir = Path(corpus_dir)
    manifest = load_manifest(corpus_dir)
    shards = manifest.shards
    sizes = [shard.bytes for shard in shards]
    is_adopted = not _holds_records(corpus_dir, manifest)
    work = partial(audit_adopted, corpus_dir, manifest.text_field) if is_adopted else partial(audit_shard, corpus_dir)
    audits = run_all(Executor(workers).run, work, shards, "audit", sizes)
    problems = [problem for audit in audits for problem in audit.problems]
    problems += _repeated_gids(shards, [audit.runs for audit in audits])
    problems += _gids_above_next(manifest, audits)
    listed = {shard.path for shard in shards}
    for path in sorted([*corpus_dir.rglob("*.jsonl"), *(corpus_dir.rglob("*.parquet") if is_adopted else ())]):
        inner = path.relative_to(corpus_dir)
        # Hidden files belong to a build that is running or was interrupted.
        if inner.as_posix() not in listed and not any(part.startswith(".") for part in inner.parts):
            problems.append(f"{inner.as_posix()}: not in the manifest")
    documents, size = sum(audit.documents for audit in audits), sum(audit.bytes for audit in audits)
    bad_records = sum(audit.bad_records for audit in audits)
    return AuditReport(len(audits), documents, size, tuple(problems), _warnings(shards, audits), bad_records)


def _holds_records(corpus_dir: Path, manifest: Manifest) -> bool:
    """Return whether the shards are to have complete records; the first JSON object decides if no build wrote them."""
    if manifest.build_keys or not manifest.holds_records:
        return manifest.holds_records
    folder = open_folder(corpus_dir)
    for shard in manifest.shards:
        with suppress(OSError):  # audited later
            for line in first_lines(folder, shard.path, folder.stamp(shard.path).size):
                if fields := fields_of(line):
                    return "gid" in fields
    return False


def audit_adopted(corpus_dir: Path, text_field: str, shard: ShardInfo) -> ShardAudit:
    """Check everything about one adopted file: that every record has a text, and that nothing has changed."""
    folder, found = open_folder(corpus_dir), ShardAudit()
    try:
        stamp = folder.stamp(shard.path)
        check = check_shard(folder, shard.path, text_field, stamp.size)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        found.problems.append(f"{shard.path}: {'missing' if missing else f'not readable ({reason(error)})'}")
        return found
    except DataError as error:
        found.problems.append(f"{shard.path}: {error.rule}")
        return found
    found.documents, found.bytes = check.documents - check.bad, check.bytes
    found.damage = {kind: (count, f"{shard.path}, record {first}") for kind, (count, first) in check.damage.items()}
    found.problems += [f"{shard.path}, {problem}" for problem in check.problems]
    if check.bad > len(check.problems):
        found.problems.append(f"{shard.path}: {check.bad} invalid records in all")
    found.bad_records = len(found.problems)
    if not is_parquet(shard.path) and check.bytes != shard.bytes:
        found.problems.append(f"{shard.path}: {check.bytes} bytes, the manifest says {shard.bytes}")
    if check.sha256 != shard.sha256:
        found.problems.append(f"{shard.path}: its SHA-256 differs from the manifest, the content has changed")
    if check.documents != shard.documents:
        found.problems.append(f"{shard.path}: {check.documents} documents, the manifest says {shard.documents}")
    return found


def audit_shard(corpus_dir: Path, shard: ShardInfo) -> ShardAudit:
    """Check everything about one shard that does not need the others."""
    found = ShardAudit()
    problems, digest = found.problems, hashlib.sha256()
    gids, gid_lines = list[int](), list[int]()
    lines = invalid = 0
    line = b"\n"
    try:
        with os.fdopen(open_regular(corpus_dir / shard.path), "rb") as stream:
            for line in stream:
                lines += 1
                found.bytes += len(line)
                digest.update(line)
                where = f"{shard.path}:{lines}"
                try:
                    record = parse_record(line, where)
                    if not -(2**63) <= record.gid < 2**63 - 1:
                        raise DataError(f"{where}, gid {record.gid}", "it must fit into 64 bits", "")
                except DataError as error:
                    invalid += 1
                    if invalid <= MAX_SHOWN:
                        problems.append(f"{error.what}: {error.rule}")
                    continue
                gids.append(record.gid)
                gid_lines.append(lines)
                for kind in damage_of(record.content):
                    count, first = found.damage.get(kind, (0, where))
                    found.damage[kind] = (count + 1, first)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        problems.append(f"{shard.path}: {'missing' if missing else f'not readable ({error.strerror})'}")
        return found
    found.documents, found.runs = len(gids), as_runs(gids, gid_lines)
    if invalid > MAX_SHOWN:
        problems.append(f"{shard.path}: {invalid - MAX_SHOWN} more invalid lines")
    if not line.endswith(b"\n"):
        problems.append(f"{shard.path}: the last line has no line feed, the file is truncated")
    if found.bytes != shard.bytes:
        problems.append(f"{shard.path}: {found.bytes} bytes, the manifest says {shard.bytes}")
    if digest.hexdigest() != shard.sha256:
        problems.append(f"{shard.path}: its SHA-256 differs from the manifest, the content has changed")
    if lines != shard.documents:
        problems.append(f"{shard.path}: {lines} documents, the manifest says {shard.documents}")
    return found


def as_runs(gids: Sequence[int], lines: Sequence[int]) -> Runs:
    """Return the runs of documents whose gids and lines both increase by one."""
    table = np.array([gids, lines], dtype=np.int64).T
    is_first = np.ones(len(table), np.bool_)
    is_first[1:] = (table[1:] != table[:-1] + 1).any(axis=1)
    starts = np.flatnonzero(is_first)
    return np.column_stack([table[starts], np.diff(starts, append=len(table))])


def _repeated_gids(shards: Sequence[ShardInfo], runs: Sequence[Runs]) -> list[str]:
    """Describe runs that share gids with another run: sorted by gid, they begin before an earlier one has ended."""
    table = np.concatenate([np.empty((0, 3), np.int64), *runs])
    paths = np.repeat(np.arange(len(shards)), [len(some) for some in runs])
    order = np.argsort(table[:, 0], kind="stable")
    first = table[order, 0]
    last = first + (table[order, 2] - 1)
    reach = np.maximum.accumulate(last)
    repeats = np.flatnonzero(first[1:] <= reach[:-1]) + 1

    def where(run: int, gid: int) -> str:
        first_gid, line, _ = table[order[run]].tolist()
        return f"{shards[paths[order[run]]].path}:{line + gid - first_gid}"

    problems = []
    for run in repeats[:MAX_SHOWN].tolist():
        earlier = int(np.flatnonzero(last[:run] == reach[run - 1])[0])
        begin, end = int(first[run]), int(min(last[run], reach[run - 1]))
        gids = f"gid {begin} is" if begin == end else f"gids {begin} to {end} are"
        problems.append(f"{where(run, begin)}: {gids} also used at {where(earlier, begin)}")
    if len(repeats) > MAX_SHOWN:
        problems.append(f"{len(repeats) - MAX_SHOWN} more ranges of gids are used twice")
    return problems


def _gids_above_next(manifest: Manifest, audits: Sequence[ShardAudit]) -> list[str]:
    """Describe gids that a domain added later would use again."""
    if not manifest.build_keys:
        return []
    found = []
    for shard, audit in zip(manifest.shards, audits, strict=True):
        highest = int((audit.runs[:, 0] + (audit.runs[:, 2] - 1)).max(initial=-1))
        if highest >= manifest.next_gid:
            found.append(f"{shard.path}: has gid {highest}, but next_gid in the manifest is {manifest.next_gid}")
    return found


def _warnings(shards: Sequence[ShardInfo], audits: Sequence[ShardAudit]) -> tuple[str, ...]:
    """Return one line per domain and kind of damage."""
    found = []
    for domain in dict.fromkeys(shard.domain for shard in shards):
        of_domain = [audit for shard, audit in zip(shards, audits, strict=True) if shard.domain == domain]
        documents = sum(audit.documents for audit in of_domain)
        for kind, effect in DAMAGE.items():
            damaged = [audit.damage[kind] for audit in of_domain if kind in audit.damage]
            if damaged:
                count = sum(number for number, _ in damaged)
                share = f"{count:,} of {documents:,} documents ({count / documents:.2%})"
                found.append(f"{domain}: {share} {effect}; the first is {damaged[0][1]}")
    return tuple(found)
