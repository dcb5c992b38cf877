"""One measured process of `z2all bench data` with our loader: `python -m z2all_ds.bench.data.process`."""

import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import torch

from z2all_ds.base.process_memory import peak_of_process
from z2all_ds.bench.peers import measuring
from z2all_ds.bench.peers.measuring import Figures, Job, batches_in
from z2all_ds.data.data_plan import StreamSpec
from z2all_ds.data.even_order import EvenOrder
from z2all_ds.data.loader import BatchLoader
from z2all_ds.data.order import DomainOrder
from z2all_ds.data.packing import Batch
from z2all_ds.data.stages import StageSpec
from z2all_ds.data.state import StreamState
from z2all_ds.data.stream import PackedStream
from z2all_ds.tokenizer import load_tokenizer

DOCUMENTS_PER_CALL = 64
"""Batch size of the tokenizer. With 1 it is about 2 % slower, and with 1000 too, if long documents come together."""
WARM_UP_EPOCHS = 0.1


def open_loader(job: Job) -> BatchLoader:
    stages = (StageSpec(job["sequence_length"], job["weights"]),)
    spec = StreamSpec(job["folder"], stages, seed=0, num_lanes=job["num_lanes"])
    return BatchLoader(PackedStream(spec, load_tokenizer(job["tokenizer"])), job["micro_batch"], num_workers=0)


def tokenizer_only(job: Job) -> Figures:
    """Time the tokenizer on texts in memory; the ids are Python lists, as for every user of the tokenizer."""
    import pyarrow.parquet as pq

    tables = (pq.read_table(path, columns=["content"]) for path in measuring.files_in(job["folder"], "parquet"))
    texts = [text for table in tables for text in table.column(0).to_pylist()]
    if job["mixed"]:
        random.Random(0).shuffle(texts)
    tokenizer = load_tokenizer(job["tokenizer"])
    tokens, started, cpu_before = 0, time.perf_counter(), time.process_time()
    for first in range(0, len(texts), DOCUMENTS_PER_CALL):
        tokens += sum(map(len, tokenizer.encode_batch(texts[first : first + DOCUMENTS_PER_CALL])))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu_seconds}


def speed(job: Job) -> Figures:
    warm_up = batches_in(job, WARM_UP_EPOCHS)
    batches = itertools.islice(open_loader(job), warm_up + batches_in(job, job["epochs"]))
    return measuring.measure_speed(batches, warm_up)


def half(job: Job) -> Figures:
    with open_loader(job) as loader:
        return measuring.save_at_half(loader, loader.state_dict, job)


def resume(job: Job) -> Figures:
    def open_at(state: Any) -> Iterator[Batch]:
        loader = open_loader(job)
        loader.load_state_dict(state)
        return loader

    return measuring.measure_resume(open_at, job)


def scale(job: Job) -> Figures:
    """Open a large corpus at a part of its epoch, read the first batch, then one sample of every lane."""
    started = time.perf_counter()
    with open_loader(job) as loader:
        state = _state_at(loader.stream, job["part"], job["num_tokens"])
        loader.load_state_dict(state)
        next(loader)
        first_batch = time.perf_counter()
        for _ in range(job["num_lanes"] // job["micro_batch"]):
            next(loader)
        all_lanes = time.perf_counter()
    return {
        "first_batch_seconds": first_batch - started,
        "all_lanes_seconds": all_lanes - started,
        "state_bytes": len(json.dumps(state)),
        "peak_memory_bytes": peak_of_process(),
    }


def _state_at(stream: PackedStream, part: float, num_tokens: int) -> StreamState:
    """Return the state after a part of the epoch, computed instead of read: reading 50 GB would take too long."""
    plan, lanes = stream.plan, stream.plan.spec.num_lanes
    rounds = int(part * num_tokens / (plan.spec.stages[0].sequence_length * lanes))

    def cursor(order: DomainOrder, lane: int) -> list[int]:
        first = lane if isinstance(order, EvenOrder) else 0  # blocks are numbered through all lanes, or in each lane
        return [int((first + part) * order.num_blocks / lanes), 0, 0]

    cursors = {lane: [cursor(order, lane) for order in plan.orders] for lane in range(lanes)}
    return plan.state_at(rounds * lanes, cursors)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tasks = {"tokenizer_only": tokenizer_only, "speed": speed, "half": half, "resume": resume, "scale": scale}
    measuring.serve(tasks, ["tokenizers", "torch", "numpy", "pyarrow", "orjson"])
