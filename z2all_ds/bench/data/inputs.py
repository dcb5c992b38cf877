"""The same documents in every format that `z2all bench data` reads: JSON lines, Parquet, token shards, plain tokens.

Also a large corpus that needs little disk space: a thousand hard links to one shard and to its index.
"""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from z2all_ds.bench.shared import built_in_text, repeated, sample_texts
from z2all_ds.corpus.adopt import adopt_corpus
from z2all_ds.corpus.line_index import index_name
from z2all_ds.corpus.manifest import write_manifest
from z2all_ds.corpus.schema import Record
from z2all_ds.data.tokens.manifest import files_of, write_token_manifest
from z2all_ds.data.tokens.tokenizing import tokenize_corpus
from z2all_ds.tokenizer import train_tokenizer

TEXT_VOCAB_SIZE = 16_000
ROWS_PER_GROUP = 1_000
DOMAINS_AT_SCALE = 8


@dataclass(frozen=True)
class Inputs:
    """The documents in all formats, in the same order.

    `parquet_one_group` has all documents in one row group of one file. `plain_tokens` is one file with only the tokens
    of all documents, which peers pack. `mix`: share of each domain by bytes of text. `tokens_by_domain` counts an
    <|endoftext|> after each document.
    """

    tokenizer: Path
    jsonl: Path
    parquet: Path
    parquet_one_group: Path
    tokens: Path
    plain_tokens: Path
    dtype: str
    eot_id: int
    documents: int
    text_bytes: int
    mix: dict[str, float]
    tokens_by_domain: dict[str, int]

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_by_domain.values())


def prepare_inputs(scratch: Path, corpus: str | Path | None, tokenizer: str | Path | None, text_bytes: int) -> Inputs:
    """Write all formats into the folder `scratch`."""
    texts = sample_texts(corpus or built_in_text(scratch / "built_in", text_bytes), text_bytes)
    if not corpus:  # a third each of code, English and Chinese
        texts = {name: list(_up_to(repeated(documents), text_bytes // 3)) for name, documents in texts.items()}
    jsonl, parquet, one_group = scratch / "jsonl", scratch / "parquet", scratch / "parquet_one_group"
    for folder in (jsonl, parquet, one_group):
        folder.mkdir()
    for number, (domain, documents) in enumerate(texts.items()):
        name = f"{number}_{re.sub(r'[^0-9A-Za-z]', '_', domain)}-00000"
        write_lines(jsonl / f"{name}.jsonl", domain, documents)
        _write_parquet(parquet / f"{name}.parquet", documents, ROWS_PER_GROUP)
    everything = [text for documents in texts.values() for text in documents]
    _write_parquet(one_group / "all-00000.parquet", everything, len(everything))
    for folder in (jsonl, parquet, one_group):
        adopt_corpus(folder)
    if tokenizer is None:
        tokenizer = scratch / "tokenizer"
        train_tokenizer(jsonl, tokenizer, TEXT_VOCAB_SIZE)
    manifest = tokenize_corpus(jsonl, tokenizer, scratch / "tokens")
    plain = scratch / "plain_tokens"
    with open(plain, "wb") as target:
        for shard in manifest.shards:
            with open(scratch / "tokens" / shard.tokens_file, "rb") as source:
                shutil.copyfileobj(source, target)
    sizes = {domain: sum(len(text.encode()) for text in documents) for domain, documents in texts.items()}
    return Inputs(
        *(Path(tokenizer), jsonl, parquet, one_group, scratch / "tokens", plain),
        manifest.dtype,
        manifest.eot_id,
        len(everything),
        sum(sizes.values()),
        {domain: round(size / sum(sizes.values()), 4) for domain, size in sizes.items()},
        {domain: totals.tokens for domain, totals in manifest.totals.items()},
    )


def _up_to(texts: Iterator[str], wanted_bytes: int) -> Iterator[str]:
    """Yield texts until they have `wanted_bytes`, at least one."""
    size = 0
    for text in texts:
        yield text
        size += len(text.encode())
        if size >= wanted_bytes:
            return


def write_lines(path: Path, domain: str, texts: list[str]) -> None:
    """Write records in the format of a corpus build."""
    with open(path, "wb") as stream:
        for number, text in enumerate(texts):
            record = Record(number, number, domain, "", f"{domain} {number}", text, "", {})
            stream.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


def _write_parquet(path: Path, texts: list[str], rows_per_group: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"id": range(len(texts)), "title": [f"document {n}" for n in range(len(texts))], "content": texts}
    pq.write_table(pa.table({name: pa.array(column) for name, column in columns.items()}), path, rows_per_group)


@dataclass(frozen=True)
class LargeCorpus:
    """Many shards that are hard links to one file, and their tokens. `bytes`: size of the raw shards."""

    raw: Path
    tokens: Path
    bytes: int
    num_tokens: int


def make_large_corpus(scratch: Path, inputs: Inputs, shards: int, shard_bytes: int) -> LargeCorpus:
    """Make `shards` links to one shard of about `shard_bytes`, in eight domains, and to its tokens."""
    one, one_tokens, raw, tokens = (scratch / name for name in ("one", "one_tokens", "large", "large_tokens"))
    for folder in (one, raw, tokens):
        folder.mkdir()
    texts = [text for documents in sample_texts(inputs.jsonl, inputs.text_bytes * 2).values() for text in documents]
    write_lines(one / "all-00000.jsonl", "all", list(_up_to(repeated(texts), shard_bytes)))
    manifest, token_manifest = adopt_corpus(one), tokenize_corpus(one, inputs.tokenizer, one_tokens)
    (shard,), (token_shard,) = manifest.shards, token_manifest.shards
    entries, token_entries = [], []
    for number in range(shards):
        domain = f"d{number % DOMAINS_AT_SCALE}"
        name = f"{domain}-{number:05d}.jsonl"
        os.link(one / shard.path, raw / name)
        os.link(one / index_name(shard.path), raw / index_name(name))
        entries.append(replace(shard, path=name, domain=domain))
        files: dict[str, Any] = dict(zip(("tokens_file", "ends_file", "sizes_file"), files_of(name), strict=True))
        for kind, file in files.items():
            os.link(one_tokens / getattr(token_shard, kind), tokens / file)
        token_entries.append(replace(token_shard, path=name, domain=domain, **files))
    large = replace(manifest, shards=tuple(entries))
    write_manifest(raw, large)
    prints: dict[str, Any] = {"corpus_fingerprint": large.fingerprint, "domain_fingerprints": large.domain_fingerprints}
    write_token_manifest(tokens, replace(token_manifest, shards=tuple(token_entries), **prints))
    return LargeCorpus(raw, tokens, shard.bytes * shards, token_shard.tokens * shards)
