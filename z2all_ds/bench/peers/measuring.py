"""What every measured process does alike, ours and the peers': a job on stdin, one core, clocks, figures on stdout.

Standard library only, as each runs in an environment of its own. Scripts import it from the folder they lie in.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Takers = Mapping[str, Callable[[], Any]]
Batch = Any
"""A mapping from names of columns to int64 tensors [samples, tokens]."""

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""For the environment of a measured process: libraries look at it when they are loaded."""


def serve(
    tasks: Mapping[str, Callable[[Job], Job]],
    packages: Sequence[str],
    more: Mapping[str, Callable[[], Any]] | None = None,
) -> None:
    """Runs the task of the job on stdin, with one core for all threads of this process, and prints its figures.

    `more` are figures to take afterwards. All are the last line of stdout; libraries may have talked before.
    """
    job: Job = json.load(sys.stdin)
    os.sched_setaffinity(0, {job["core"]})
    figures = tasks[job["task"]](job)
    figures |= {name: take() for name, take in (more or {}).items()}
    print("\n" + json.dumps({**figures, "packages": {name: version(name) for name in packages}}), flush=True)


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
    times = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_before}
    return {"tokens": tokens, "samples": samples, "open_seconds": open_seconds, **times}


def half(batches: Iterator[Batch], state: Callable[[], Job], job: Job) -> dict[str, Any]:
    """Reads the job's batches, writes the state, and looks at the batch that a resume would have to give."""
    for _ in range(job["batches"]):
        next(batches)
    text = json.dumps(state())
    Path(job["state_file"]).write_text(text)
    return {"state_bytes": len(text), "next_batch": fingerprint(next(batches))}


def resume(open_at: Callable[[Job], Iterator[Batch]], job: Job) -> dict[str, Any]:
    """Returns the seconds from here, where all imports are done, to the first batch."""
    started, cpu_before = time.perf_counter(), time.process_time()
    batch = next(open_at(json.loads(Path(job["state_file"]).read_text())))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "next_batch": fingerprint(batch)}


def fingerprint(batch: Batch) -> str:
    return hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()
