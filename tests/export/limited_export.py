"""A script that exports a checkpoint under a memory limit, or reads all its weights at once under the same limit.

    limited_export.py stream|all_at_once RUN BYTES    BYTES: allowed in addition to Python and its libraries

The limit is RLIMIT_DATA. It counts all private writable memory, which includes the allocations of every library, and
the kernel refuses allocations beyond it. RLIMIT_AS would also count code and reserved addresses, RLIMIT_RSS has no
effect on Linux, and a control group needs privileges that a test does not have. Child processes inherit the limit.
"""

import json
import resource
import sys
from pathlib import Path

import torch

from tests.helpers.checkpoints import read_whole
from z2all_ds.checkpoint.layout import Checkpoint
from z2all_ds.export import model_card, shards  # noqa: F401 - all that an export imports is part of the baseline
from z2all_ds.export.to_hf import export_checkpoint, pick_checkpoint
from z2all_ds.export.weights import WeightReader
from z2all_ds.model import Z2allConfig  # noqa: F401


def now(name: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def read_all(checkpoint: Checkpoint) -> None:
    """Read all weights into memory; print the number of bytes read so far after each weight.

    Uses the same plain reads as an export; memory-mapped files would count in full.
    """
    reader, kept = WeightReader(checkpoint.path), []
    for name in reader.shapes:
        kept.append(read_whole(reader, name))
        print(sum(tensor.nbytes for tensor in kept), flush=True)


def main() -> None:
    mode, run, allowed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.randn(64, 64) @ torch.randn(64, 64)  # starts the threads
    resident, limit = now("VmRSS"), now("VmData") + allowed
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if mode == "all_at_once":
        read_all(pick_checkpoint(run)[1])
        return
    report = export_checkpoint(run, dtype="bf16", max_shard_size="16MB")
    figures = {
        "baseline_resident_bytes": resident,
        "peak_resident_bytes": now("VmHWM"),
        "peak_of_the_check_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "reported_peak_bytes": report.peak_memory_bytes,
        "how": report.verdict.how,
        "difference": report.verdict.max_relative_difference,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
