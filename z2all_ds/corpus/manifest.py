"""The manifest: what a corpus consists of, written after everything else, so that its presence means "complete".

It carries counts, sizes and hashes of the shards, and from these a fingerprint that a run keeps in its data state: a
corpus that changed under a run is noticed before the first batch.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import open_folder, reason
from z2all_ds.corpus.shard_text import DEFAULT_TEXT_FIELD

MANIFEST_NAME = "MANIFEST.json"
FORMAT_VERSION = 1
_HEX_64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ShardInfo:
    """One shard file of records."""

    path: str
    """Relative to the corpus folder, with forward slashes."""
    domain: str
    documents: int
    bytes: int
    """Of JSON lines the size of the file; of Parquet that of the text column, uncompressed, so that sizes compare."""
    sha256: str
    """Of the file."""


@dataclass(frozen=True)
class Manifest:
    """All shards of a corpus, in the order in which they are read."""

    format_version: int
    shards: tuple[ShardInfo, ...]
    build_keys: dict[str, str] = field(default_factory=dict)
    """domain -> hash of everything it was built from; none for a corpus that was not built here."""
    next_gid: int = 0
    """Above every gid in the shards: where a domain that is added later begins."""
    text_field: str = DEFAULT_TEXT_FIELD
    """The field or column of a record that is its text."""

    @property
    def domains(self) -> dict[str, tuple[int, int]]:
        """domain -> (documents, bytes), in the order of first appearance."""
        totals: dict[str, tuple[int, int]] = {}
        for shard in self.shards:
            documents, size = totals.get(shard.domain, (0, 0))
            totals[shard.domain] = (documents + shard.documents, size + shard.bytes)
        return totals

    @property
    def holds_records(self) -> bool:
        """Shards of ours, with all fields of a record; adopted files have fields of their own and a text to give."""
        return self.text_field == DEFAULT_TEXT_FIELD and all(shard.path.endswith(".jsonl") for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """Hash over the text itself: the same for a corpus that was moved or whose shards were renamed.

        Sorted by domain only: the order of domains means nothing, the order of shards within one does.
        """
        parts = sorted(((s.domain, s.sha256, s.documents) for s in self.shards), key=lambda part: part[0])
        return _hash_of(parts, self.text_field)

    @property
    def domain_fingerprints(self) -> dict[str, str]:
        """domain -> hash over its documents and their order, for the domains that have documents, by sorted name."""
        names = sorted({shard.domain for shard in self.shards if shard.documents > 0})
        return {
            name: shards_fingerprint([shard for shard in self.shards if shard.domain == name], self.text_field)
            for name in names
        }


def shards_fingerprint(shards: Sequence[ShardInfo], text_field: str = DEFAULT_TEXT_FIELD) -> str:
    """Of the documents in the shards of a domain; what the shards are called means nothing."""
    return _hash_of([(shard.sha256, shard.documents) for shard in shards if shard.documents > 0], text_field)


def _hash_of(parts: list[Any], text_field: str) -> str:
    if text_field != DEFAULT_TEXT_FIELD:  # another field is another text
        parts = [*parts, text_field]
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()


def write_manifest(corpus_dir: str | Path, manifest: Manifest) -> None:
    """Writes the manifest whole or not at all. Call it when every shard has its final name."""
    text = json.dumps(asdict(manifest), ensure_ascii=False, indent=1) + "\n"
    open_folder(corpus_dir).write_whole(MANIFEST_NAME, text.encode())


def load_manifest(corpus_dir: str | Path) -> Manifest:
    """Opens the corpus in a folder or at a URL; whatever is wrong with the manifest is a DataError that says so."""
    folder = open_folder(corpus_dir)
    path = folder.where(MANIFEST_NAME)
    rebuild = "Build the corpus again, or restore the manifest that belongs to these shards."
    try:
        values = json.loads(folder.read(MANIFEST_NAME))
    except FileNotFoundError:
        rule = "no such file; it is written when a build is complete"
        raise DataError(path, rule, "Give the folder of a finished build, or build one.") from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({reason(error)})", rebuild) from None
    except ValueError as error:
        raise DataError(path, f"not readable as JSON ({error})", rebuild) from None
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        fix = "Update the package, or build the corpus again with this one."
        raise DataError(f"{path}, format_version {version!r}", f"this package reads version {FORMAT_VERSION}", fix)
    try:
        shards = tuple(_shard(entry) for entry in values["shards"])
        build_keys = dict(values.get("build_keys", {}))
        if not all(isinstance(key, str) for key in build_keys.values()):
            raise ValueError("build_keys must be texts")
        next_gid = values.get("next_gid", sum(shard.documents for shard in shards))
        if type(next_gid) is not int or next_gid < 0:
            raise ValueError(f"next_gid {next_gid!r} is not a count")
        text_field = values.get("text_field", DEFAULT_TEXT_FIELD)
        if not isinstance(text_field, str) or not text_field:
            raise ValueError(f"text_field {text_field!r} must be a name")
        if len({shard.path for shard in shards}) != len(shards):
            raise ValueError("a shard is listed twice")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(path, f"not a manifest ({error!r})", rebuild) from None
    return Manifest(version, shards, build_keys, next_gid, text_field)


def load_records_manifest(corpus_dir: str | Path) -> Manifest:
    """For what needs more of a document than its text."""
    manifest = load_manifest(corpus_dir)
    if not manifest.holds_records:
        fix = "Make records of its files with `z2all corpus convert generic`; for training it is good as it is."
        raise DataError(f"corpus {corpus_dir}", "this needs records, and its files were adopted", fix)
    return manifest


def _shard(entry: dict[str, Any]) -> ShardInfo:
    shard = ShardInfo(**entry)
    path = PurePosixPath(shard.path)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"path {shard.path!r} must lie inside the corpus folder")
    if not isinstance(shard.domain, str) or not shard.domain:
        raise ValueError(f"domain {shard.domain!r} must be a name")
    for count in (shard.documents, shard.bytes):
        if type(count) is not int or count < 0:
            raise ValueError(f"{shard.path}: {count!r} is not a count")
    if not _HEX_64.fullmatch(shard.sha256):
        raise ValueError(f"{shard.path}: {shard.sha256!r} is not a SHA-256")
    return shard
