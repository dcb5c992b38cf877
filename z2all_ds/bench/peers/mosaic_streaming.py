"""MosaicML `streaming`, in its own format (MDS). Run by the interpreter of its own environment.

raw      documents as strings, tokenized in `__getitem__` as its users do, then laid end to end and cut.
tokens   packed rows, one token longer than a sample, as llm-foundry writes them (there without the extra token, and as
         int32; here in the narrowest integer of a fixed shape, which is less to read), through its own DataLoader.
Both are shuffled by its default algorithm. Uncompressed and on the local disk, which is its fastest.
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from measuring import half, resume, serve, speed  # type: ignore[import-not-found]
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset

# Its part for images wants torchvision, which comes with another torch. Nothing here uses it.
sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found]  # noqa: E402

SHUFFLE_SEED = 1
PREDOWNLOAD = 1 << 30
"""Samples to prepare ahead: all. With its default of some batches it slept for most of the time, waiting for a thread
that looks whether files are there."""


class TokenizedText(StreamingDataset):
    """Documents as tokens."""

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        super().__init__(**options)
        self._tokenizer = tokenizer

    def __getitem__(self, at: Any) -> list[int]:
        text = super().__getitem__(at)["text"]
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


class Concatenated(IterableDataset[dict[str, torch.Tensor]]):
    """Samples of `length` tokens, an end-of-text after each document."""

    def __init__(self, documents: TokenizedText, length: int, eot_id: int) -> None:
        self.documents, self._length, self._eot_id = documents, length, eot_id
        self.documents_read = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        waiting: list[int] = []
        for ids in self.documents:
            self.documents_read += 1
            waiting += ids
            waiting.append(self._eot_id)
            at = 0
            while len(waiting) - at >= self._length:
                sample = torch.tensor(waiting[at : at + self._length])
                at += self._length
                yield {"input_ids": sample, "labels": sample}
            del waiting[:at]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.documents.state_dict(self.documents_read, False)
        return state


def stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = torch.from_numpy(np.stack([row["tokens"] for row in rows]).astype(np.int64))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def open_batches(job: dict[str, Any]) -> tuple[Any, Any]:
    """(what has the state, batches)."""
    options: dict[str, Any] = {"local": job["folder"], "shuffle": job["shuffle"], "shuffle_seed": SHUFFLE_SEED}
    options["predownload"] = PREDOWNLOAD
    if job["source"] == "tokens":
        size = job["samples"] * job["epochs"]
        rows = StreamingDataset(**options, batch_size=job["micro_batch"], epoch_size=size)
        loader = StreamingDataLoader(rows, batch_size=job["micro_batch"], collate_fn=stack)
        return loader, loader
    tokenizer = Tokenizer.from_file(job["tokenizer_file"])
    tokenizer.encode_special_tokens = True  # as ours: no text can forge a control token
    # Documents are dealt out one by one: with a batch size the last incomplete batch would be repeated or dropped.
    documents = TokenizedText(tokenizer, **options, batch_size=1)
    samples = Concatenated(documents, job["sequence_length"], job["eot_id"])
    return samples, DataLoader(samples, batch_size=job["micro_batch"])


def open_at(job: dict[str, Any], state: dict[str, Any]) -> Iterator[Any]:
    source, batches = open_batches(job)
    (source if job["source"] == "tokens" else source.documents).load_state_dict(state)
    return iter(batches)


def prepare(job: dict[str, Any]) -> dict[str, Any]:
    if job["source"] == "tokens":
        return prepare_tokens(job)
    import pyarrow.parquet as pq

    documents = 0
    with MDSWriter(out=job["folder"], columns={"text": "str"}) as writer:
        for path in job["files"]:
            for batch in pq.ParquetFile(path).iter_batches(columns=[job["text_field"]]):
                for text in batch.column(0).to_pylist():
                    writer.write({"text": text})
                    documents += 1
    return {"samples": documents}


def prepare_tokens(job: dict[str, Any]) -> dict[str, Any]:
    length = job["sequence_length"]
    tokens = np.fromfile(job["tokens_file"], dtype=job["dtype"])
    samples = (len(tokens) - 1) // length
    with MDSWriter(out=job["folder"], columns={"tokens": f"ndarray:{job['dtype']}:{length + 1}"}) as writer:
        for number in range(samples):
            writer.write({"tokens": tokens[number * length : (number + 1) * length + 1]})
    return {"samples": samples}


def read_half(job: dict[str, Any]) -> dict[str, Any]:
    source, batches = open_batches(job)
    found: dict[str, Any] = half(iter(batches), source.state_dict, job)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    tasks = {
        "prepare": prepare,
        "speed": lambda job: speed(lambda: open_batches(job)[1]),
        "half": read_half,
        "resume": lambda job: resume(lambda state: open_at(job, state), job),
    }
    serve(tasks, ["mosaicml-streaming", "tokenizers", "torch", "numpy"])
