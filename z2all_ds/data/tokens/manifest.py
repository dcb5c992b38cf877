"""The format of token shards: two plain files for every raw shard, and TOKENS.json, written last.

NAME.tokens   the tokens of all documents, one after the other, each document with its <|endoftext|> last; little-endian
              integers of the width that TOKENS.json calls `dtype`
NAME.ends     for every document the number of tokens up to its end, [documents] little-endian uint64, so that document
              i is tokens[ends[i - 1] : ends[i]]

Neither has a header: numpy.memmap opens both as they are. NAME is the path of the raw shard, its suffix included. The
manifest says of what corpus and of what tokenizer they are; a raw shard without documents has no files.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.errors import DataError

TOKEN_MANIFEST_NAME = "TOKENS.json"
FORMAT_VERSION = 1
ENDS_DTYPE = np.dtype("<u8")
TOKEN_DTYPES: dict[str, "np.dtype[Any]"] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_HEX_64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TokenShard:
    """The tokens of one raw shard."""

    path: str
    """Of the raw shard, as the manifest of the raw corpus has it."""
    domain: str
    documents: int
    bytes: int
    """Of the raw shard."""
    text_bytes: int
    """Of the texts alone, in UTF-8."""
    tokens: int
    """Every document's <|endoftext|> included."""
    tokens_file: str
    """Relative to the folder of TOKENS.json, with forward slashes; so is the next."""
    ends_file: str
    tokens_sha256: str
    ends_sha256: str


@dataclass(frozen=True)
class DomainTotals:
    """What the shards of a domain, or of all, add up to."""

    documents: int
    tokens: int
    text_bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Of the text: <|endoftext|> stands for none."""
        return self.text_bytes / max(1, self.tokens - self.documents)

    def __add__(self, other: "DomainTotals") -> "DomainTotals":
        return DomainTotals(
            self.documents + other.documents, self.tokens + other.tokens, self.text_bytes + other.text_bytes
        )


@dataclass(frozen=True)
class TokenManifest:
    """All token shards of a corpus, in the order of the raw ones."""

    format_version: int
    dtype: str
    eot_id: int
    tokenizer_fingerprint: str
    tokenizer_size: int
    """Number of ids: every token is below it."""
    corpus_fingerprint: str
    domain_fingerprints: dict[str, str]
    """Of the raw domains: a run may go from text to tokens and back."""
    shards: tuple[TokenShard, ...]

    @property
    def totals(self) -> dict[str, DomainTotals]:
        """By domain, in the order of first appearance."""
        totals: dict[str, DomainTotals] = {}
        for shard in self.shards:
            one = DomainTotals(shard.documents, shard.tokens, shard.text_bytes)
            totals[shard.domain] = totals.get(shard.domain, DomainTotals(0, 0, 0)) + one
        return totals


def dtype_for(tokenizer_size: int) -> str:
    """The narrowest that holds every id."""
    return "uint16" if tokenizer_size <= 1 << 16 else "uint32"


def files_of(raw_path: str) -> tuple[str, str]:
    """Names of the two files of a raw shard. With its suffix: `a.jsonl` and `a.parquet` may lie side by side."""
    return f"{raw_path}.tokens", f"{raw_path}.ends"


def write_token_manifest(folder: Path, manifest: TokenManifest) -> None:
    """Whole or not at all. Call it when every file has its final name."""
    write_whole(folder / TOKEN_MANIFEST_NAME, json.dumps(asdict(manifest), ensure_ascii=False, indent=1) + "\n")


def parse_token_manifest(data: bytes, where: str) -> TokenManifest:
    """Whatever is wrong with it is a DataError that says so."""
    again = "Write the tokens again with `z2all corpus tokenize`, or restore the file."
    try:
        values = json.loads(data)
    except ValueError as error:
        raise DataError(where, f"not readable as JSON ({error})", again) from None
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{where}, format_version {version!r}", f"this package reads version {FORMAT_VERSION}", again)
    try:
        shards = tuple(parse_token_shard(entry) for entry in values.pop("shards"))
        manifest = TokenManifest(**values, shards=shards)
        _check(manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(where, f"not a manifest of tokens ({error!r})", again) from None
    return manifest


def parse_token_shard(entry: Mapping[str, Any]) -> TokenShard:
    """A shard's entry; TypeError or ValueError if it is none."""
    shard = TokenShard(**entry)
    for path in (shard.path, shard.tokens_file, shard.ends_file):
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ValueError(f"path {path!r} must lie inside the folder")
    if not isinstance(shard.domain, str) or not shard.domain:
        raise ValueError(f"domain {shard.domain!r} must be a name")
    for count in (shard.documents, shard.bytes, shard.text_bytes, shard.tokens):
        if type(count) is not int or count < 0:
            raise ValueError(f"{shard.path}: {count!r} is not a count")
    if not 0 < shard.documents <= shard.tokens:
        raise ValueError(f"{shard.path}: {shard.documents} documents cannot have {shard.tokens} tokens")
    for digest in (shard.tokens_sha256, shard.ends_sha256):
        if not _HEX_64.fullmatch(digest):
            raise ValueError(f"{shard.path}: {digest!r} is not a SHA-256")
    return shard


def _check(manifest: TokenManifest) -> None:
    if manifest.dtype not in TOKEN_DTYPES:
        raise ValueError(f"dtype {manifest.dtype!r} must be one of {', '.join(TOKEN_DTYPES)}")
    if type(manifest.tokenizer_size) is not int or type(manifest.eot_id) is not int:
        raise ValueError("tokenizer_size and eot_id must be whole numbers")
    if not 0 <= manifest.eot_id < manifest.tokenizer_size <= 1 << (8 * TOKEN_DTYPES[manifest.dtype].itemsize):
        raise ValueError(f"eot_id {manifest.eot_id} of {manifest.tokenizer_size} ids as {manifest.dtype}")
    fingerprints = dict(manifest.domain_fingerprints)
    if not all(isinstance(value, str) for value in fingerprints.values()):
        raise ValueError("domain_fingerprints must be texts")
    if missing := {shard.domain for shard in manifest.shards} - set(fingerprints):
        raise ValueError(f"domain {min(missing)!r} has no fingerprint")
    for name in ("path", "tokens_file", "ends_file"):
        if len({getattr(shard, name) for shard in manifest.shards}) != len(manifest.shards):
            raise ValueError("a shard is listed twice")
