"""MosaicML `streaming`, in its own format (MDS). The interpreter of its own environment runs this script.

raw      documents as strings, tokenized in `__getitem__` as its users do, then concatenated and cut.
tokens   packed rows, one token longer than a sample, as llm-foundry writes them (there without the extra token, and as
         int32; here in the narrowest integer of a fixed shape, which is less to read), through its own DataLoader.
Both are shuffled by its default algorithm. Uncompressed and on the local disk, which is its fastest variant.
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from measuring import files_in, measure_resume, measure_speed, save_at_half, serve  # type: ignore[import-not-found]
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset

# Its image module requires torchvision, which comes with another torch. Nothing here uses it.
sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # type: ignore[import-not-found]  # noqa: E402

SHUFFLE_SEED = 1
PREDOWNLOAD = 1 << 30
"""Samples to prepare in advance: all. With its default of some batches it spent most of the time sleeping, waiting for
a thread that checks whether files exist."""


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
    """Samples of `length` tokens, with an end-of-text token after each document."""

    def __init__(self, documents: TokenizedText, length: int, eot_id: int) -> None:
        self._documents, self._length, self._eot_id = documents, length, eot_id
        self._documents_read = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        waiting: list[int] = []
        for ids in self._documents:
            self._documents_read += 1
            waiting += ids
            waiting.append(self._eot_id)
            at = 0
            while len(waiting) - at >= self._length:
                sample = torch.tensor(waiting[at : at + self._length])
                at += self._length
                yield {"input_ids": sample, "labels": sample}
            del waiting[:at]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._documents.state_dict(self._documents_read, False)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._documents.load_state_dict(state)


def stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = torch.from_numpy(np.stack([row["tokens"] for row in rows]).astype(np.int64))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def open_batches(job: dict[str, Any]) -> tuple[Any, Any]:
    """Return the object that has the state, and the batches."""
    options: dict[str, Any] = {"local": job["folder"], "shuffle": job["shuffle"], "shuffle_seed": SHUFFLE_SEED}
    options["predownload"] = PREDOWNLOAD
    if job["source"] == "tokens":
        size = job["samples"] * job["epochs"]
        rows = StreamingDataset(**options, batch_size=job["micro_batch"], epoch_size=size)
        loader = StreamingDataLoader(rows, batch_size=job["micro_batch"], collate_fn=stack)
        return loader, loader
    tokenizer = Tokenizer.from_file(f"{job['tokenizer']}/tokenizer.json")
    tokenizer.encode_special_tokens = True  # as ours: text cannot produce a control token
    # One document at a time: with a larger batch size the last incomplete batch would be repeated or dropped.
    documents = TokenizedText(tokenizer, **options, batch_size=1)
    samples = Concatenated(documents, job["sequence_length"], job["eot_id"])
    return samples, DataLoader(samples, batch_size=job["micro_batch"])


def prepare(job: dict[str, Any]) -> dict[str, Any]:
    """Write the documents, or packed tokens, in the library's own format."""
    return {"samples": write_tokens(job) if job["source"] == "tokens" else write_documents(job)}


def write_documents(job: dict[str, Any]) -> int:
    import pyarrow.parquet as pq

    documents = 0
    with MDSWriter(out=job["folder"], columns={"text": "str"}) as writer:
        for path in files_in(job["parquet"], "parquet"):
            for batch in pq.ParquetFile(path).iter_batches(columns=["content"]):
                for text in batch.column(0).to_pylist():
                    writer.write({"text": text})
                    documents += 1
    return documents


def write_tokens(job: dict[str, Any]) -> int:
    length = job["sequence_length"]
    tokens = np.fromfile(job["tokens_file"], dtype=job["dtype"])
    samples = (len(tokens) - 1) // length
    with MDSWriter(out=job["folder"], columns={"tokens": f"ndarray:{job['dtype']}:{length + 1}"}) as writer:
        for number in range(samples):
            writer.write({"tokens": tokens[number * length : (number + 1) * length + 1]})
    return samples


def half(job: dict[str, Any]) -> Any:
    source, batches = open_batches(job)
    return save_at_half(iter(batches), source.state_dict, job)


def resume(job: dict[str, Any]) -> Any:
    def open_at(state: dict[str, Any]) -> Iterator[Any]:
        source, batches = open_batches(job)
        source.load_state_dict(state)
        return iter(batches)

    return measure_resume(open_at, job)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tasks = {"prepare": prepare, "speed": lambda job: measure_speed(open_batches(job)[1]), "half": half}
    serve({**tasks, "resume": resume}, ["mosaicml-streaming", "tokenizers", "torch", "numpy"])
