"""Hugging Face `datasets`, in its fastest variants. The interpreter of its own environment runs this script.

raw      `load_dataset(..., streaming=True).select_columns().shuffle().map(batched)`; the mapped function tokenizes a
         thousand documents in one call and returns the packed rows as tensors. The documented
         `.with_format("torch")` after a map that returns lists was 12 times slower. As in the well-known
         `group_texts`, the tokens of a thousand documents after the last full row are dropped.
tokens   rows of packed tokens on disk as Arrow. `open_map`: memory-mapped and read in shuffled order through a
         DataLoader, the fastest, but without a state to resume from. `open_stream`: the same as an IterableDataset with
         a shuffle buffer, which has one. (The same rows as streamed Parquet had a twentieth of the speed of the first.)
Labels are the inputs, which the models of that library shift themselves.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features, List, Value, load_dataset, load_from_disk
from measuring import files_in, measure_resume, measure_speed, save_at_half, serve  # type: ignore[import-not-found]
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, RandomSampler

TEXT = "content"
DOCUMENTS_PER_CALL = 1000
SHUFFLE_BUFFER = 1000
"""The library's default: larger buffers take longer to fill."""
STREAM_SHARDS = 64


def read_raw(job: dict[str, Any]) -> Any:
    is_parquet = job["source"] == "parquet"
    options: dict[str, Any] = {"columns": [TEXT]} if is_parquet else {}
    files = files_in(job["folder"], job["source"])
    rows = load_dataset("parquet" if is_parquet else "json", data_files=files, split="train", streaming=True, **options)
    rows = rows.select_columns([TEXT])
    if job["shuffle"]:
        rows = rows.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER)
    tokenizer = Tokenizer.from_file(f"{job['tokenizer']}/tokenizer.json")
    tokenizer.encode_special_tokens = True  # as ours: text cannot produce a control token
    length, eot_id = job["sequence_length"], job["eot_id"]

    def pack(texts: list[str]) -> dict[str, Any]:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokens = np.fromiter(itertools.chain.from_iterable((*one.ids, eot_id) for one in encoded), dtype=np.int64)
        packed = torch.from_numpy(tokens[: len(tokens) // length * length].reshape(-1, length))
        return {"input_ids": packed, "labels": packed}

    return rows.map(pack, batched=True, batch_size=DOCUMENTS_PER_CALL, input_columns=TEXT, remove_columns=[TEXT])


def read_tokens(job: dict[str, Any]) -> Any:
    rows = load_from_disk(job["folder"]).to_iterable_dataset(num_shards=STREAM_SHARDS)
    if job["shuffle"]:
        rows = rows.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER)
    rows = rows.with_format("numpy")
    return rows.repeat(job["epochs"]) if job["epochs"] > 1 else rows


def stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    inputs = torch.from_numpy(np.stack([row["input_ids"] for row in rows]).astype(np.int64))
    return {"input_ids": inputs, "labels": inputs}


def open_stream(job: dict[str, Any]) -> tuple[Any, Any]:
    """Return the dataset and its batches."""
    if job["source"] == "tokens":
        dataset = read_tokens(job)
        return dataset, DataLoader(dataset, batch_size=job["micro_batch"], collate_fn=stack)
    dataset = read_raw(job)
    return dataset, DataLoader(dataset, batch_size=job["micro_batch"])


def open_map(job: dict[str, Any]) -> Iterator[Any]:
    rows = load_from_disk(job["folder"]).with_format("torch")
    order = RandomSampler(rows, num_samples=len(rows) * job["epochs"])
    for batch in DataLoader(rows, batch_size=job["micro_batch"], sampler=order):
        batch["labels"] = batch["input_ids"]
        yield batch


def prepare(job: dict[str, Any]) -> dict[str, Any]:
    """Write packed rows in the library's own format."""
    length = job["sequence_length"]
    tokens = np.fromfile(job["tokens_file"], dtype=job["dtype"])
    rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens[: len(tokens) // length * length]), length)
    features = Features({"input_ids": List(Value(job["dtype"]), length=length)})
    table = pa.table({"input_ids": rows}, schema=features.arrow_schema)
    Dataset(table).save_to_disk(job["folder"])
    return {"samples": len(rows)}


def half(job: dict[str, Any]) -> Any:
    dataset, batches = open_stream(job)
    return save_at_half(iter(batches), dataset.state_dict, job)


def resume(job: dict[str, Any]) -> Any:
    def open_at(state: dict[str, Any]) -> Iterator[Any]:
        dataset, batches = open_stream(job)
        dataset.load_state_dict(state)
        return iter(batches)

    return measure_resume(open_at, job)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    tasks = {
        "prepare": prepare,
        "speed": lambda job: measure_speed(open_stream(job)[1]),
        "map_speed": lambda job: measure_speed(open_map(job)),
        "half": half,
        "resume": resume,
    }
    serve(tasks, ["datasets", "tokenizers", "torch", "pyarrow", "numpy"])
