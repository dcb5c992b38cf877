"""Hugging Face `datasets`, in the ways that were fastest here. Run by the interpreter of its own environment.

raw      `load_dataset(..., streaming=True).select_columns().shuffle().map(batched)`; the mapped function tokenizes a
         thousand documents in one call and returns the packed rows as tensors. The documented
         `.with_format("torch")` after a map that returns lists was 12 times slower. As in the well-known
         `group_texts`, what is left of a thousand documents after the last full row is dropped.
tokens   rows of packed tokens on disk as Arrow. "map": memory-mapped and read in shuffled order through a DataLoader,
         the fastest, but without a state to resume from. "stream": the same as an IterableDataset with a shuffle
         buffer, which has one. (The same rows as streamed Parquet came to a twentieth of "map".)
Labels are the inputs, which the models of that library shift themselves.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features, List, Value, load_dataset, load_from_disk
from measuring import half, resume, serve, speed  # type: ignore[import-not-found]
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, RandomSampler

DOCUMENTS_PER_CALL = 1000
SHUFFLE_BUFFER = 1000
"""The library's own default: larger ones take longer to fill."""
STREAM_SHARDS = 64


def read_raw(job: dict[str, Any], shuffle: bool) -> Any:
    options: dict[str, Any] = {"columns": [job["text_field"]]} if job["source"] == "parquet" else {}
    kind = "parquet" if job["source"] == "parquet" else "json"
    rows = load_dataset(kind, data_files=job["files"], split="train", streaming=True, **options)
    rows = rows.select_columns([job["text_field"]])
    if shuffle:
        rows = rows.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER)
    tokenizer = Tokenizer.from_file(job["tokenizer_file"])
    tokenizer.encode_special_tokens = True  # as ours: no text can forge a control token
    length, eot_id = job["sequence_length"], job["eot_id"]

    def pack(texts: list[str]) -> dict[str, Any]:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokens = np.fromiter(itertools.chain.from_iterable((*one.ids, eot_id) for one in encoded), dtype=np.int64)
        packed = torch.from_numpy(tokens[: len(tokens) // length * length].reshape(-1, length))
        return {"input_ids": packed, "labels": packed}

    return rows.map(
        pack,
        batched=True,
        batch_size=DOCUMENTS_PER_CALL,
        input_columns=job["text_field"],
        remove_columns=[job["text_field"]],
    )


def read_tokens(job: dict[str, Any], shuffle: bool) -> Any:
    rows = load_from_disk(job["folder"]).to_iterable_dataset(num_shards=STREAM_SHARDS)
    if shuffle:
        rows = rows.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER)
    return rows.with_format("numpy")


def stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    inputs = torch.from_numpy(np.stack([row["input_ids"] for row in rows]).astype(np.int64))
    return {"input_ids": inputs, "labels": inputs}


def open_stream(job: dict[str, Any]) -> tuple[Any, Any]:
    """(dataset, batches)."""
    if job["source"] == "tokens":
        dataset = read_tokens(job, job["shuffle"])
        if job["epochs"] > 1:
            dataset = dataset.repeat(job["epochs"])
        return dataset, DataLoader(dataset, batch_size=job["micro_batch"], collate_fn=stack)
    dataset = read_raw(job, job["shuffle"])
    return dataset, DataLoader(dataset, batch_size=job["micro_batch"])


def open_map(job: dict[str, Any]) -> Iterator[Any]:
    rows = load_from_disk(job["folder"]).with_format("torch")
    order = RandomSampler(rows, num_samples=len(rows) * job["epochs"])
    for batch in DataLoader(rows, batch_size=job["micro_batch"], sampler=order):
        batch["labels"] = batch["input_ids"]
        yield batch


def open_at(job: dict[str, Any], state: dict[str, Any]) -> Iterator[Any]:
    dataset, batches = open_stream(job)
    dataset.load_state_dict(state)
    return iter(batches)


def prepare(job: dict[str, Any]) -> dict[str, Any]:
    """Packed rows as the library keeps them."""
    length = job["sequence_length"]
    tokens = np.fromfile(job["tokens_file"], dtype=job["dtype"])
    rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens[: len(tokens) // length * length]), length)
    features = Features({"input_ids": List(Value(job["dtype"]), length=length)})
    table = pa.table({"input_ids": rows}, schema=features.arrow_schema)
    Dataset(table).save_to_disk(job["folder"])
    return {"samples": len(rows)}


def open_speed(job: dict[str, Any]) -> Any:
    return open_map(job) if job["source"] == "tokens_map" else open_stream(job)[1]


def read_half(job: dict[str, Any]) -> dict[str, Any]:
    dataset, batches = open_stream(job)
    found: dict[str, Any] = half(iter(batches), dataset.state_dict, job)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    tasks = {
        "prepare": prepare,
        "speed": lambda job: speed(lambda: open_speed(job)),
        "half": read_half,
        "resume": lambda job: resume(lambda state: open_at(job, state), job),
    }
    serve(tasks, ["datasets", "tokenizers", "torch", "pyarrow", "numpy"])
