"""Tokenizes a corpus into a folder of token shards, shard by shard in worker processes.

A run that was stopped continues with the shards that are not finished (`folder`).
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from z2all_ds.base.atomic import HashedFile, explain_disk_errors, make_folder
from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.machine import usable_cores
from z2all_ds.base.storage import open_folder
from z2all_ds.corpus.building.folder import build_lock
from z2all_ds.corpus.executors import Executor, progress_file, read_progress, task_progress
from z2all_ds.corpus.faults import ON_ERROR
from z2all_ds.corpus.manifest import MANIFEST_NAME, ShardInfo, load_manifest
from z2all_ds.corpus.reading.readers import DomainReader
from z2all_ds.corpus.reading.shards import check_content
from z2all_ds.data.documents import as_document
from z2all_ds.data.tokens.folder import Job, TokenFolder
from z2all_ds.data.tokens.manifest import (
    ENDS_DTYPE,
    FORMAT_VERSION,
    TOKEN_DTYPES,
    TokenManifest,
    TokenShard,
    dtype_for,
    files_of,
    totals_of,
)
from z2all_ds.tokenizer.sampling import all_texts, text_batches
from z2all_ds.tokenizer.tokenization_z2all import load_tokenizer, worker_tokenizer


@dataclass(frozen=True)
class ShardWork:
    """Settings of the work on all shards."""

    corpus: str
    text_field: str
    tokenizer_dir: str
    tokenizer_fingerprint: str
    out_dir: Path
    work_dir: Path
    """For unfinished files, on the same disk as `out_dir`."""
    threads: int
    """For the tokenizer of each worker process."""
    on_bad_record: str = "stop"


def tokenize_corpus(
    corpus: str | Path,
    tokenizer_dir: str | Path,
    out_dir: str | Path,
    workers: int | None = None,
    replace: bool = False,
    on_bad_record: str = "stop",
) -> TokenManifest:
    """Write the missing tokens of a corpus; `replace` removes tokens of other data from the folder.

    With `on_bad_record="skip"`, a record without a valid text becomes an empty document.
    """
    if on_bad_record not in ON_ERROR:
        raise ConfigError(
            f"--on-bad-record {on_bad_record}", f"must be {' or '.join(ON_ERROR)}", "Choose one of these."
        )
    executor, out = Executor(workers), Path(out_dir)
    tokenizer, raw = load_tokenizer(tokenizer_dir), load_manifest(corpus)
    shards = [shard for shard in raw.shards if shard.documents > 0]
    if not shards:
        raise DataError(f"corpus {corpus}", "it has no documents", "Build it again from sources with text.")
    if (out / MANIFEST_NAME).exists():
        raise ConfigError(f"folder {out}", "is a corpus of text", "Give the tokens a folder of their own.")
    dtype = dtype_for(tokenizer.size)
    job = Job(tokenizer.fingerprint, raw.fingerprint, tuple(shard.path for shard in shards))
    with explain_disk_errors(out), build_lock(make_folder(out)), TokenFolder(out, job, dtype) as folder:
        published = folder.open(replace)
        if published is not None:
            say(f"{out}: the tokens of all {len(shards)} shards exist")
            return published
        done = folder.finished()
        missing = [(number, shard) for number, shard in enumerate(shards) if number not in done]
        if done and missing:
            say(f"{out}: continuing with {len(missing)} of {len(shards)} shards")
        folder.begin(sum(_bytes_needed(shard, dtype) for _, shard in missing))
        processes = min(workers or usable_cores(), max(1, len(missing)))
        work = ShardWork(
            str(corpus),
            raw.text_field,
            str(tokenizer_dir),
            tokenizer.fingerprint,
            out,
            folder.work,
            threads=max(1, usable_cores() // processes),
            on_bad_record=on_bad_record,
        )
        _tokenize(executor, work, missing, folder, done)
        manifest = TokenManifest(
            FORMAT_VERSION,
            dtype,
            tokenizer.eot_id,
            tokenizer.fingerprint,
            tokenizer.size,
            raw.fingerprint,
            raw.domain_fingerprints,
            tuple(done[number] for number in range(len(shards))),
        )
        folder.publish(manifest)
    return manifest


def _bytes_needed(shard: ShardInfo, dtype: str) -> int:
    """Estimate one token per four bytes."""
    return shard.bytes // 4 * TOKEN_DTYPES[dtype].itemsize + 2 * shard.documents * ENDS_DTYPE.itemsize


def _tokenize(
    executor: Executor,
    work: ShardWork,
    shards: Sequence[tuple[int, ShardInfo]],
    folder: TokenFolder,
    done: dict[int, TokenShard],
) -> None:
    """Tokenize numbered shards and add each to `done`."""
    with progress("tokenize", sum(shard.bytes for _, shard in shards), "bytes") as advance:
        tokens = 0

        def advance_with_tokens(amount: float, note: str = "") -> None:
            advance(amount, f"{tokens + read_progress(folder.work)[1]:,} tokens")

        with task_progress(folder.work, advance_with_tokens) as count_finished, executor.opened() as run:
            for index, written in run(partial(tokenize_shard, work), shards):
                number = shards[index][0]
                folder.record(number, written)
                done[number] = written
                tokens += written.tokens
                count_finished(written.bytes, written.documents)


def tokenize_shard(work: ShardWork, numbered: tuple[int, ShardInfo]) -> TokenShard:
    """Write the files of a shard, in a worker process; `numbered` is its number and its entry in the manifest."""
    number, shard = numbered
    tokenizer = worker_tokenizer(work.tokenizer_dir, work.tokenizer_fingerprint, work.threads)
    dtype = TOKEN_DTYPES[dtype_for(tokenizer.size)]
    text_bytes = num_tokens = num_documents = 0
    tokens_file, ends_file, sizes_file = files_of(shard.path)
    # With the process id: a worker of a run that was killed may live a moment longer than the run.
    unfinished = work.work_dir / f"{number:05d}-{os.getpid()}"
    with (
        explain_disk_errors(work.out_dir),
        progress_file(work.work_dir / f"{number:05d}.progress", lambda: num_tokens) as advance,
        HashedFile(unfinished.with_suffix(".tokens")) as tokens_out,
        HashedFile(unfinished.with_suffix(".ends")) as ends_out,
        HashedFile(unfinished.with_suffix(".sizes")) as sizes_out,
    ):
        folder = open_folder(work.corpus)
        reader = DomainReader(shard.domain, folder, [shard], work.text_field, work.on_bad_record)
        for texts in text_batches(all_texts(reader)):
            try:
                encoded = tokenizer.encode_batch(texts)
            except DataError as error:
                where = f"{shard.path}, records {num_documents} to {num_documents + len(texts) - 1}, {error.what}"
                raise DataError(where, error.rule, error.fix) from None
            documents = [as_document(ids, tokenizer.eot_id) for ids in encoded]
            tokens = np.concatenate(documents)
            assert int(tokens.min()) >= 0 and int(tokens.max()) < tokenizer.size
            ends = np.cumsum([len(document) for document in documents], dtype=np.uint64) + np.uint64(num_tokens)
            tokens_out.write(tokens.astype(dtype).data)
            ends_out.write(ends.astype(ENDS_DTYPE).data)
            text_bytes += sum(len(text.encode()) for text in texts)
            num_tokens, num_documents = num_tokens + len(tokens), num_documents + len(texts)
            advance(len(texts) * shard.bytes // shard.documents)
        check_content(folder, shard)  # last, as errors that name a record say more
        make_folder((work.out_dir / tokens_file).parent)
        tokens_out.finish(work.out_dir / tokens_file)
        ends_out.finish(work.out_dir / ends_file)
        sizes_out.write(reader.document_sizes().astype(ENDS_DTYPE).data)
        sizes_out.finish(work.out_dir / sizes_file)
    return TokenShard(
        shard.path, shard.domain, shard.documents, shard.bytes, text_bytes, num_tokens,
        tokens_file, ends_file, tokens_out.sha256, ends_out.sha256, sizes_file, sizes_out.sha256,
    )  # fmt: skip


def figures_of(manifest: TokenManifest) -> dict[str, Any]:
    """Return documents, tokens and bytes per domain and in total, for JSON."""
    return {"domains": manifest.totals, "total": totals_of(manifest.shards)}


def describe(manifest: TokenManifest) -> Iterator[str]:
    """Yield a line per domain, and one for all if there are several."""
    rows = list(manifest.totals.items())
    for name, one in [*rows, *([("all", totals_of(manifest.shards))] if len(rows) > 1 else [])]:
        yield f"{name}: {one.documents:,} documents, {one.tokens:,} tokens, {one.bytes_per_token:.2f} bytes per token"
