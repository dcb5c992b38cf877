"""Records that failing ranks write to RUN/logs/faults, from which the first failure can be identified.

When one rank fails, the others fail as a consequence with messages of their own. A rank that was killed or hangs cannot
write a record; the watchdog of its node does (`cluster/launch/watchdog.py`).

Another start in the same folder may be refused while a run trains there. So a launcher names its launch, its ranks
inherit the name, and all functions but `forget_faults` concern the records of the own launch only. Without a launcher
of ours there is no name.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from z2all_ds.base.atomic import open_new
from z2all_ds.base.errors import MachineError, NotSaved, Z2allError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.storage.open_files import read_regular

KILLED, HANG, OUT_OF_MEMORY, LOST_PEER, BUG = "killed", "hang", "out_of_memory", "lost_peer", "bug"
NODE_LOST = "node_lost"
FAULT_VARIABLE = "Z2ALL_FAULT_AT"
"""time.time() of the last step before the fault that this launch recovers from."""
START_DIFFERENCE_SECONDS = 20.0
"""Between the first and the last rank of a start; older faults are of earlier starts."""
LAUNCH_VARIABLE = "Z2ALL_LAUNCH"
"""Name of the launch, for its ranks and watchdogs."""
LAUNCHES: list[str] = []
"""Names of all launches of this process."""


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


OUR_NAMES = re.compile(r"rank_\d+(_[0-9a-f]+)?(\.json|\.part)?", re.ASCII)
"""Names of fault records and of NCCL's flight records."""


def name_launch() -> str:
    """Return a new name for the launch of this process, which its children inherit."""
    name = os.environ[LAUNCH_VARIABLE] = secrets.token_hex(8)
    LAUNCHES.append(name)
    return name


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
            with open_new(temporary) as file:
                file.write(json.dumps(asdict(fault), ensure_ascii=False).encode())
            temporary.replace(path)


def forget_fault(folder: RunFolder, rank: int) -> None:
    """Delete the record of a rank, for example from an earlier start without a launcher."""
    with suppress(OSError):
        _path(folder, rank).unlink(missing_ok=True)


def has_fault(folder: RunFolder, rank: int) -> bool:
    return _path(folder, rank).exists()


def forget_faults(folder: RunFolder) -> None:
    """Delete the records of all launches, before a launch."""
    for left in (folder.faults, folder.flights):
        if left.is_symlink():
            continue
        for path in left.iterdir() if left.is_dir() else ():
            if OUR_NAMES.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()


def read_faults(folder: RunFolder) -> list[Fault]:
    ours = re.compile(rf"rank_\d+{re.escape(_suffix())}", re.ASCII)
    found = [_read(path) for path in sorted(folder.faults.glob("rank_*")) if ours.fullmatch(path.name)]
    return [fault for fault in found if fault is not None]


def _path(folder: RunFolder, rank: int) -> Path:
    return folder.faults / f"rank_{rank:04d}{_suffix()}"


def _suffix() -> str:
    launch = os.environ.get(LAUNCH_VARIABLE)
    return f"_{launch}.json" if launch else ".json"


def _read(path: Path) -> Fault | None:
    """Return a record, None if it is damaged: that must not hide the fault of the others."""
    with suppress(OSError, ValueError, TypeError):
        fault = Fault(**load_json(read_regular(path)))
        return fault if isinstance(fault.line, str) and isinstance(fault.time_unix, float) else None
    return None


def cause_since(folder: RunFolder, began_unix: float) -> Fault | None:
    """Return the root cause among the faults of ranks that were started at about this time."""
    since = began_unix - START_DIFFERENCE_SECONDS
    return first_fault(fault for fault in read_faults(folder) if fault.time_unix >= since)


def first_fault(faults: Iterable[Fault]) -> Fault | None:
    """Return the root cause, ordered by kind (own error, lost node, kill, hang, lost peer), then by time.

    Clocks of nodes may differ by more than the delay between failures, so time only breaks ties.
    """

    def order(fault: Fault) -> tuple[int, int, float]:
        standing = {NODE_LOST: 1, KILLED: 2, HANG: 3, LOST_PEER: 4}.get(fault.kind, 0)
        return standing, -fault.weight, fault.time_unix

    return min(faults, key=order, default=None)
