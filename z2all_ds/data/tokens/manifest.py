"""The format of token shards: two plain files per raw shard, and TOKENS.json, written last.

NAME.tokens   the tokens of all documents in order, each document with its <|endoftext|> last; little-endian integers
              of the width given by `dtype` in TOKENS.json
NAME.ends     the number of tokens up to the end of each document, [documents] little-endian uint64: document i is
              tokens[ends[i - 1] : ends[i]]

Neither has a header, so numpy.memmap can open both. NAME is the path of the raw shard with its suffix. The manifest
identifies the corpus and the tokenizer; a raw shard without documents has no files.
"""

import json
import re
from collections.abc import Mapping, Sequence
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
    """Path of the raw shard, as in the manifest of the raw corpus."""
    domain: str
    documents: int
    bytes: int
    """Size of the raw shard."""
    text_bytes: int
    """Size of the texts in UTF-8."""
    tokens: int
    """Includes the <|endoftext|> of every document."""
    tokens_file: str
    """Relative to the folder of TOKENS.json, with forward slashes, as is `ends_file`."""
    ends_file: str
    tokens_sha256: str
    ends_sha256: str


@dataclass(frozen=True)
class DomainTotals:
    """Sums over the shards of a domain, or of all domains."""

    documents: int
    tokens: int
    text_bytes: int
    bytes_per_token: float
    """Without the <|endoftext|> tokens, which represent no text."""


@dataclass(frozen=True)
class TokenManifest:
    """All token shards of a corpus, in the order of the raw ones."""

    format_version: int
    dtype: str
    eot_id: int
    tokenizer_fingerprint: str
    tokenizer_size: int
    """Number of ids; every token is smaller."""
    corpus_fingerprint: str
    domain_fingerprints: dict[str, str]
    """Those of the raw domains, so that a run may change from text to tokens and back."""
    shards: tuple[TokenShard, ...]

    @property
    def totals(self) -> dict[str, DomainTotals]:
        """Totals by domain, in the order of first appearance."""
        names = dict.fromkeys(shard.domain for shard in self.shards)
        return {name: totals_of([shard for shard in self.shards if shard.domain == name]) for name in names}


def totals_of(shards: Sequence[TokenShard]) -> DomainTotals:
    documents, tokens = sum(shard.documents for shard in shards), sum(shard.tokens for shard in shards)
    text_bytes = sum(shard.text_bytes for shard in shards)
    return DomainTotals(documents, tokens, text_bytes, text_bytes / max(1, tokens - documents))


def dtype_for(tokenizer_size: int) -> str:
    """Returns the narrowest type that can store every id."""
    return "uint16" if tokenizer_size <= 1 << 16 else "uint32"


def files_of(raw_path: str) -> tuple[str, str]:
    """Returns the names of the two files of a raw shard; with its suffix, as a.jsonl and a.parquet may both exist."""
    return f"{raw_path}.tokens", f"{raw_path}.ends"


def write_token_manifest(folder: Path, manifest: TokenManifest) -> None:
    """Writes the manifest atomically, after all other files."""
    write_whole(folder / TOKEN_MANIFEST_NAME, json.dumps(asdict(manifest), ensure_ascii=False, indent=1) + "\n")


def parse_token_manifest(data: bytes, where: str) -> TokenManifest:
    """Parses and checks a manifest; raises a DataError for an invalid one."""
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
        raise DataError(where, f"not a token manifest ({error!r})", again) from None
    return manifest


def parse_token_shard(entry: Mapping[str, Any]) -> TokenShard:
    """Parses and checks the entry of a shard; raises TypeError or ValueError for an invalid one."""
    shard = TokenShard(**entry)
    for path in (shard.path, shard.tokens_file, shard.ends_file):
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ValueError(f"path {path!r} must be inside the folder")
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
        raise ValueError("tokenizer_size and eot_id must be integers")
    if not 0 <= manifest.eot_id < manifest.tokenizer_size <= 1 << (8 * TOKEN_DTYPES[manifest.dtype].itemsize):
        raise ValueError(f"eot_id {manifest.eot_id} of {manifest.tokenizer_size} ids as {manifest.dtype}")
    fingerprints = dict(manifest.domain_fingerprints)
    if not all(isinstance(value, str) for value in fingerprints.values()):
        raise ValueError("domain_fingerprints must be strings")
    if missing := {shard.domain for shard in manifest.shards} - set(fingerprints):
        raise ValueError(f"domain {min(missing)!r} has no fingerprint")
    for name in ("path", "tokens_file", "ends_file"):
        if len({getattr(shard, name) for shard in manifest.shards}) != len(manifest.shards):
            raise ValueError("a shard is listed twice")
