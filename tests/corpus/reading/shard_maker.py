"""Helpers that write shards of both formats with given texts and open a reader for them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from z2all_ds.base.storage import open_folder
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.corpus.reading.readers import DomainReader


def write_jsonl(
    folder: Path, name: str, texts: Sequence[str], domain: str = "web", text_field: str = "content", last: str = "\n"
) -> ShardInfo:
    """Write a JSON Lines shard that ends with `last`."""
    records = [{"gid": n, text_field: text, "others": {"n": n}} for n, text in enumerate(texts)]
    data = ("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + (last if texts else "")).encode()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return ShardInfo(name, domain, len(texts), len(data), hashlib.sha256(data).hexdigest())


def write_parquet(
    folder: Path,
    name: str,
    texts: Sequence[str | None],
    domain: str = "web",
    text_field: str = "content",
    kind: Any = None,
    **options: Any,
) -> ShardInfo:
    """Write a Parquet shard. `kind` is the type of the text column; `options` are passed to pyarrow."""
    column = pa.array(texts, pa.string()).cast(kind or pa.string())
    table = pa.table({"gid": list(range(len(texts))), text_field: column, "noise": ["x" * 50] * len(texts)})
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / name, **options)
    data = (folder / name).read_bytes()
    return ShardInfo(name, domain, len(texts), 1, hashlib.sha256(data).hexdigest())


def reader_of(location: str | Path, *shards: ShardInfo, text_field: str = "content") -> DomainReader:
    return DomainReader("web", open_folder(location), shards, text_field)


def texts_of(reader: DomainReader, block_documents: int = 4) -> list[str]:
    """Return all texts in order. They are read in blocks, and the documents of a block in reverse order."""
    found: list[str] = []
    for first in range(0, reader.num_documents, block_documents):
        end = min(first + block_documents, reader.num_documents)
        block = reader.open_block(first, end)
        found += reversed([block.text(number) for number in reversed(range(end - first))])
    return found
