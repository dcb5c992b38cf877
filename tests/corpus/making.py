"""Helpers that write small corpora with given contents."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from z2all_ds.corpus.manifest import FORMAT_VERSION, Manifest, ShardInfo, write_manifest
from z2all_ds.corpus.schema import Record


def write_corpus(
    folder: Path, contents: Mapping[str, Sequence[str]], documents_per_shard: int = 7, first_gid: int = 0
) -> Path:
    """Write a corpus with the given contents per domain; gids are consecutive across domains."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, gid = [], first_gid
    for domain, texts in contents.items():
        for place in range(0, len(texts), documents_per_shard):
            records = []
            for text in texts[place : place + documents_per_shard]:
                records.append(Record(gid, place, domain, "", f"第{gid}篇", text, "", {"n": gid}))
                gid += 1
            shards.append(write_shard(folder, f"{domain}-{place // documents_per_shard:05d}.jsonl", domain, records))
    write_manifest(folder, Manifest(FORMAT_VERSION, tuple(shards), next_gid=gid))
    return folder


def write_shard(folder: Path, path: str, domain: str, records: Sequence[Record]) -> ShardInfo:
    data = "".join(record.to_line() + "\n" for record in records).encode()
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(data)
    return ShardInfo(path, domain, len(records), len(data), hashlib.sha256(data).hexdigest())
