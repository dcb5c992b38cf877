"""torch's flight recorder: the last collectives of every NCCL rank, written down when one hangs, and what they tell.

watchdog ─▶ a rank's pipe ─▶ a thread of torch's in the rank, whatever its Python is stuck in ─▶ RUN/logs/flight/rank_N
                                                                          all ranks' files ─▶ who has not come to which

Loads no torch.
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
"""Collectives that a rank remembers: some steps of a ZeRO-3 run with tens of layers."""
PATIENCE_SECONDS = 12.0
"""For the files: torch looks at a pipe once a second, and finds the names of frames first (seen: 6 s)."""
MOST_LINES = 3
LOOK_EVERY_SECONDS = 0.1


def switch_on(run: RunFolder, pipes: Path, rank: int) -> None:
    """In a rank, before it joins the others; what the user has set stays. torch adds its number to both paths."""
    run.flights.mkdir(parents=True, exist_ok=True)
    (run.flights / f"rank_{rank}").unlink(missing_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(ENTRIES))
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run.flights / "rank_"))
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(pipes / "flight_"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def pipe_of(pipes: Path, rank: int) -> Path:
    return pipes / f"flight_{rank}.pipe"


def ask_for(run: RunFolder, pipes: Path, ranks: Iterable[int]) -> None:
    """Has these ranks write, and waits until they have; those without a recorder are passed over."""
    asked = [rank for rank in ranks if _ring(pipe_of(pipes, rank))]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and any(read_flight(run, rank) is None for rank in asked):
        time.sleep(LOOK_EVERY_SECONDS)


def _ring(pipe: Path) -> bool:
    with suppress(OSError):  # not there, or nobody reads it any more
        with os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as file:
            file.write(b"1\n")
        return True
    return False


@dataclass(frozen=True)
class Collective:
    """One that some ranks have begun and not all have finished."""

    group: str
    number: int
    """Within its group."""
    name: str
    waiting: tuple[int, ...]
    """Ranks that have begun it."""
    missing: tuple[int, ...]
    """Ranks of the group that wrote down what they did, and have not come to it."""

    @property
    def line(self) -> str:
        begun = f"{self.name} {self.number} of group {self.group}: begun by {_named(self.waiting)}"
        return f"{begun}, not by {_named(self.missing)}" if self.missing else f"{begun}, not finished"


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, texts, lists and dicts, as the recorder writes them. A file in a shared folder may run nothing here."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def read_flight(run: RunFolder, rank: int) -> dict[str, Any] | None:
    """What a rank wrote; None where there is nothing, or not yet all of it."""
    with suppress(OSError, EOFError, pickle.UnpicklingError, ValueError, LookupError, AttributeError, TypeError):
        with (run.flights / f"rank_{rank}").open("rb") as file:
            content = _PlainUnpickler(file).load()
        return content if isinstance(content, dict) and "pg_status" in content else None
    return None


def read_flights(run: RunFolder) -> dict[int, dict[str, Any]]:
    numbers = [path.name.removeprefix("rank_") for path in run.flights.glob("rank_*")]
    read = {int(number): read_flight(run, int(number)) for number in numbers if number.isdigit()}
    return {rank: flight for rank, flight in sorted(read.items()) if flight is not None}


def unfinished(flights: dict[int, dict[str, Any]]) -> list[Collective]:
    """The first one in each group, those that somebody has not come to first."""
    begun: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    """By group and number: the ranks that began it and have not finished, and what they call it."""
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


def told(run: RunFolder) -> list[str]:
    """The lines that name them, a few at most; none where a torch writes in another form. They come beside an error,
    and must not hide it."""
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        return [collective.line for collective in unfinished(read_flights(run))[:MOST_LINES]]
    return []
