"""Splits a corpus into train and validation by the content of the documents.

A document goes to validation if a hash of its content is below the share. So it stays on its side when the corpus grows
or is built again with other shards or numbers, and documents with the same content stay together. Lines are copied
unchanged, including their gids. Every shard becomes at most one shard per side, under the same name.
"""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from z2all_ds.base.atomic import HashedFile, explain_disk_errors, write_whole
from z2all_ds.base.atomic_folder import atomic_folder
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.paths import full_path
from z2all_ds.base.storage.open_files import open_regular, read_regular
from z2all_ds.corpus.executors import Executor, run_all
from z2all_ds.corpus.manifest import Manifest, ShardInfo, load_manifest, load_records_manifest, write_manifest
from z2all_ds.corpus.schema import parse_record

SPLIT_NAME = "SPLIT.json"
"""The inputs of the split; written last, so its presence means that both sides are complete."""
SIDES = ("train", "validation")
RULE_VERSION = 1
"""Increase it if documents change sides."""


@dataclass(frozen=True)
class SplitReport:
    """The result of a split."""

    train: dict[str, tuple[int, int]]
    """domain -> (documents, bytes)"""
    validation: dict[str, tuple[int, int]]
    warnings: tuple[str, ...]
    """Domains that have no documents on one side."""


def is_validation(content: str, share: float, seed: str = "") -> bool:
    """Return whether a document belongs to validation. Depends only on the arguments."""
    digest = hashlib.blake2b(hashlib.sha256(seed.encode()).digest(), digest_size=8)
    digest.update(content.encode("utf-8", "surrogatepass"))
    # A float holds 53 bits exactly; with 64, the highest values would round to 1.0.
    return (int.from_bytes(digest.digest(), "big") >> 11) / 2**53 < share


def split_corpus(
    corpus_dir: str | Path, out_dir: str | Path, share: float, seed: str = "", workers: int | None = 1
) -> SplitReport:
    """Write out_dir/train and out_dir/validation; return at once if the same split exists.

    `out_dir` appears only when it is complete. `share` is the fraction of documents for validation.
    """
    corpus_dir, out_dir = Path(corpus_dir), Path(os.path.abspath(out_dir))
    if not 0 < share < 1:
        raise ConfigError(f"share {share:g}", "must be between 0 and 1", "E.g. 0.01 for one document in a hundred.")
    if full_path(out_dir).is_relative_to(full_path(corpus_dir)):
        raise ConfigError(f"folder {out_dir}", f"is inside the corpus {corpus_dir}", "Choose a folder outside it.")
    manifest = load_records_manifest(corpus_dir)
    key = {"rule": RULE_VERSION, "corpus": manifest.fingerprint, "share": share, "seed": seed}
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        return _existing_split(out_dir, key)
    with explain_disk_errors(out_dir.parent), atomic_folder(out_dir) as temporary:
        sides = _write_sides(corpus_dir, temporary, manifest, share, seed, workers)
        write_whole(temporary / SPLIT_NAME, json.dumps(key, ensure_ascii=False, indent=1) + "\n")
    return _report(*sides)


def _existing_split(out_dir: Path, key: dict[str, object]) -> SplitReport:
    """Return the report of the same split made before; raise if the folder contains anything else."""
    try:
        found = load_json(read_regular(out_dir / SPLIT_NAME))
    except (OSError, ValueError):
        found = None
    if found != key:
        rule = "contains another split" if found else "exists and is not empty"
        raise ConfigError(f"folder {out_dir}", rule, "Choose another folder, or remove that one.")
    sides = [load_manifest(out_dir / side) for side in SIDES]
    for side, manifest in zip(SIDES, sides, strict=True):
        for shard in manifest.shards:
            if not shard.is_present(out_dir / side):
                what = str(out_dir / side / shard.path)
                raise DataError(what, "is missing or has the wrong size", f"Remove {out_dir} and split again.")
    return _report(*sides)


def _write_sides(
    corpus_dir: Path, folder: Path, manifest: Manifest, share: float, seed: str, workers: int | None
) -> list[Manifest]:
    for side in SIDES:
        (folder / side).mkdir(parents=True)
        for shard in manifest.shards:
            (folder / side / shard.path).parent.mkdir(parents=True, exist_ok=True)
    work, sizes = partial(_split_shard, corpus_dir, folder, share, seed), [shard.bytes for shard in manifest.shards]
    pairs = run_all(Executor(workers).run, work, manifest.shards, "split", sizes)
    sides = []
    for number, side in enumerate(SIDES):
        shards = tuple(pair[number] for pair in pairs if pair[number].documents)
        # next_gid stays, because the gids are those of the whole corpus. No build wrote these shards: no build keys.
        sides.append(replace(manifest, shards=shards, build_keys={}))
        write_manifest(folder / side, sides[-1])
    return sides


def _split_shard(corpus_dir: Path, folder: Path, share: float, seed: str, shard: ShardInfo) -> list[ShardInfo]:
    """Write both sides of one shard; a side without documents gets no file."""
    source, targets = corpus_dir / shard.path, [folder / side / shard.path for side in SIDES]
    documents, text_bytes, digest = [0, 0], [0, 0], hashlib.sha256()
    with explain_disk_errors(folder), HashedFile(targets[0]) as train, HashedFile(targets[1]) as validation:
        files = (train, validation)
        try:
            with os.fdopen(open_regular(source), "rb") as lines:
                for number, line in enumerate(lines, 1):
                    digest.update(line)
                    record = parse_record(line, f"{shard.path}:{number}")
                    side = int(is_validation(record.content, share, seed))
                    files[side].write(line)
                    documents[side] += 1
                    text_bytes[side] += len(record.content.encode())
        except OSError as error:
            if isinstance(error, FileNotFoundError) or error.filename == str(source):
                why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
                rule = f"{why}, but the manifest lists it"
                raise DataError(str(source), rule, "Restore it, or build the corpus again.") from None
            raise
        if digest.hexdigest() != shard.sha256:
            rule = "its SHA-256 differs from the manifest, the content has changed"
            raise DataError(str(source), rule, "Run `z2all corpus audit`, and build the corpus again.")
        for file, target, count in zip(files, targets, documents, strict=True):
            if count:
                file.finish(target)
    return [
        ShardInfo(shard.path, shard.domain, count, file.size, file.sha256, size)
        for file, count, size in zip(files, documents, text_bytes, strict=True)
    ]


def _report(train: Manifest, validation: Manifest) -> SplitReport:
    warnings = []
    for domain in dict.fromkeys([*train.domains, *validation.domains]):
        for side, manifest in zip(SIDES, (train, validation), strict=True):
            if domain not in manifest.domains:
                warnings.append(f"domain {domain}: no documents in {side}; the domain is too small for this share")
    return SplitReport(train.domains, validation.domains, tuple(warnings))
