"""Builds a corpus: drafts from the converters become numbered records in shards, and a manifest at the very end.

The same sources give the same bytes. A build that was killed goes on after the last finished domain: a journal of the
same form as the manifest lists those, and is removed when the manifest takes its place. Whatever was half written ends
in .tmp and is thrown away at the next start.
"""

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.atomic import TEMPORARY_SUFFIX, machine_limits_named
from z2all_ds.console import progress
from z2all_ds.corpus.converters import CHINESE_TEXTS, Converter, Draft, find_converter
from z2all_ds.corpus.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, ShardInfo, load_manifest, write_manifest
from z2all_ds.corpus.schema import Record
from z2all_ds.corpus.shard_writer import ShardWriter
from z2all_ds.errors import ConfigError, DataError

MAX_SHARD_BYTES = 200_000_000
JOURNAL_NAME = "BUILDING.json"
MISSES_BEFORE_FULL = 32
"""So many documents in a row that no longer fit end a limited domain; one giant among them must not."""
_DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class SourceSpec:
    """One domain of the corpus and where its text comes from."""

    domain: str
    converter: str
    raw: tuple[Path, ...] = ()
    max_bytes: int | None = None
    """Limit of the JSON bytes of the domain; whole documents from all over the source are taken up to it."""


def build_corpus(
    out_dir: str | Path, sources: Sequence[SourceSpec], max_shard_bytes: int = MAX_SHARD_BYTES, *, replace: bool = False
) -> Manifest:
    """Builds the corpus, or returns at once the one that is there already from the same sources.

    A complete corpus from other sources is not touched unless `replace` is set: a run may be reading it.
    """
    out_dir = Path(out_dir)
    _check(sources, max_shard_bytes)
    key = _build_key(sources, max_shard_bytes)
    with machine_limits_named(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
        if (out_dir / MANIFEST_NAME).exists():
            there = load_manifest(out_dir)
            if there.build_key == key and _all_present(out_dir, there):
                return there
            if there.build_key != key and not replace:
                fix = "Choose another folder, remove that one, or build with replace=True."
                raise ConfigError(f"folder {out_dir}", "it holds a corpus built from other sources or raw files", fix)
            # First the manifest, then its shards: at no moment may it describe files that are not its own.
            (out_dir / MANIFEST_NAME).unlink()
            for shard in there.shards:
                (out_dir / shard.path).unlink(missing_ok=True)
        done = _finished_before(out_dir, key)
        for spec in sources:
            if all(shard.domain != spec.domain for shard in done):
                first_gid = sum(shard.documents for shard in done)
                done += _build_domain(out_dir, spec, first_gid, max_shard_bytes)
                write_manifest(out_dir, Manifest(FORMAT_VERSION, tuple(done), key), JOURNAL_NAME)
        manifest = Manifest(FORMAT_VERSION, tuple(done), key)
        write_manifest(out_dir, manifest)
        (out_dir / JOURNAL_NAME).unlink(missing_ok=True)
    return manifest


def _check(sources: Sequence[SourceSpec], max_shard_bytes: int) -> None:
    if not sources:
        raise ConfigError("sources", "a corpus needs at least one", "Name a domain and its converter.")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes {max_shard_bytes}", "must be positive", f"Leave it at {MAX_SHARD_BYTES}.")
    seen: set[str] = set()
    for spec in sources:
        if not _DOMAIN.fullmatch(spec.domain):
            fix = "Use letters, digits, _, - and dots."
            raise ConfigError(f"domain {spec.domain!r}", "it becomes a file name", fix)
        if spec.domain in seen:
            fix = "Give the second one a name of its own, or all raw files to one source."
            raise ConfigError(f"domain {spec.domain!r}", "named by two sources", fix)
        seen.add(spec.domain)
        if spec.max_bytes is not None and spec.max_bytes < 1:
            what = f"max_bytes {spec.max_bytes} of {spec.domain}"
            raise ConfigError(what, "must be positive", "Leave it out to take everything.")
        if find_converter(spec.converter).needs_raw != bool(spec.raw):
            rule = "is built in and takes no raw files" if spec.raw else "needs raw files"
            fix = "Leave them out." if spec.raw else "Give at least one path."
            raise ConfigError(f"converter {spec.converter} of domain {spec.domain}", rule, fix)
        for path in spec.raw:
            if not Path(path).is_file():
                raise DataError(f"raw file {path} of domain {spec.domain}", "no such file", "Check the path.")


def _build_key(sources: Sequence[SourceSpec], max_shard_bytes: int) -> str:
    """Hash of all that decides the output. Raw files count by path, size and time: hashing terabytes takes too long."""
    parts: list[object] = [FORMAT_VERSION, max_shard_bytes]
    for spec in sources:
        found = find_converter(spec.converter)
        parts.append([spec.domain, found.name, found.revision, spec.max_bytes])
        if not found.needs_raw:  # the text lies in this Python and in the shipped file
            parts.append([platform.python_version(), hashlib.sha256(CHINESE_TEXTS.read_bytes()).hexdigest()])
        for path in spec.raw:
            stat = Path(path).stat()
            parts.append([str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _all_present(out_dir: Path, manifest: Manifest) -> bool:
    """Sizes only, as this runs at every start; the audit reads every byte."""
    files = [(out_dir / shard.path, shard.bytes) for shard in manifest.shards]
    return all(path.is_file() and path.stat().st_size == size for path, size in files)


def _finished_before(out_dir: Path, key: str) -> list[ShardInfo]:
    """The shards of the domains that an earlier, killed build of the same sources finished; clears away the rest."""
    for leftover in out_dir.glob(f"*{TEMPORARY_SUFFIX}"):
        leftover.unlink()
    if not (out_dir / JOURNAL_NAME).exists():
        return []
    journal = load_manifest(out_dir, JOURNAL_NAME)
    if journal.build_key == key and _all_present(out_dir, journal):
        return list(journal.shards)
    for shard in journal.shards:
        (out_dir / shard.path).unlink(missing_ok=True)
    (out_dir / JOURNAL_NAME).unlink()
    return []


def _build_domain(out_dir: Path, spec: SourceSpec, first_gid: int, max_shard_bytes: int) -> list[ShardInfo]:
    for stale in out_dir.glob(f"{spec.domain}-[0-9][0-9][0-9][0-9][0-9].jsonl"):
        stale.unlink()  # of a killed build; those of finished domains are never reached here
    found = find_converter(spec.converter)
    with (
        ShardWriter(out_dir, spec.domain, max_shard_bytes) as writer,
        progress(f"corpus {spec.domain}", spec.max_bytes, "bytes") as advance,
    ):
        gid = first_gid
        for index, draft in _chosen(spec, found, first_gid):
            advance(writer.write(_line(draft, gid, index, spec.domain)))
            gid += 1
        if gid == first_gid:
            rule = "gave no document" + ("" if spec.max_bytes is None else f" of at most {spec.max_bytes} bytes")
            what = f"source {spec.converter} of domain {spec.domain}"
            raise DataError(what, rule, "Raise max_bytes or check its files.")
        return writer.finish()


def _line(draft: Draft, gid: int, index: int, domain: str) -> bytes:
    record = Record(gid, index, domain, draft.category, draft.title, draft.content, draft.desc, draft.others)
    return (record.to_line() + "\n").encode()


def _chosen(spec: SourceSpec, found: Converter, first_gid: int) -> Iterator[tuple[int, Draft]]:
    """(number in its source, draft) of the documents that go in, at most max_bytes of JSON in all."""
    raw = [Path(path) for path in spec.raw]
    if spec.max_bytes is None:
        yield from enumerate(found.convert(raw, None))
        return
    # A line is measured with the numbers it would have if nothing was left out, so never as shorter than it is.
    measured = (
        (index, draft, len(_line(draft, first_gid + index, index, spec.domain)))
        for index, draft in enumerate(found.convert(raw, spec.max_bytes))
    )
    left, misses = spec.max_bytes, 0
    if found.already_spread:
        for index, draft, size in measured:
            if size <= left:
                left, misses = left - size, 0
                yield index, draft
            else:
                misses += 1
                if misses == MISSES_BEFORE_FULL:
                    return
        return
    # First pass: sizes only (a few words a document). The order in which they are taken is that of a hash.
    sizes = [size for _, _, size in measured]
    if sum(sizes) <= left:
        taken = set(range(len(sizes)))
    else:
        taken = set()
        for index in sorted(range(len(sizes)), key=lambda i: hashlib.sha256(f"{spec.domain}/{i}".encode()).digest()):
            if sizes[index] <= left:
                left -= sizes[index]
                taken.add(index)
    for index, draft in enumerate(found.convert(raw, spec.max_bytes)):
        if index in taken:
            yield index, draft
