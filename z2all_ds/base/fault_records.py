"""What a rank that fails leaves in RUN/logs/faults, so that whoever looks after the run can name the first one.

When one rank fails, the others fail with it, each with words of its own; theirs are echoes. A rank that was killed or
hangs cannot write; its node's watchdog does (`cluster/launch/watchdog.py`).
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
"""time.time() of the last step before the fault that this launch is to cure."""


@dataclass(frozen=True)
class Fault:
    """The end of one rank."""

    kind: str
    """One of the above, or the name of an error's family: config, data, machine ..."""
    rank: int
    host: str
    line: str
    """Its own words, one line."""
    code: int
    """Exit code of a command that ends with it."""
    weight: int = 0
    """Among equals: who stands still in its own right weighs more than those that wait for it, and who an error that
    all ranks raise is about more than the others."""
    time_unix: float = field(default_factory=time.time)


def family_of(error: Z2allError) -> str:
    """`DataError` -> `data`; of what has its own class below the family's, the family. A disk is part of a machine."""
    if isinstance(error, NotSaved):
        return family_of(MachineError("", "", ""))
    names = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Z2allError)]
    return names[-2].removesuffix("Error").lower() if len(names) > 1 else BUG


def write_fault(folder: RunFolder, fault: Fault) -> None:
    """Once per rank: what comes first is the reason. Nothing here may hide the error itself."""
    path = _path(folder, fault.rank)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            temporary = path.with_suffix(".part")
            temporary.write_text(json.dumps(asdict(fault), ensure_ascii=False), encoding="utf-8")
            temporary.replace(path)


def forget_fault(folder: RunFolder, rank: int) -> None:
    """One of an earlier launch."""
    with suppress(OSError):
        _path(folder, rank).unlink(missing_ok=True)


def has_fault(folder: RunFolder, rank: int) -> bool:
    return _path(folder, rank).exists()


def forget_faults(folder: RunFolder) -> None:
    """Before a launch."""
    for left in (folder.faults, folder.flights):
        shutil.rmtree(left, ignore_errors=True)


def read_faults(folder: RunFolder) -> list[Fault]:
    return [_read(path) for path in sorted(folder.faults.glob("rank_*.json"))]


def _path(folder: RunFolder, rank: int) -> Path:
    return folder.faults / f"rank_{rank:04d}.json"


def _read(path: Path) -> Fault:
    return Fault(**json.loads(path.read_text(encoding="utf-8")))


def first_fault(faults: Iterable[Fault]) -> Fault | None:
    """The one the others follow from: its own error, a lost node, a kill, a hang, an echo, in that order; then by time.

    Clocks of nodes may differ by more than ranks take to follow each other, so time decides only between equals.
    """

    def order(fault: Fault) -> tuple[int, int, float]:
        standing = {NODE_LOST: 1, KILLED: 2, HANG: 3, LOST_PEER: 4}.get(fault.kind, 0)
        return standing, -fault.weight, fault.time_unix

    return min(faults, key=order, default=None)
