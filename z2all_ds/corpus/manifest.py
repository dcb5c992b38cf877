"""The manifest of a corpus: a list of its shards, written last, so its presence means that the corpus is complete.

It has the counts, sizes and hashes of the shards. A run stores a fingerprint of them in its data state, so it detects
a changed corpus before the first batch.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from z2all_ds.base.errors import DataError
from z2all_ds.base.json_text import load_json
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
    """Size of a JSON Lines file; for Parquet the uncompressed size of the text column, so that sizes are comparable."""
    sha256: str
    """Hash of the file."""
    text_bytes: int | None = None
    """Size of the texts in UTF-8; None in corpora of earlier versions, which did not count it."""

    def is_present(self, corpus_dir: Path) -> bool:
        """Return whether the file exists with the right size. Only an audit reads it."""
        path = corpus_dir / self.path
        return path.is_file() and path.stat().st_size == self.bytes


@dataclass(frozen=True)
class Manifest:
    """All shards of a corpus, in reading order."""

    format_version: int
    shards: tuple[ShardInfo, ...]
    build_keys: dict[str, str] = field(default_factory=dict)
    """domain -> hash of everything it was built from; empty for a corpus that was not built here."""
    next_gid: int = 0
    """First gid of the next domain that is added; larger than every gid in the shards."""
    text_field: str = DEFAULT_TEXT_FIELD
    """Field or column that contains the text."""

    @property
    def domains(self) -> dict[str, tuple[int, int]]:
        """Return domain -> (documents, bytes), in the order of the shards."""
        totals: dict[str, tuple[int, int]] = {}
        for shard in self.shards:
            documents, size = totals.get(shard.domain, (0, 0))
            totals[shard.domain] = (documents + shard.documents, size + shard.bytes)
        return totals

    @property
    def holds_records(self) -> bool:
        """Return whether the shards have all fields of a `Record`. Adopted files have only a text field."""
        return self.text_field == DEFAULT_TEXT_FIELD and all(shard.path.endswith(".jsonl") for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the text. It does not depend on paths or the order of domains, but on shards within one."""
        parts = sorted(((s.domain, s.sha256, s.documents) for s in self.shards), key=lambda part: part[0])
        return _hash_of(parts, self.text_field)

    @property
    def domain_fingerprints(self) -> dict[str, str]:
        """Return domain -> hash of its documents in order, sorted by name, for domains that have documents."""
        names = sorted({shard.domain for shard in self.shards if shard.documents > 0})
        return {
            name: shards_fingerprint([shard for shard in self.shards if shard.domain == name], self.text_field)
            for name in names
        }


def shards_fingerprint(shards: Sequence[ShardInfo], text_field: str = DEFAULT_TEXT_FIELD) -> str:
    """Return a hash of the documents in the shards of a domain. It does not depend on paths."""
    return _hash_of([(shard.sha256, shard.documents) for shard in shards if shard.documents > 0], text_field)


def _hash_of(parts: list[Any], text_field: str) -> str:
    if text_field != DEFAULT_TEXT_FIELD:
        parts = [*parts, text_field]
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()


def write_manifest(corpus_dir: str | Path, manifest: Manifest) -> None:
    """Write the manifest atomically. Call it when every shard has its final name."""
    text = json.dumps(asdict(manifest), ensure_ascii=False, indent=1) + "\n"
    open_folder(corpus_dir).write_whole(MANIFEST_NAME, text.encode())


def load_manifest(corpus_dir: str | Path) -> Manifest:
    """Read and check the manifest of a corpus in a folder or at a URL."""
    folder = open_folder(corpus_dir)
    path = folder.where(MANIFEST_NAME)
    rebuild = "Build the corpus again, or restore the manifest that belongs to these shards."
    try:
        values = load_json(folder.read(MANIFEST_NAME))
    except FileNotFoundError:
        rule = "no such file; it is written at the end of a build"
        raise DataError(path, rule, "Give the folder of a complete corpus, or build one.") from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({reason(error)})", rebuild) from None
    except ValueError as error:
        raise DataError(path, f"not readable as JSON ({error})", rebuild) from None
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        fix = "Update the package, or build the corpus again."
        raise DataError(f"{path}, format_version {version!r}", f"this package reads version {FORMAT_VERSION}", fix)
    try:
        shards = tuple(_shard(entry) for entry in values["shards"])
        build_keys = dict(values.get("build_keys", {}))
        if not all(isinstance(key, str) for key in build_keys.values()):
            raise ValueError("build_keys must be strings")
        next_gid = values.get("next_gid", sum(shard.documents for shard in shards))
        _check_count("next_gid", next_gid)
        text_field = values.get("text_field", DEFAULT_TEXT_FIELD)
        if not isinstance(text_field, str) or not text_field:
            raise ValueError(f"text_field {text_field!r} must be a non-empty string")
        if len({shard.path for shard in shards}) != len(shards):
            raise ValueError("a shard is listed twice")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(path, f"not a manifest ({error!r})", rebuild) from None
    return Manifest(version, shards, build_keys, next_gid, text_field)


def load_records_manifest(corpus_dir: str | Path) -> Manifest:
    """Read the manifest of a corpus; raise if its shards do not have all fields of a record."""
    manifest = load_manifest(corpus_dir)
    if not manifest.holds_records:
        rule = "this verb needs shards made by `corpus convert`, but this corpus was adopted"
        fix = "Convert its files with `z2all corpus convert generic`; it can be trained on as it is."
        raise DataError(f"corpus {corpus_dir}", rule, fix)
    return manifest


def _shard(entry: dict[str, Any]) -> ShardInfo:
    shard = ShardInfo(**entry)
    path = PurePosixPath(shard.path)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"path {shard.path!r} must be inside the corpus folder")
    if not isinstance(shard.domain, str) or not shard.domain:
        raise ValueError(f"domain {shard.domain!r} must be a non-empty string")
    for count in (shard.documents, shard.bytes, *([] if shard.text_bytes is None else [shard.text_bytes])):
        _check_count(shard.path, count)
    if not _HEX_64.fullmatch(shard.sha256):
        raise ValueError(f"{shard.path}: {shard.sha256!r} is not a SHA-256")
    return shard


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}: {value!r} is not a count")
