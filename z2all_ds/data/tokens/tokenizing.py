"""A corpus of text -> a folder of token shards (`token_manifest` has their format), shard by shard in worker processes.

What is finished is kept when a run is stopped, and the next one goes on from there (`token_folder`).
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import explain_disk_errors, make_folder
from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.machine import usable_cores
from z2all_ds.corpus.building.folder import build_lock
from z2all_ds.corpus.executors import Executor, read_progress, task_progress
from z2all_ds.corpus.manifest import MANIFEST_NAME, ShardInfo, load_manifest
from z2all_ds.data.tokens.folder import Job, TokenFolder
from z2all_ds.data.tokens.manifest import (
    ENDS_DTYPE,
    FORMAT_VERSION,
    TOKEN_DTYPES,
    DomainTotals,
    TokenManifest,
    TokenShard,
    dtype_for,
)
from z2all_ds.data.tokens.shard_tokenizer import ShardJob, tokenize_shard
from z2all_ds.tokenizer import load_tokenizer


def tokenize_corpus(
    corpus: str | Path,
    tokenizer_dir: str | Path,
    out_dir: str | Path,
    workers: int | None = None,
    replace: bool = False,
) -> TokenManifest:
    """Writes what is missing of the tokens of a corpus; what is there of other data is only removed if `replace`."""
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
            say(f"{out}: the tokens of all {len(shards)} shards are there")
            return published
        found = folder.finished()
        missing = [(number, shard) for number, shard in enumerate(shards) if number not in found]
        if found and missing:
            say(f"{out}: goes on with {len(missing)} of {len(shards)} shards")
        folder.begin(sum(_bytes_needed(shard, dtype) for _, shard in missing))
        processes = min(workers or usable_cores(), max(1, len(missing)))
        common = ShardJob(
            str(corpus),
            raw.text_field,
            str(tokenizer_dir),
            tokenizer.fingerprint,
            str(out),
            str(folder.work),
            threads=max(1, usable_cores() // processes),
        )
        found |= _tokenize(executor, common, missing)
        manifest = TokenManifest(
            FORMAT_VERSION,
            dtype,
            tokenizer.eot_id,
            tokenizer.fingerprint,
            tokenizer.size,
            raw.fingerprint,
            raw.domain_fingerprints,
            tuple(found[number] for number in range(len(shards))),
        )
        folder.publish(manifest)
    return manifest


def _bytes_needed(shard: ShardInfo, dtype: str) -> int:
    """About a token for every four bytes, and the end of each document."""
    return shard.bytes // 4 * TOKEN_DTYPES[dtype].itemsize + shard.documents * ENDS_DTYPE.itemsize


def _tokenize(executor: Executor, job: ShardJob, shards: Sequence[tuple[int, ShardInfo]]) -> dict[int, TokenShard]:
    """Shard number -> what was written of it."""
    done: dict[int, TokenShard] = {}
    work = Path(job.work_dir)

    with progress("tokenize", sum(shard.bytes for _, shard in shards), "bytes") as advance:

        def advance_with_tokens(amount: float, note: str = "") -> None:
            tokens = sum(shard.tokens for shard in list(done.values())) + read_progress(work)[1]
            advance(amount, f"{tokens:,} tokens")

        with task_progress(work, advance_with_tokens) as count_finished, executor.opened() as run:
            for place, written in run(partial(tokenize_shard, job), shards):
                done[shards[place][0]] = written
                count_finished(written.bytes, written.documents)
    return done


def figures_of(manifest: TokenManifest) -> dict[str, Any]:
    """What a folder of tokens holds, by domain and in all, as plain values."""
    domains = manifest.totals
    total = sum(domains.values(), DomainTotals(0, 0, 0))
    return {"domains": {name: _plain(one) for name, one in domains.items()}, "total": _plain(total)}


def summary_lines(manifest: TokenManifest) -> list[str]:
    """A line for each domain, and one for all of them where there are several."""
    domains = manifest.totals
    rows = list(domains.items())
    if len(rows) > 1:
        rows.append(("all", sum(domains.values(), DomainTotals(0, 0, 0))))
    return [
        f"{name}: {one.documents:,} documents, {one.tokens:,} tokens, {one.bytes_per_token:.2f} bytes per token"
        for name, one in rows
    ]


def _plain(totals: DomainTotals) -> dict[str, float]:
    return {**asdict(totals), "bytes_per_token": totals.bytes_per_token}
