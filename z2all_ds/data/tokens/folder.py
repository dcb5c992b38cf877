"""The folder of a tokenized corpus while it is made: it goes on where it was stopped, and never mixes two of them.

Unfinished work lies in `.building/tokens`: JOB.json says of what corpus and tokenizer it is, and every finished shard
leaves a record there. TOKENS.json is written last; then the folder of unfinished work goes.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from z2all_ds.base.atomic import TEMPORARY_SUFFIX, force_to_disk, write_whole
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.machine import require_free_disk
from z2all_ds.corpus.building.folder import BUILDING_NAME
from z2all_ds.data.tokens.manifest import (
    ENDS_DTYPE,
    TOKEN_DTYPES,
    TOKEN_MANIFEST_NAME,
    TokenManifest,
    TokenShard,
    files_of,
    parse_token_manifest,
    write_token_manifest,
)
from z2all_ds.data.tokens.shard_tokenizer import read_record, write_record

WORK_NAME = "tokens"
JOB_NAME = "JOB.json"
LOCK_NAME = "lock"


@dataclass(frozen=True)
class Job:
    """What the tokens in a folder depend on, and the raw shards whose tokens may lie there."""

    tokenizer_fingerprint: str
    corpus_fingerprint: str
    shards: tuple[str, ...]


class TokenFolder:
    """The folder of the tokens: what is published in it, what is unfinished, and how one becomes the other."""

    def __init__(self, out: Path, job: Job, dtype: str) -> None:
        self._out, self._job, self._dtype = out, job, dtype
        self.work = out / BUILDING_NAME / WORK_NAME

    def __enter__(self) -> "TokenFolder":
        self.work.mkdir(parents=True, exist_ok=True)
        self._sweep()
        return self

    def __exit__(self, *_: object) -> None:
        """Records stay for the next run; where there are none, nothing stays."""
        self._sweep()
        if not any(self.work.iterdir()):
            self.work.rmdir()
            building = self.work.parent
            if [path.name for path in building.iterdir()] == [LOCK_NAME]:
                shutil.rmtree(building)

    def _sweep(self) -> None:
        """What workers had in hand when they were killed."""
        for leftover in [*self.work.glob(f"*{TEMPORARY_SUFFIX}"), *self.work.glob("*.progress")]:
            leftover.unlink(missing_ok=True)

    def open(self, replace: bool) -> TokenManifest | None:
        """The manifest, if everything is there. Else the folder is ready for this job: all in it is its own."""
        published = self._published(replace)
        there = self._unfinished_job() if published is None else _job_of(published)
        if published is not None and there == self._job and all(map(self._is_whole, published.shards)):
            self._forget_work()
            return published
        if there is not None and there != self._job and not replace:
            other = "tokenizer" if there.tokenizer_fingerprint != self._job.tokenizer_fingerprint else "corpus"
            fix = "Choose another folder, or give --replace to do away with them."
            raise ConfigError(f"folder {self._out}", f"holds tokens of another {other}", fix)
        if published is not None:
            self._take_back(published)
        if there is None:
            self._forget_work()  # records that say of nothing whose they are
        elif there != self._job:
            self._remove_files(there)
        return None

    def finished(self) -> dict[int, TokenShard]:
        """Shard number -> its record, of those whose files are there whole."""
        records = {number: read_record(self.work, number) for number in range(len(self._job.shards))}
        return {
            number: record
            for number, record in records.items()
            if record is not None and record.path == self._job.shards[number] and self._is_whole(record)
        }

    def begin(self, bytes_needed: int) -> None:
        """Says whose the unfinished work is."""
        require_free_disk(self._out, bytes_needed, "the tokens of this corpus")
        self._write_job(self._job)

    def publish(self, manifest: TokenManifest) -> None:
        write_token_manifest(self._out, manifest)
        self._forget_work()

    def _published(self, replace: bool) -> TokenManifest | None:
        path = self._out / TOKEN_MANIFEST_NAME
        try:
            return parse_token_manifest(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None
        except DataError as error:
            if not replace:
                raise ConfigError(error.what, error.rule, "Choose another folder, or give --replace.") from None
            path.unlink()
            return None

    def _unfinished_job(self) -> Job | None:
        try:
            values = json.loads((self.work / JOB_NAME).read_bytes())
            return Job(values["tokenizer_fingerprint"], values["corpus_fingerprint"], tuple(values["shards"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _take_back(self, published: TokenManifest) -> None:
        """Makes a published folder an unfinished one; stopped anywhere in between, it is either."""
        self._write_job(_job_of(published))
        for number, shard in enumerate(published.shards):
            write_record(self.work, number, shard)
        (self._out / TOKEN_MANIFEST_NAME).unlink()
        force_to_disk(self._out)

    def _remove_files(self, job: Job) -> None:
        """JOB.json last: as long as it is there, it is known whose the rest is."""
        for raw_path in job.shards:
            for name in files_of(raw_path):
                (self._out / name).unlink(missing_ok=True)
        self._forget_work()

    def _forget_work(self) -> None:
        job, others = self.work / JOB_NAME, [path for path in self.work.iterdir() if path.name != JOB_NAME]
        for path in others:
            path.unlink()
        job.unlink(missing_ok=True)

    def _write_job(self, job: Job) -> None:
        write_whole(self.work / JOB_NAME, json.dumps(asdict(job), ensure_ascii=False))

    def _is_whole(self, shard: TokenShard) -> bool:
        sizes = {
            shard.tokens_file: shard.tokens * TOKEN_DTYPES[self._dtype].itemsize,
            shard.ends_file: shard.documents * ENDS_DTYPE.itemsize,
        }
        return all(_size_of(self._out / name) == size for name, size in sizes.items())


def _job_of(manifest: TokenManifest) -> Job:
    shards = tuple(shard.path for shard in manifest.shards)
    return Job(manifest.tokenizer_fingerprint, manifest.corpus_fingerprint, shards)


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
