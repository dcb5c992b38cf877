"""Writes the shards of one domain: lines go in, files of bounded size come out, each renamed only when it is whole."""

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from z2all_ds.atomic import publish, temporary_name
from z2all_ds.corpus.manifest import ShardInfo
from z2all_ds.errors import DataError


class ShardWriter:
    """`write` lines, then `finish`. Leaving the block without `finish` throws the open shard away."""

    def __init__(self, out_dir: Path, domain: str, max_shard_bytes: int) -> None:
        self._out_dir, self._domain, self._max_shard_bytes = out_dir, domain, max_shard_bytes
        self._shards: list[ShardInfo] = []
        self._stream: IO[bytes] | None = None
        self._hash: Any = None
        self._documents = self._bytes = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            # The file goes first: on a full disk closing may fail too, and the space is wanted back either way.
            temporary_name(self._path()).unlink(missing_ok=True)
            try:
                stream.close()
            except OSError:
                if error is None:
                    raise

    def write(self, line: bytes) -> int:
        """Adds one line, to a new shard if the open one has no room for it, and returns its length."""
        if len(line) > self._max_shard_bytes:
            what = f"document {sum(s.documents for s in self._shards) + self._documents} of domain {self._domain}"
            rule = f"{len(line):,} bytes of JSON, more than a whole shard ({self._max_shard_bytes:,})"
            raise DataError(what, rule, "Split the document in its raw file, or raise max_shard_bytes.")
        if self._stream is not None and self._bytes + len(line) > self._max_shard_bytes:
            self._close_shard()
        if self._stream is None:
            self._stream = open(temporary_name(self._path()), "wb")  # noqa: SIM115 - lives across calls
            self._hash, self._documents, self._bytes = hashlib.sha256(), 0, 0
        self._stream.write(line)
        self._hash.update(line)
        self._documents += 1
        self._bytes += len(line)
        return len(line)

    def finish(self) -> list[ShardInfo]:
        """Closes the last shard and returns all of them in order."""
        if self._stream is not None:
            self._close_shard()
        return self._shards

    def _path(self) -> Path:
        return self._out_dir / f"{self._domain}-{len(self._shards):05d}.jsonl"

    def _close_shard(self) -> None:
        assert self._stream is not None
        self._stream.flush()
        os.fsync(self._stream.fileno())
        path = self._path()
        publish(temporary_name(path), path)
        stream, self._stream = self._stream, None
        self._shards.append(ShardInfo(path.name, self._domain, self._documents, self._bytes, self._hash.hexdigest()))
        self._documents = self._bytes = 0
        stream.close()
