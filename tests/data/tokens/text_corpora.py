"""Writers of corpora of given texts, and of token folders with given documents."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from z2all_ds.corpus.manifest import Manifest, ShardInfo, write_manifest
from z2all_ds.data.tokens.manifest import (
    FORMAT_VERSION,
    TOKEN_DTYPES,
    TokenManifest,
    TokenShard,
    dtype_for,
    write_token_manifest,
)

ODD_TEXTS = (
    "",
    "plain",
    "<|endoftext|>",
    "a <|pad|> and an <|endoftext|> inside\n<|im_start|>user",
    "\x00\x01\r\n\t  ",
    "汉字，标点。🙂 e\u0301\u200d",
    "x" * 5000,
    "\n".join(f"{n} * {n} = {n * n}" for n in range(400)),
)


def write_text_corpus(folder: Path, shards_by_domain: Mapping[str, Sequence[Sequence[str]]]) -> Path:
    """Write a corpus; `shards_by_domain` has the texts of each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for domain, texts_by_shard in shards_by_domain.items():
        for number, texts in enumerate(texts_by_shard):
            lines = "".join(json.dumps({"content": text}, ensure_ascii=False) + "\n" for text in texts).encode()
            name = f"{domain}-{number:05d}.jsonl"
            (folder / name).write_bytes(lines)
            shards.append(ShardInfo(name, domain, len(texts), len(lines), hashlib.sha256(lines).hexdigest()))
    write_manifest(folder, Manifest(1, tuple(shards)))
    return folder


def write_token_corpus(
    folder: Path, shards: Sequence[Sequence[Sequence[int]]], eot_id: int, tokenizer_size: int
) -> Path:
    """Write a domain `d`; the documents of each shard include their <|endoftext|>."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype, entries = dtype_for(tokenizer_size), []
    for number, documents in enumerate(shards):
        name = f"d-{number:05d}.jsonl"
        tokens = np.array([token for document in documents for token in document]).astype(TOKEN_DTYPES[dtype])
        ends = np.cumsum([len(document) for document in documents]).astype("<u8")
        digests = []
        for suffix, values in ((".tokens", tokens), (".ends", ends)):
            (folder / f"{name}{suffix}").write_bytes(values.tobytes())
            digests.append(hashlib.sha256(values.tobytes()).hexdigest())
        counts = (len(documents), 100 + number, 50, len(tokens))
        entries.append(TokenShard(name, "d", *counts, f"{name}.tokens", f"{name}.ends", *digests))
    write_token_manifest(
        folder,
        TokenManifest(FORMAT_VERSION, dtype, eot_id, "t", tokenizer_size, "c", {"d": "fingerprint"}, tuple(entries)),
    )
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
