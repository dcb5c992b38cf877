"""The output folder of a tokenization: continues after a stop, and never mixes the tokens of two jobs.

Unfinished work is in `.building/tokens`: JOB.json identifies corpus and tokenizer, and each finished shard has a
record. TOKENS.json is written last; then the unfinished work is removed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from z2all_ds.base.atomic import TEMPORARY_SUFFIX, force_to_disk, write_whole
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.machine import require_free_disk
from z2all_ds.base.paths import full_path
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.corpus.building.folder import BUILDING_NAME, refuse_link, remove_if_done
from z2all_ds.data.tokens.manifest import (
    ENDS_DTYPE,
    TOKEN_DTYPES,
    TOKEN_MANIFEST_NAME,
    TokenManifest,
    TokenShard,
    files_of,
    inside_folder,
    parse_token_manifest,
    write_token_manifest,
)


@dataclass(frozen=True)
class Job:
    """The identity of the tokens in a folder, and the raw shards they come from."""

    tokenizer_fingerprint: str
    corpus_fingerprint: str
    shards: tuple[str, ...]


class TokenFolder:
    """A folder of tokens with its published and unfinished parts."""

    def __init__(self, out: Path, job: Job, dtype: str) -> None:
        self._out, self._job, self._dtype = out, job, dtype
        self.work = out / BUILDING_NAME / "tokens"
        self._job_file = self.work / "JOB.json"

    def __enter__(self) -> "TokenFolder":
        refuse_link(self.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        return self

    def __exit__(self, *_: object) -> None:
        """Keep records for the next run; remove the work folder if there are none."""
        self._remove_leftovers()
        if not any(self.work.iterdir()):
            self.work.rmdir()
            remove_if_done(self._out)

    def _remove_leftovers(self) -> None:
        """Remove the files of workers that were killed."""
        for leftover in [*self.work.glob(f"*{TEMPORARY_SUFFIX}"), *self.work.glob("*.progress")]:
            leftover.unlink(missing_ok=True)

    def open(self, replace: bool) -> TokenManifest | None:
        """Return the manifest if everything exists. Otherwise prepares the folder for this job."""
        published = self._published(replace)
        existing = self._unfinished_job() if published is None else _job_of(published)
        is_current = published is not None and (not replace or all(shard.sizes_file for shard in published.shards))
        if published and is_current and existing == self._job and all(map(self._is_complete, published.shards)):
            self._remove_work()
            return published
        if existing is not None and existing != self._job and not replace:
            other = "tokenizer" if existing.tokenizer_fingerprint != self._job.tokenizer_fingerprint else "corpus"
            fix = "Choose another folder, or give --replace to overwrite them."
            raise ConfigError(f"folder {self._out}", f"contains tokens of another {other}", fix)
        if published is not None:
            self._unpublish(published)
        if existing is None:
            self._remove_work()  # records of an unknown job
        elif existing != self._job:
            for raw_path in existing.shards:
                for file in (self._out / name for name in files_of(raw_path)):
                    if full_path(file.parent).is_relative_to(full_path(self._out)):  # not through a link
                        file.unlink(missing_ok=True)
            self._remove_work()
        return None

    def finished(self) -> dict[int, TokenShard]:
        """Return the records of the shards whose files are complete, by shard number."""
        found = {}
        for number, path in enumerate(self._job.shards):
            try:
                shard = TokenShard(**load_json(read_regular(self._record_path(number))))
            except (OSError, ValueError, TypeError):
                continue
            if shard.path == path and shard.sizes_file and self._is_complete(shard):
                found[number] = shard
        return found

    def begin(self, bytes_needed: int) -> None:
        """Check the disk and mark the unfinished work as belonging to this job."""
        require_free_disk(self._out, bytes_needed, "the tokens of this corpus")
        self._write_job(self._job)

    def record(self, number: int, shard: TokenShard) -> None:
        """Mark a shard as finished; its files must have their final names."""
        write_whole(self._record_path(number), json.dumps(asdict(shard), ensure_ascii=False))

    def publish(self, manifest: TokenManifest) -> None:
        write_token_manifest(self._out, manifest)
        self._remove_work()

    def _published(self, replace: bool) -> TokenManifest | None:
        path = self._out / TOKEN_MANIFEST_NAME
        try:
            return parse_token_manifest(read_regular(path), str(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            rule = f"cannot be read ({error.strerror})"
            raise ConfigError(f"file {path}", rule, "Remove it, or choose another folder.") from None
        except DataError as error:
            if not replace:
                raise ConfigError(error.what, error.rule, "Choose another folder, or give --replace.") from None
            path.unlink()
            return None

    def _unfinished_job(self) -> Job | None:
        try:
            values = load_json(read_regular(self._job_file))
            shards = tuple(map(inside_folder, values["shards"]))  # their files may be deleted
            return Job(values["tokenizer_fingerprint"], values["corpus_fingerprint"], shards)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _unpublish(self, published: TokenManifest) -> None:
        """Turn a published folder into an unfinished one; the manifest goes last."""
        self._write_job(_job_of(published))
        for number, shard in enumerate(published.shards):
            self.record(number, shard)
        (self._out / TOKEN_MANIFEST_NAME).unlink()
        force_to_disk(self._out)

    def _remove_work(self) -> None:
        """Remove all unfinished work; JOB.json last, as it says what the rest belongs to."""
        for path in sorted(self.work.iterdir(), key=lambda path: path == self._job_file):
            path.unlink()

    def _write_job(self, job: Job) -> None:
        write_whole(self._job_file, json.dumps(asdict(job), ensure_ascii=False))

    def _record_path(self, number: int) -> Path:
        return self.work / f"{number:05d}.json"

    def _is_complete(self, shard: TokenShard) -> bool:
        sizes = {
            shard.tokens_file: shard.tokens * TOKEN_DTYPES[self._dtype].itemsize,
            shard.ends_file: shard.documents * ENDS_DTYPE.itemsize,
        }
        if shard.sizes_file:
            sizes[shard.sizes_file] = shard.documents * ENDS_DTYPE.itemsize
        paths = {self._out / name: size for name, size in sizes.items()}
        return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def _job_of(manifest: TokenManifest) -> Job:
    shards = tuple(shard.path for shard in manifest.shards)
    return Job(manifest.tokenizer_fingerprint, manifest.corpus_fingerprint, shards)
