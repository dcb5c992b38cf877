"""The number of tokens of each document of a raw domain: counted once per tokenizer, and stored in the corpus folder.

The name of the file is a hash of the domain's content and of the tokenizer, so it never belongs to another text. If it
cannot be written, every process counts for itself.
"""

import hashlib
from collections.abc import Callable
from contextlib import nullcontext, suppress

import numpy as np
import numpy.typing as npt

from z2all_ds.base.console import progress
from z2all_ds.base.storage import Folder
from z2all_ds.corpus.reading.readers import DomainReader
from z2all_ds.tokenizer.sampling import all_texts, text_batches

EncodeBatch = Callable[[list[str]], list[list[int]]]
Counts = npt.NDArray[np.uint32]

SHOW_PROGRESS_ABOVE_BYTES = 8 << 20
_DTYPE = np.dtype("<u4")
_DIGEST_BYTES = 16


def token_counts(reader: DomainReader, encode_batch: EncodeBatch, tokenizer_fingerprint: str) -> Counts:
    """Return the tokens of each document, with its <|endoftext|>."""
    folder, name = reader.folder, counts_name(reader, tokenizer_fingerprint)
    stored = _load(folder, name, reader.num_documents)
    if stored is not None:
        return stored
    counts = _count(reader, encode_batch)
    reader.check_content()  # counts of another text must not be stored
    data = counts.tobytes()
    with suppress(OSError):
        folder.write_whole(name, data + _digest(data))
    return counts


def counts_name(reader: DomainReader, tokenizer_fingerprint: str) -> str:
    key = hashlib.blake2b(f"{reader.fingerprint}|{tokenizer_fingerprint}".encode(), digest_size=12).hexdigest()
    return f".{key}.token-counts"


def _load(folder: Folder, name: str, num_documents: int) -> Counts | None:
    """Return the stored counts; None if they are missing or damaged."""
    try:
        content = folder.read(name)
    except OSError:
        return None
    data, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if len(data) != num_documents * _DTYPE.itemsize or digest != _digest(data):
        return None
    return np.frombuffer(data, _DTYPE)


def _count(reader: DomainReader, encode_batch: EncodeBatch) -> Counts:
    counts = list[int]()
    is_large = reader.num_bytes > SHOW_PROGRESS_ABOVE_BYTES
    shown = progress(f"counting tokens of {reader.name}", reader.num_documents, "documents")
    with shown if is_large else nullcontext() as advance:
        for texts in text_batches(all_texts(reader)):
            counts += [len(ids) + 1 for ids in encode_batch(texts)]
            if advance:
                advance(len(texts))
    return np.array(counts, _DTYPE)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
