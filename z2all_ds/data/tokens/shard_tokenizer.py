"""One raw shard -> its two token files: the work of one worker process, in memory for a batch of texts.

The files grow under temporary names in the folder of unfinished work and get their final names when both are whole; a
small record beside them is written last and says that this shard is finished.
"""

import json
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from z2all_ds.base.atomic import HashedFile, explain_disk_errors, make_folder, write_whole
from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import open_folder
from z2all_ds.corpus.executors import progress_file
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.corpus.reading.readers import DomainReader
from z2all_ds.data.documents import as_document
from z2all_ds.data.tokens.manifest import (
    ENDS_DTYPE,
    TOKEN_DTYPES,
    TokenShard,
    dtype_for,
    files_of,
    parse_token_shard,
)
from z2all_ds.tokenizer import Z2allTokenizer, load_tokenizer

BATCH_BYTES = 1 << 20
"""Of texts given to the tokenizer at once."""


@dataclass(frozen=True)
class ShardJob:
    """What the work on all shards has in common."""

    corpus: str
    text_field: str
    tokenizer_dir: str
    tokenizer_fingerprint: str
    out_dir: str
    work_dir: str
    """For what is unfinished, on the disk of `out_dir`."""
    threads: int
    """For the tokenizer of each worker process."""


def tokenize_shard(job: ShardJob, numbered: tuple[int, ShardInfo]) -> TokenShard:
    """Writes the tokens of the shard and its record; `numbered` is its place in the manifest and its entry there."""
    number, shard = numbered
    tokenizer = _tokenizer(job.tokenizer_dir, job.threads)
    if tokenizer.fingerprint != job.tokenizer_fingerprint:
        raise DataError(f"tokenizer {job.tokenizer_dir}", "changed during the work", "Leave it alone, and run again.")
    dtype = TOKEN_DTYPES[dtype_for(tokenizer.size)]
    text_bytes = num_tokens = num_documents = 0
    work, out = Path(job.work_dir), Path(job.out_dir)
    tokens_file, ends_file = files_of(shard.path)
    # With the number of the process: one whose owner was killed may live a moment longer beside its successor.
    with (
        explain_disk_errors(out),
        progress_file(work / f"{number:05d}.progress", lambda: num_tokens) as advance,
        HashedFile(work / f"{number:05d}-{os.getpid()}.tokens") as tokens_out,
        HashedFile(work / f"{number:05d}-{os.getpid()}.ends") as ends_out,
    ):
        for texts, size in _batches(job, shard):
            try:
                encoded = tokenizer.encode_batch(texts)
            except DataError as error:
                where = f"{shard.path}, records {num_documents} to {num_documents + len(texts) - 1}, {error.what}"
                raise DataError(where, error.rule, error.fix) from None
            documents = [as_document(ids, tokenizer.eot_id) for ids in encoded]
            # [documents] arrays of [tokens of the document] -> one row
            row = np.concatenate(documents)
            assert int(row.min()) >= 0 and int(row.max()) < tokenizer.size
            ends = np.cumsum([len(document) for document in documents], dtype=np.uint64) + np.uint64(num_tokens)
            tokens_out.write(row.astype(dtype).data)
            ends_out.write(ends.astype(ENDS_DTYPE).data)
            text_bytes, num_tokens, num_documents = text_bytes + size, num_tokens + len(row), num_documents + len(texts)
            advance(len(texts) * shard.bytes // shard.documents)
        make_folder((out / tokens_file).parent)
        tokens_out.finish(out / tokens_file)
        ends_out.finish(out / ends_file)
        done = TokenShard(
            shard.path, shard.domain, shard.documents, shard.bytes, text_bytes, num_tokens,
            tokens_file, ends_file, tokens_out.sha256, ends_out.sha256,
        )  # fmt: skip
        write_record(work, number, done)
    return done


def write_record(work_dir: Path, number: int, shard: TokenShard) -> None:
    """Says that a shard is finished. Call it when both files have their names."""
    write_whole(_record_path(work_dir, number), json.dumps(asdict(shard), ensure_ascii=False))


def read_record(work_dir: Path, number: int) -> TokenShard | None:
    """The record of a finished shard, if there is one that can be read."""
    try:
        return parse_token_shard(json.loads(_record_path(work_dir, number).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _record_path(work_dir: Path, number: int) -> Path:
    return work_dir / f"{number:05d}.json"


@lru_cache(maxsize=1)  # a worker has many shards of one tokenizer
def _tokenizer(folder: str, threads: int) -> Z2allTokenizer:
    if multiprocessing.parent_process() is not None:
        # One of several workers: without this each would start a thread for every core.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(threads)
    return load_tokenizer(folder)


def _batches(job: ShardJob, shard: ShardInfo) -> Iterator[tuple[list[str], int]]:
    """The texts of a shard in their order, and how many bytes of UTF-8 they are, about BATCH_BYTES at a time."""
    reader = DomainReader(shard.domain, open_folder(job.corpus), [shard], job.text_field)
    documents_at_once = max(1, BATCH_BYTES * shard.documents // max(1, shard.bytes))
    texts: list[str] = []
    size = 0
    for first in range(0, shard.documents, documents_at_once):
        end = min(first + documents_at_once, shard.documents)
        block = reader.open_block(first, end)
        for number in range(end - first):
            text = block.text(number)
            texts.append(text)
            # A half character cannot be encoded; the tokenizer says so, in one line.
            size += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            if size >= BATCH_BYTES:
                yield texts, size
                texts, size = [], 0
    if texts:
        yield texts, size
