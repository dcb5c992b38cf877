"""The common part of all measured processes of `z2all bench data`: a job on stdin, one core, figures on stdout.

It uses only the standard library, as the peers run in an environment of their own, where scripts import it from their
folder. A batch is a mapping from column names to int64 tensors [samples, tokens].
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
Figures = dict[str, Any]

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of a measured process; libraries read it when they are loaded."""


def serve(tasks: Mapping[str, Callable[[Job], Figures]], packages: Sequence[str]) -> None:
    """Run the task of the job on stdin on one core, and print its figures as the last line of stdout."""
    job: Job = json.load(sys.stdin)
    os.sched_setaffinity(0, {job["core"]})
    figures = tasks[job["task"]](job)
    print("\n" + json.dumps({**figures, "packages": {name: version(name) for name in packages}}), flush=True)


def measure_speed(batches: Iterable[Any], warm_up: int = 0) -> Figures:
    """Read all batches and time those after the first `warm_up`."""
    batches = iter(batches)
    for _ in range(warm_up):
        next(batches)
    started, cpu_before, tokens = time.perf_counter(), time.process_time(), 0
    for batch in batches:
        tokens += batch["input_ids"].numel()
    return {
        "tokens": tokens,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_before,
    }


def save_at_half(batches: Iterator[Any], state: Callable[[], Mapping[str, object]], job: Job) -> Figures:
    """Read half an epoch, write the state, and fingerprint the batch that must come after a resume."""
    for _ in range(batches_in(job, 0.5)):
        next(batches)
    text = json.dumps(dict(state()))
    Path(job["state_file"]).write_text(text)
    return {"state_bytes": len(text), "next_batch": fingerprint(next(batches))}


def measure_resume(open_at: Callable[[Any], Iterator[Any]], job: Job) -> Figures:
    """Measure the seconds from loading the state to the first batch; all imports are done before."""
    started = time.perf_counter()
    batch = next(open_at(json.loads(Path(job["state_file"]).read_text())))
    return {"seconds": time.perf_counter() - started, "next_batch": fingerprint(batch)}


def fingerprint(batch: Any) -> str:
    """Return a hash of the tokens of a batch."""
    return hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()


def batches_in(job: Job, epochs: float) -> int:
    """Return the number of whole batches in this many epochs."""
    return int(epochs * job["num_tokens"]) // (job["micro_batch"] * job["sequence_length"])


def files_in(folder: str, ending: str) -> list[str]:
    """Return the paths of all files with this ending, in order."""
    return sorted(map(str, Path(folder).glob(f"*.{ending}")))
