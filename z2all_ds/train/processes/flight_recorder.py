"""torch's flight recorder: the last collectives of every NCCL rank, written when one hangs, and their analysis.

watchdog ─▶ a rank's pipe ─▶ a torch thread in the rank, even if Python is stuck ─▶ RUN/logs/flight/rank_N
                                                   files of all ranks ─▶ which rank did not start which collective

Does not load torch.
"""

import os
import pickle
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.run_folder import RunFolder

ENTRIES = 2000
"""Number of collectives that a rank remembers: several steps of a ZeRO-3 run with tens of layers."""
PATIENCE_SECONDS = 12.0
"""Time to wait for the files: torch polls the pipe once per second and first resolves frame names (measured: 6 s)."""
MOST_LINES = 3
LOOK_EVERY_SECONDS = 0.1


def switch_on(run: RunFolder, pipes: Path, rank: int) -> None:
    """Enable the recorder in a rank, before it joins the others; user settings are kept. torch appends the rank."""
    run.flights.mkdir(parents=True, exist_ok=True)
    (run.flights / f"rank_{rank}").unlink(missing_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(ENTRIES))
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run.flights / "rank_"))
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(pipes / "flight_"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def pipe_of(pipes: Path, rank: int) -> Path:
    return pipes / f"flight_{rank}.pipe"


def ask_for(run: RunFolder, pipes: Path, ranks: Iterable[int]) -> None:
    """Ask these ranks to write, and wait until they have; ranks without a recorder are skipped."""
    asked = [rank for rank in ranks if _wake_recorder(pipe_of(pipes, rank))]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and any(read_flight(run, rank) is None for rank in asked):
        time.sleep(LOOK_EVERY_SECONDS)


def _wake_recorder(pipe: Path) -> bool:
    with suppress(OSError):  # it does not exist, or has no reader
        with os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as file:
            file.write(b"1\n")
        return True
    return False


@dataclass(frozen=True)
class Collective:
    """A collective that some ranks have started and not all have finished."""

    group: str
    number: int
    """Sequence number within its group."""
    name: str
    waiting: tuple[int, ...]
    """Ranks that have started it."""
    missing: tuple[int, ...]
    """Ranks of the group that wrote a record and have not started it."""

    @property
    def line(self) -> str:
        begun = f"{self.name} {self.number} of group {self.group}: started by {_named(self.waiting)}"
        return f"{begun}, not by {_named(self.missing)}" if self.missing else f"{begun}, not finished"


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class _PlainUnpickler(pickle.Unpickler):
    """Reads only numbers, strings, lists and dicts: a file in a shared folder must not execute code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def read_flight(run: RunFolder, rank: int) -> dict[str, Any] | None:
    """Return the record of a rank; None if there is none or it is incomplete."""
    with suppress(OSError, EOFError, pickle.UnpicklingError, ValueError, LookupError, AttributeError, TypeError):
        with (run.flights / f"rank_{rank}").open("rb") as file:
            content = _PlainUnpickler(file).load()
        return content if isinstance(content, dict) and "pg_status" in content else None
    return None


def read_flights(run: RunFolder) -> dict[int, dict[str, Any]]:
    numbers = [path.name.removeprefix("rank_") for path in run.flights.glob("rank_*")]
    read = {int(number): read_flight(run, int(number)) for number in numbers if number.isdecimal()}
    return {rank: flight for rank, flight in sorted(read.items()) if flight is not None}


def unfinished(flights: dict[int, dict[str, Any]]) -> list[Collective]:
    """Return the first unfinished collective of each group; those with missing ranks come first."""
    begun: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    """(group, number) -> the ranks that started and did not finish it, and the name of the collective."""
    for rank, flight in flights.items():
        for entry in flight.get("entries", []):
            if entry["state"] != "completed" and not entry["is_p2p"]:
                key = (str(entry["process_group"][0]), int(entry["collective_seq_id"]))
                begun[key][rank] = str(entry["profiling_name"]).removeprefix("nccl:")
    found: dict[str, Collective] = {}
    for (group, number), names in sorted(begun.items(), key=lambda item: item[0][1]):
        missing = [
            rank
            for rank, flight in flights.items()
            if group in flight["pg_status"] and flight["pg_status"][group]["last_enqueued_collective"] < number
        ]
        name = next(iter(names.values()))
        found.setdefault(group, Collective(group, number, name, tuple(names), tuple(missing)))
    return sorted(found.values(), key=lambda one: (not one.missing, one.group))


def unfinished_lines(run: RunFolder) -> list[str]:
    """Return a few lines about unfinished collectives; none if this torch uses another format.

    They accompany an error and must not hide it.
    """
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        return [collective.line for collective in unfinished(read_flights(run))[:MOST_LINES]]
    return []
