"""The number of tokens of each document of a raw domain: counted once per tokenizer, and stored in the corpus folder.

The name of the file is a hash of the domain's content and of the tokenizer, so it never belongs to another text. If the
corpus folder cannot be written, the counts are stored in a temporary folder of this user. One process of a machine
counts, with a thread per core, while the others wait for its result.
"""

import fcntl
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress

import numpy as np
import numpy.typing as npt

from z2all_ds.base.console import progress
from z2all_ds.base.machine import private_temp_dir, usable_cores
from z2all_ds.base.run_folder import open_lock_file
from z2all_ds.base.storage import Folder, open_folder
from z2all_ds.corpus.reading.readers import DomainReader
from z2all_ds.tokenizer.sampling import all_texts, text_batches

EncodeBatch = Callable[[list[str]], list[list[int]]]
Counts = npt.NDArray[np.uint32]
Beat = Callable[[], object]
"""Called while the work goes on, so that a watchdog sees it."""

SHOW_PROGRESS_ABOVE_BYTES = 8 << 20
POLL_SECONDS = 0.2
_DTYPE = np.dtype("<u4")
_DIGEST_BYTES = 16


def token_counts(
    reader: DomainReader, encode_batch: EncodeBatch, tokenizer_fingerprint: str, beat: Beat = lambda: None
) -> Counts:
    """Return the tokens of each document, with its <|endoftext|>."""
    name, own_folder = counts_name(reader, tokenizer_fingerprint), private_temp_dir() / "token-counts"
    places = [reader.folder, open_folder(own_folder)]
    stored = _load(places, name, reader.num_documents)
    if stored is not None:
        return stored
    own_folder.mkdir(exist_ok=True)
    with _turn(open_lock_file(own_folder / f"{name}.lock"), beat):
        stored = _load(places, name, reader.num_documents)
        return _count_and_store(reader, encode_batch, places, name, beat) if stored is None else stored


def counts_name(reader: DomainReader, tokenizer_fingerprint: str) -> str:
    key = hashlib.blake2b(f"{reader.fingerprint}|{tokenizer_fingerprint}".encode(), digest_size=12).hexdigest()
    return f".{key}.token-counts"


@contextmanager
def _turn(lock: int, beat: Beat) -> Iterator[None]:
    """Wait until no other process of this machine counts the same, and keep others waiting."""
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            beat()
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(lock)


def _count_and_store(
    reader: DomainReader, encode_batch: EncodeBatch, places: Iterable[Folder], name: str, beat: Beat
) -> Counts:
    counts = _count(reader, encode_batch, beat)
    reader.check_content()  # counts of another text must not be stored
    data = counts.tobytes()
    for folder in places:
        with suppress(OSError):
            folder.write_whole(name, data + _digest(data))
            break
    return counts


def _load(places: Iterable[Folder], name: str, num_documents: int) -> Counts | None:
    """Return the stored counts; None if they are missing or damaged."""
    for folder in places:
        with suppress(OSError):
            content = folder.read(name)
            data, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
            if len(data) == num_documents * _DTYPE.itemsize and digest == _digest(data):
                return np.frombuffer(data, _DTYPE)
    return None


def _count(reader: DomainReader, encode_batch: EncodeBatch, beat: Beat) -> Counts:
    is_large = reader.num_bytes > SHOW_PROGRESS_ABOVE_BYTES
    shown = progress(f"counting tokens of {reader.name}", reader.num_documents, "documents")
    counts = list[Counts]()
    with shown if is_large else nullcontext() as advance:
        for counted in _counted(text_batches(all_texts(reader)), encode_batch):
            counts.append(counted)
            beat()
            if advance:
                advance(len(counted))
    return np.concatenate(counts)


def _counted(batches: Iterable[list[str]], encode_batch: EncodeBatch) -> Iterator[Counts]:
    """Yield the counts of each batch. The tokenizer releases the interpreter lock, so threads work at the same time,
    also in ranks, where each call of the tokenizer uses one core."""

    def count(texts: list[str]) -> Counts:
        return np.array([len(ids) + 1 for ids in encode_batch(texts)], _DTYPE)

    cores, waiting = usable_cores(), deque[Future[Counts]]()
    with ThreadPoolExecutor(cores) as threads:
        for texts in batches:
            waiting.append(threads.submit(count, texts))
            if len(waiting) > cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
