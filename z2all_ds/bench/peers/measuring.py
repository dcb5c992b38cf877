"""What every measured process does alike, ours and the peers': a job on stdin, one core, clocks, figures on stdout.

Standard library only, as each runs in an environment of its own. Scripts import it from the folder they lie in.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

Batch = Any
"""A mapping from names of columns to int64 tensors [samples, tokens]."""

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""For the environment of a measured process: libraries look at it when they are loaded."""


def begin() -> dict[str, Any]:
    """The job. From here on the process has one core to itself, all of its threads included."""
    job: dict[str, Any] = json.load(sys.stdin)
    os.sched_setaffinity(0, {job["core"]})
    return job


def tell(figures: dict[str, Any], packages: list[str]) -> None:
    """Figures are the last line of stdout; libraries may have talked before."""
    found = {**figures, "packages": {name: version(name) for name in packages}}
    print("\n" + json.dumps(found), flush=True)


def speed(open_batches: Callable[[], Iterable[Batch]], warm_up: int = 0) -> dict[str, Any]:
    """All batches that come after the first `warm_up`. Opening is timed by itself."""
    started = time.perf_counter()
    batches = iter(open_batches())
    open_seconds = time.perf_counter() - started
    for _ in range(warm_up):
        next(batches)
    started, cpu_before = time.perf_counter(), time.process_time()
    tokens = samples = 0
    for batch in batches:
        samples += len(batch["input_ids"])
        tokens += batch["input_ids"].numel()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    return {
        "tokens": tokens,
        "samples": samples,
        "open_seconds": open_seconds,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def half(batches: Iterator[Batch], count: int, state: Callable[[], dict[str, Any]], state_file: str) -> dict[str, Any]:
    """Reads `count` batches, writes the state, and looks at the batch that a resume would have to give."""
    for _ in range(count):
        next(batches)
    text = json.dumps(state())
    Path(state_file).write_text(text)
    return {"state_bytes": len(text), "next_batch": fingerprint(next(batches))}


def resume(open_at: Callable[[dict[str, Any]], Iterator[Batch]], state_file: str) -> dict[str, Any]:
    """Seconds from here, where all imports are done, to the first batch."""
    started, cpu_before = time.perf_counter(), time.process_time()
    batch = next(open_at(json.loads(Path(state_file).read_text())))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "next_batch": fingerprint(batch)}


def content(batches: Iterable[Batch]) -> dict[str, Any]:
    """For proving what the batches hold: a hash over all inputs in order, and how often each token comes."""
    digest, tokens = hashlib.sha256(), 0
    counts: dict[int, int] = {}
    for batch in batches:
        inputs = batch["input_ids"]
        digest.update(inputs.numpy().tobytes())
        tokens += inputs.numel()
        values, times = inputs.unique(return_counts=True)
        for value, number in zip(values.tolist(), times.tolist(), strict=True):
            counts[value] = counts.get(value, 0) + number
    histogram = hashlib.sha256(json.dumps(sorted(counts.items())).encode()).hexdigest()
    return {"tokens": tokens, "in_order": digest.hexdigest(), "counts": histogram}


def fingerprint(batch: Batch) -> str:
    return hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()
