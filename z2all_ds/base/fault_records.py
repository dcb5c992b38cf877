"""Records that failing ranks write to RUN/logs/faults, from which the first failure can be identified.

When one rank fails, the others fail as a consequence with messages of their own. A rank that was killed or hangs cannot
write a record; the watchdog of its node does (`cluster/launch/watchdog.py`).
"""

import json
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from z2all_ds.base.errors import MachineError, NotSaved, Z2allError
from z2all_ds.base.run_folder import RunFolder

KILLED, HANG, OUT_OF_MEMORY, LOST_PEER, BUG = "killed", "hang", "out_of_memory", "lost_peer", "bug"
NODE_LOST = "node_lost"
FAULT_VARIABLE = "Z2ALL_FAULT_AT"
"""time.time() of the last step before the fault that this launch recovers from."""


@dataclass(frozen=True)
class Fault:
    """The failure of one rank."""

    kind: str
    """One of the constants above, or the name of an error class without `Error`: config, data, machine ..."""
    rank: int
    host: str
    line: str
    """The error message, one line."""
    code: int
    """Exit code of a command that ends with this fault."""
    weight: int = 0
    """Tie-breaker between faults of the same kind: higher for a rank that is stuck itself than for ranks waiting for
    it, and for the rank that an error raised on all ranks is about."""
    time_unix: float = field(default_factory=time.time)


def family_of(error: Z2allError) -> str:
    """Return the base class's name: `DataError` -> `data`, also for subclasses. A disk error counts as `machine`."""
    if isinstance(error, NotSaved):
        return family_of(MachineError("", "", ""))
    names = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Z2allError)]
    return names[-2].removesuffix("Error").lower() if len(names) > 1 else BUG


def write_fault(folder: RunFolder, fault: Fault) -> None:
    """Write the record of a rank unless it has one: the first is the cause. Must not hide the error itself."""
    path = _path(folder, fault.rank)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            temporary = path.with_suffix(".part")
            temporary.write_text(json.dumps(asdict(fault), ensure_ascii=False), encoding="utf-8")
            temporary.replace(path)


def forget_fault(folder: RunFolder, rank: int) -> None:
    """Delete the record of a rank from an earlier launch."""
    with suppress(OSError):
        _path(folder, rank).unlink(missing_ok=True)


def has_fault(folder: RunFolder, rank: int) -> bool:
    return _path(folder, rank).exists()


def forget_faults(folder: RunFolder) -> None:
    """Delete all records before a launch."""
    for left in (folder.faults, folder.flights):
        shutil.rmtree(left, ignore_errors=True)


def read_faults(folder: RunFolder) -> list[Fault]:
    return [_read(path) for path in sorted(folder.faults.glob("rank_*.json"))]


def _path(folder: RunFolder, rank: int) -> Path:
    return folder.faults / f"rank_{rank:04d}.json"


def _read(path: Path) -> Fault:
    return Fault(**json.loads(path.read_text(encoding="utf-8")))


def first_fault(faults: Iterable[Fault]) -> Fault | None:
    """Return the root cause, ordered by kind (own error, lost node, kill, hang, lost peer), then by time.

    Clocks of nodes may differ by more than the delay between failures, so time only breaks ties.
    """

    def order(fault: Fault) -> tuple[int, int, float]:
        standing = {NODE_LOST: 1, KILLED: 2, HANG: 3, LOST_PEER: 4}.get(fault.kind, 0)
        return standing, -fault.weight, fault.time_unix

    return min(faults, key=order, default=None)
