"""The format of token shards: three plain files per raw shard, and TOKENS.json, written last.

NAME.tokens   the tokens of all documents in order, each document with its <|endoftext|> last; little-endian integers
              of the width given by `dtype` in TOKENS.json
NAME.ends     the number of tokens up to the end of each document, [documents] little-endian uint64: document i is
              tokens[ends[i - 1] : ends[i]]
NAME.sizes    the size of each raw document in bytes, [documents] little-endian uint64: the order of the data depends on
              it, and must be the same for text and tokens. Folders of earlier versions do not have it.

None has a header, so numpy.memmap can open all. NAME is the path of the raw shard with its suffix. The manifest
identifies the corpus and the tokenizer; a raw shard without documents has no files.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.errors import DataError

TOKEN_MANIFEST_NAME = "TOKENS.json"
FORMAT_VERSION: Literal[1] = 1
ENDS_DTYPE = np.dtype("<u8")
TOKEN_DTYPES: dict[str, "np.dtype[Any]"] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def inside_folder(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise ValueError(f"path {path!r} must be inside the folder")
    return path


Count = Annotated[int, Field(ge=0, strict=True)]
RelativePath = Annotated[str, AfterValidator(inside_folder)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_NO_OTHER_FIELDS = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_NO_OTHER_FIELDS)
class TokenShard:
    """The tokens of one raw shard."""

    path: RelativePath
    """Path of the raw shard, as in the manifest of the raw corpus."""
    domain: Annotated[str, Field(min_length=1)]
    documents: Count
    bytes: Count
    """Size of the raw shard."""
    text_bytes: Count
    """Size of the texts in UTF-8."""
    tokens: Count
    """Includes the <|endoftext|> of every document."""
    tokens_file: RelativePath
    """Relative to the folder of TOKENS.json, with forward slashes, as is `ends_file`."""
    ends_file: RelativePath
    tokens_sha256: Sha256
    ends_sha256: Sha256
    sizes_file: RelativePath | None = None
    sizes_sha256: Sha256 | None = None

    def __post_init__(self) -> None:
        if not 0 < self.documents <= self.tokens:
            raise ValueError(f"{self.documents} documents cannot have {self.tokens} tokens")


@dataclass(frozen=True)
class DomainTotals:
    """Sums over the shards of a domain, or of all domains."""

    documents: int
    tokens: int
    text_bytes: int
    bytes_per_token: float
    """Without the <|endoftext|> tokens, which represent no text."""


@dataclass(frozen=True, config=_NO_OTHER_FIELDS)
class TokenManifest:
    """All token shards of a corpus, in the order of the raw ones."""

    format_version: Literal[1]
    dtype: Literal["uint16", "uint32"]
    eot_id: Count
    tokenizer_fingerprint: str
    tokenizer_size: Count
    """Number of ids; every token is smaller."""
    corpus_fingerprint: str
    domain_fingerprints: dict[str, str]
    """Fingerprints of the raw domains, so that a run may change from text to tokens and back."""
    shards: tuple[TokenShard, ...]

    def __post_init__(self) -> None:
        if not self.eot_id < self.tokenizer_size <= 1 << (8 * TOKEN_DTYPES[self.dtype].itemsize):
            raise ValueError(f"eot_id {self.eot_id} of {self.tokenizer_size} ids as {self.dtype}")
        if missing := {shard.domain for shard in self.shards} - set(self.domain_fingerprints):
            raise ValueError(f"domain {min(missing)!r} has no fingerprint")
        for name in ("path", "tokens_file", "ends_file"):
            if len({getattr(shard, name) for shard in self.shards}) != len(self.shards):
                raise ValueError("a shard is listed twice")

    @property
    def totals(self) -> dict[str, DomainTotals]:
        """Totals by domain, in the order of first appearance."""
        names = dict.fromkeys(shard.domain for shard in self.shards)
        return {name: totals_of([shard for shard in self.shards if shard.domain == name]) for name in names}


def totals_of(shards: Sequence[TokenShard]) -> DomainTotals:
    documents, tokens = sum(shard.documents for shard in shards), sum(shard.tokens for shard in shards)
    text_bytes = sum(shard.text_bytes for shard in shards)
    return DomainTotals(documents, tokens, text_bytes, text_bytes / max(1, tokens - documents))


def dtype_for(tokenizer_size: int) -> Literal["uint16", "uint32"]:
    """Return the narrowest type that can store every id."""
    return "uint16" if tokenizer_size <= 1 << 16 else "uint32"


def files_of(raw_path: str) -> tuple[str, str, str]:
    """Return the names of the files of a raw shard; with its suffix, as a.jsonl and a.parquet may both exist."""
    return f"{raw_path}.tokens", f"{raw_path}.ends", f"{raw_path}.sizes"


def write_token_manifest(folder: Path, manifest: TokenManifest) -> None:
    """Write the manifest atomically, after all other files."""
    write_whole(folder / TOKEN_MANIFEST_NAME, json.dumps(asdict(manifest), ensure_ascii=False, indent=1) + "\n")


def parse_token_manifest(data: bytes, where: str) -> TokenManifest:
    """Parse and check a manifest; raise a DataError for an invalid one."""
    try:
        return TypeAdapter(TokenManifest).validate_json(data)
    except ValidationError as error:
        problem = error.errors()[0]
        field = "".join(f", {name}" for name in problem["loc"])
        fix = "Write the tokens again with `z2all corpus tokenize`, or restore the file."
        raise DataError(f"{where}{field}", f"not a valid token manifest ({problem['msg']})", fix) from None
