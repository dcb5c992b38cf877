"""What one measured process of `z2all bench data` does on our side. The peers' are in `peers/`."""

import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import torch

from z2all_ds.base.process_memory import peak_of_process
from z2all_ds.bench.peers.measuring import half, resume, serve, speed
from z2all_ds.data.data_plan import StreamSpec
from z2all_ds.data.loader import BatchLoader
from z2all_ds.data.packing import Batch
from z2all_ds.data.stages import StageSpec
from z2all_ds.data.state import StreamState
from z2all_ds.data.stream import PackedStream
from z2all_ds.tokenizer import load_tokenizer

DOCUMENTS_PER_CALL = 64
"""Of the tokenizer alone. With 1 it is about 2 % slower; with 1000 too, where long documents come together."""


def work() -> None:
    """A job comes on stdin, figures go to stdout."""
    torch.set_num_threads(1)
    tasks = {
        "tokenizer_alone": _tokenizer_alone,
        "speed": lambda job: speed(lambda: itertools.islice(_open(job), job["batches"]), job["warm_up"]),
        "half": _half,
        "resume": _resume,
        "far_in": _far_in,
    }
    more = {"peak_memory_bytes": peak_of_process}
    serve(tasks, ["tokenizers", "torch", "numpy", "pyarrow", "orjson"], more)


def _open(job: dict[str, Any]) -> BatchLoader:
    stages = (StageSpec(job["sequence_length"], job["weights"]),)
    spec = StreamSpec(job["corpus"], stages, seed=0, num_lanes=job["num_lanes"])
    return BatchLoader(PackedStream(spec, load_tokenizer(job["tokenizer"])), job["micro_batch"], num_workers=0)


def _tokenizer_alone(job: dict[str, Any]) -> dict[str, Any]:
    """All texts are in memory; the ids come as Python lists, as every user of the tokenizer gets them."""
    import pyarrow.parquet as pq

    texts = [text for path in job["files"] for text in pq.read_table(path, columns=["content"]).column(0).to_pylist()]
    if job["mixed"]:
        random.Random(0).shuffle(texts)
    tokenizer = load_tokenizer(job["tokenizer"])
    tokens, started, cpu_before = 0, time.perf_counter(), time.process_time()
    for first in range(0, len(texts), DOCUMENTS_PER_CALL):
        tokens += sum(map(len, tokenizer.encode_batch(texts[first : first + DOCUMENTS_PER_CALL])))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    return {"tokens": tokens, "samples": 0, "open_seconds": 0.0, "seconds": seconds, "cpu_seconds": cpu_seconds}


def _half(job: dict[str, Any]) -> dict[str, Any]:
    with _open(job) as loader:
        return half(loader, lambda: dict(loader.state_dict()), job)


def _resume(job: dict[str, Any]) -> dict[str, Any]:
    def open_at(state: Any) -> Iterator[Batch]:
        loader = _open(job)
        loader.load_state_dict(state)
        return loader

    return resume(open_at, job)


def _far_in(job: dict[str, Any]) -> dict[str, Any]:
    """Opens a large corpus, goes to a part of its epoch, gives the first batch, then one sample of every lane."""
    started, cpu_before = time.perf_counter(), time.process_time()
    loader = _open(job)
    opened = time.perf_counter()
    state = _state_at(loader.stream, job["part"], job["num_tokens"])
    loader.load_state_dict(state)
    next(loader)
    first_batch, cpu_seconds = time.perf_counter(), time.process_time() - cpu_before
    for _ in range(job["num_lanes"] // job["micro_batch"]):
        next(loader)
    rounded = time.perf_counter()
    loader.close()
    return {
        "open_seconds": opened - started,
        "first_batch_seconds": first_batch - started,
        "first_batch_cpu_seconds": cpu_seconds,
        "all_lanes_seconds": rounded - started,
        "state_bytes": len(json.dumps(state)),
    }


def _state_at(stream: PackedStream, part: float, num_tokens: int) -> StreamState:
    """As if every lane had read so much of its blocks: nobody can wait for 50 GB to be read."""
    plan, lanes = stream.plan, stream.plan.spec.num_lanes
    rounds = int(part * num_tokens / (plan.spec.stages[0].sequence_length * lanes))
    blocks = [int(part * order.num_blocks / lanes) for order in plan.orders]
    return plan.state_at(rounds * lanes, {lane: [[block, 0, 0] for block in blocks] for lane in range(lanes)})
