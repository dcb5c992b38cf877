"""The number of tokens of each document of a raw domain: counted once per tokenizer, and stored in the corpus folder.

The name of the file is a hash of the domain's content and of the tokenizer, so it never belongs to another text. If the
corpus folder cannot be written, the counts are stored in a temporary folder of this user. One process of a machine
counts, with a thread per core, while the others wait for its result.
"""

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress

import numpy as np
import numpy.typing as npt

from z2all_ds.base.console import progress, say
from z2all_ds.base.machine import private_temp_dir, usable_cores
from z2all_ds.base.run_folder import SILENT_SECONDS, open_lock_file, wait_for_lock
from z2all_ds.base.storage import Folder, open_folder
from z2all_ds.corpus.reading.readers import DomainReader
from z2all_ds.tokenizer.sampling import all_texts, text_batches

EncodeBatch = Callable[[list[str]], list[list[int]]]
Counts = npt.NDArray[np.uint32]
Beat = Callable[[], object]
"""Called while the work goes on, so that a watchdog sees it."""

SHOW_PROGRESS_ABOVE_BYTES = 8 << 20
WAIT_SECONDS = 3600.0
"""For another process that counts the same; it may have been stopped. Two that count do no harm."""
BATCH_CHARACTERS, MOST_CHARACTERS = 1 << 18, 1 << 24
"""Of one call of the tokenizer, and of all calls at a time: while it works, a text takes about 150 times its size."""
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
    with ExitStack() as held:
        with suppress(OSError):  # without a lock, every process counts for itself
            own_folder.mkdir(exist_ok=True)
            lock = open_lock_file(own_folder / f"{name}.lock")
            held.callback(os.close, lock)
            _wait(lock, f"the tokens of {reader.name}", beat)
        stored = _load(places, name, reader.num_documents)
        return _count_and_store(reader, encode_batch, places, name, beat) if stored is None else stored


def counts_name(reader: DomainReader, tokenizer_fingerprint: str) -> str:
    key = hashlib.blake2b(f"{reader.fingerprint}|{tokenizer_fingerprint}".encode(), digest_size=12).hexdigest()
    return f".{key}.token-counts"


def _wait(lock: int, what: str, beat: Beat) -> None:
    """Wait until no other process of this machine counts the same."""
    deadline, is_told = time.monotonic() + WAIT_SECONDS, False
    while not wait_for_lock(lock, SILENT_SECONDS) and time.monotonic() < deadline:
        beat()
        if not is_told:
            say(f"waiting for another process that counts {what}")
            is_told = True


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
        for counted in _counted(text_batches(all_texts(reader), BATCH_CHARACTERS), encode_batch):
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

    cores, waiting, characters = usable_cores(), deque[tuple[Future[Counts], int]](), 0
    with ThreadPoolExecutor(cores) as threads:
        for texts in batches:
            size = sum(map(len, texts))
            while waiting and (len(waiting) > cores or characters + size > MOST_CHARACTERS):
                done, taken = waiting.popleft()
                characters -= taken
                yield done.result()
            waiting.append((threads.submit(count, texts), size))
            characters += size
        for done, _ in waiting:
            yield done.result()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
