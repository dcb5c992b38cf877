"""Splits a corpus into train and validation by what the documents say, not by where they lie.

A document goes to validation when a hash of its content falls below the share. So it stays on its side when the corpus
grows, is built again in other shards or gets other numbers, and two documents with the same content never part. Lines
are copied byte for byte, gids included; every shard becomes at most one shard on each side, under its own name.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from z2all_ds.base.atomic import (
    TEMPORARY_SUFFIX,
    explain_disk_errors,
    flush_to_disk,
    force_to_disk,
    make_folder,
    publish,
    write_whole,
)
from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.executors import Executor
from z2all_ds.corpus.manifest import Manifest, ShardInfo, load_manifest, load_records_manifest, write_manifest
from z2all_ds.corpus.schema import parse_record

SPLIT_NAME = "SPLIT.json"
"""What was split and how; written last, so that its presence means that both sides are complete."""
SIDES = ("train", "validation")
RULE_VERSION = 1
"""Raise it when documents would fall on other sides."""


@dataclass(frozen=True)
class SplitReport:
    """What a split wrote."""

    train: dict[str, tuple[int, int]]
    """domain -> (documents, bytes)"""
    validation: dict[str, tuple[int, int]]
    warnings: tuple[str, ...]
    """Domains of which one side has nothing."""


def is_validation(content: str, share: float, seed: str = "") -> bool:
    """The side of a document. Depends on nothing else, so any program can ask."""
    return _place(content, seed) < share


def _place(content: str, seed: str) -> float:
    """A number from 0 to 1, the same for the same content and seed."""
    digest = hashlib.blake2b(hashlib.sha256(seed.encode()).digest(), digest_size=8)
    digest.update(content.encode("utf-8", "surrogatepass"))
    # 53 bits are what a float holds exactly; with 64 the highest few would round to 1.0
    return (int.from_bytes(digest.digest(), "big") >> 11) / 2**53


def split_corpus(
    corpus_dir: str | Path, out_dir: str | Path, share: float, seed: str = "", workers: int | None = 1
) -> SplitReport:
    """Writes out_dir/train and out_dir/validation, or returns at once if the same split is there already.

    Nothing is visible under out_dir before all of it is complete. `share` is that of the documents in validation.
    """
    corpus_dir, out_dir = Path(corpus_dir), Path(os.path.abspath(out_dir))
    if not 0 < share < 1:
        raise ConfigError(f"share {share:g}", "must lie between 0 and 1", "E.g. 0.01 for one document in a hundred.")
    if out_dir.resolve().is_relative_to(corpus_dir.resolve()):
        fix = "Choose a folder beside it."
        raise ConfigError(f"folder {out_dir}", f"it lies in the corpus {corpus_dir} that is to be split", fix)
    manifest = load_records_manifest(corpus_dir)
    key = {"rule": RULE_VERSION, "corpus": manifest.fingerprint, "share": share, "seed": seed}
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        return _split_before(out_dir, key)
    make_folder(out_dir.parent)
    with explain_disk_errors(out_dir.parent):
        temporary = out_dir.with_name(f".{out_dir.name}.split{TEMPORARY_SUFFIX}")
        shutil.rmtree(temporary, ignore_errors=True)  # of a split that was killed
        try:
            sides = _write_sides(corpus_dir, temporary, manifest, share, seed, workers)
            write_whole(temporary / SPLIT_NAME, json.dumps(key, ensure_ascii=False, indent=1) + "\n")
            publish(temporary, out_dir)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return _report(*sides)


def _split_before(out_dir: Path, key: dict[str, object]) -> SplitReport:
    """What an earlier call of the same kind wrote; anything else is not ours to touch."""
    try:
        there = json.loads((out_dir / SPLIT_NAME).read_bytes())
    except (OSError, ValueError):
        there = None
    if there != key:
        rule = "it holds another split" if there else "it is there and not empty"
        raise ConfigError(f"folder {out_dir}", rule, "Choose another folder, or remove that one.")
    sides = [load_manifest(out_dir / side) for side in SIDES]
    for side, manifest in zip(SIDES, sides, strict=True):
        for shard in manifest.shards:
            path = out_dir / side / shard.path
            if not path.is_file() or path.stat().st_size != shard.bytes:
                raise DataError(str(path), "missing or not of its size", f"Remove {out_dir} and split again.")
    return _report(*sides)


def _write_sides(
    corpus_dir: Path, folder: Path, manifest: Manifest, share: float, seed: str, workers: int | None
) -> list[Manifest]:
    for side in SIDES:
        for shard in manifest.shards:
            (folder / side / shard.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / side).mkdir(parents=True, exist_ok=True)
    pairs: list[tuple[ShardInfo, ...]] = [()] * len(manifest.shards)
    with progress("split", sum(shard.bytes for shard in manifest.shards), "bytes") as advance:
        work = partial(_split_shard, corpus_dir, folder, share, seed)
        for number, pair in Executor(workers).run(work, manifest.shards):
            pairs[number] = pair
            advance(manifest.shards[number].bytes)
    sides = []
    for number, side in enumerate(SIDES):
        shards = tuple(pair[number] for pair in pairs if pair[number].documents)
        # next_gid stays: the numbers are those of the whole. The keys go: no build wrote these shards.
        sides.append(replace(manifest, shards=shards, build_keys={}))
        for path in {(folder / side / shard.path).parent for shard in shards}:
            force_to_disk(path)
        write_manifest(folder / side, sides[-1])
    return sides


def _split_shard(corpus_dir: Path, folder: Path, share: float, seed: str, shard: ShardInfo) -> tuple[ShardInfo, ...]:
    """Both sides of one shard; a side without documents leaves no file."""
    paths = [folder / side / shard.path for side in SIDES]
    digests = [hashlib.sha256() for _ in SIDES]
    documents, sizes, whole = [0, 0], [0, 0], hashlib.sha256()
    with explain_disk_errors(folder), open(paths[0], "wb") as train, open(paths[1], "wb") as validation:
        streams = (train, validation)
        try:
            with open(corpus_dir / shard.path, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    whole.update(line)
                    record = parse_record(line, f"{shard.path}:{number}")
                    side = int(is_validation(record.content, share, seed))
                    streams[side].write(line)
                    digests[side].update(line)
                    documents[side] += 1
                    sizes[side] += len(line)
        except FileNotFoundError:
            fix = "Restore it, or build the corpus again."
            raise DataError(f"{corpus_dir / shard.path}", "no such file, but the manifest lists it", fix) from None
        for stream in streams:
            flush_to_disk(stream)
    if whole.hexdigest() != shard.sha256:
        rule = "its SHA-256 is not that of the manifest, the content was changed"
        raise DataError(f"{corpus_dir / shard.path}", rule, "Run `z2all corpus audit`, and build the corpus again.")
    infos = []
    for side, path in enumerate(paths):
        if not documents[side]:
            path.unlink()
        infos.append(ShardInfo(shard.path, shard.domain, documents[side], sizes[side], digests[side].hexdigest()))
    return tuple(infos)


def _report(train: Manifest, validation: Manifest) -> SplitReport:
    warnings = []
    for domain in dict.fromkeys([*train.domains, *validation.domains]):
        for side, manifest in zip(SIDES, (train, validation), strict=True):
            if domain not in manifest.domains:
                warnings.append(f"domain {domain}: no document falls into {side}; it has too few for this share")
    return SplitReport(train.domains, validation.domains, tuple(warnings))
