"""Tiny corpora whose tokens identify their document, so that tests can compare exactly and in order."""

import hashlib
import json
import random
from pathlib import Path
from typing import ClassVar

import numpy as np

from z2all_ds.corpus.manifest import Manifest, ShardInfo, write_manifest
from z2all_ds.data import PackedStream, StageSpec, StreamSpec

TOKENS_PER_DOCUMENT_MAX = 1000


class SpanTokenizer:
    """A tokenizer that reads the text "number length" as tokens number * 1000 + 1 to + length; 0 is <|endoftext|>. An
    empty text has no tokens."""

    eot_id = 0
    begins_texts: ClassVar = False
    model_token_ids: ClassVar = {"bos_token_id": 7, "eos_token_id": 0, "pad_token_id": 0}

    def __init__(self, fingerprint: str = "spans") -> None:
        self.fingerprint = fingerprint

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        number, length = (int(part) for part in text.split() or (0, 0))
        return list(range(number * TOKENS_PER_DOCUMENT_MAX + 1, number * TOKENS_PER_DOCUMENT_MAX + 1 + length))


def document_tokens(number: int, length: int) -> list[int]:
    """Return the tokens of a whole document, with <|endoftext|> at the end."""
    return [*SpanTokenizer()._encode(f"{number} {length}"), SpanTokenizer.eot_id]


def write_corpus(folder: Path, lengths_by_domain: dict[str, list[int]], documents_per_shard: int = 7) -> Path:
    """Write documents with these numbers of tokens, numbered across all domains in sorted order."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[ShardInfo] = []
    number = 0
    for domain in sorted(lengths_by_domain):
        lengths = lengths_by_domain[domain]
        for first in range(0, len(lengths), documents_per_shard):
            texts = []
            for length in lengths[first : first + documents_per_shard]:
                texts.append(f"{number} {length}")
                number += 1
            shards.append(write_shard(folder, domain, len(shards), texts))
    write_manifest(folder, Manifest(1, tuple(shards)))
    return folder


def write_shard(folder: Path, domain: str, number: int, texts: list[str]) -> ShardInfo:
    lines = "".join(
        json.dumps({"gid": n, "id": n, "data_src": domain, "category": "", "title": "题", "content": text, "desc": "",
                    "others": {}}, ensure_ascii=False) + "\n"
        for n, text in enumerate(texts)
    ).encode()  # fmt: skip
    path = folder / f"{domain}-{number:05d}.jsonl"
    path.write_bytes(lines)
    return ShardInfo(path.name, domain, len(texts), len(lines), hashlib.sha256(lines).hexdigest())


def small_corpus(folder: Path) -> Path:
    """Write three domains of different sizes; some documents are empty, and `books` has fewer documents than lanes."""
    draw = random.Random(5)
    sizes = {"books": 5, "code": 40, "web": 90}
    return write_corpus(folder, {name: [draw.randrange(0, 30) for _ in range(n)] for name, n in sizes.items()})


def open_stream(
    corpus_dir: Path,
    rank: int = 0,
    world_size: int = 1,
    sequence_length: int = 16,
    weights: dict[str, float] | None = None,
    temperature: float = 1.0,
    **spec: object,
) -> PackedStream:
    """Open a stream with one stage, unless `stages` are given."""
    values: dict[str, object] = {
        "corpus_dir": corpus_dir,
        "stages": (StageSpec(sequence_length, weights, temperature),),
        "seed": 3,
        "num_lanes": 12,
    }
    return PackedStream(StreamSpec(**(values | spec)), SpanTokenizer(), rank, world_size)  # type: ignore[arg-type]


def as_arrays(sample: dict) -> dict[str, np.ndarray]:
    return {name: np.asarray(column) for name, column in sample.items()}


def assert_same(left: dict, right: dict) -> None:
    assert list(left) == list(right)
    for name in left:
        np.testing.assert_array_equal(np.asarray(left[name]), np.asarray(right[name]), err_msg=name)
