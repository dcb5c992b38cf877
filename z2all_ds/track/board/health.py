"""health.jsonl for the board: which rank or node is slower than the others."""

from collections import deque
from statistics import median
from typing import Any

from z2all_ds.track.files import Files
from z2all_ds.track.tail import RecordLog

RECORDS_JUDGED = 5
SLOW_FACTOR = 1.2
"""Times the median of all ranks."""
WAITING_SHARE = 0.2
"""A rank that waits longer for data than this share of the median work is reported."""
NOTABLE_SECONDS = 0.01
"""Shorter waits and differences per step are noise: steps of a tiny model take a few milliseconds."""
FILE_TAIL_BYTES = 8 << 20
"""Older records are not read."""
VERDICTS = ("slow", "waits for data", "ok")
"""The worst first."""


class HealthLog(RecordLog):
    """Follows the file."""

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._path = files, path
        self.count = 0
        self.records: deque[dict[str, Any]] = deque(maxlen=RECORDS_JUDGED)
        super().__init__(files, path)

    def reset(self) -> None:
        self.records.clear()

    def add(self, record: dict[str, Any] | None) -> None:
        if record is not None and isinstance(record.get("work_seconds"), list):
            self.records.append(record)
            self.count += 1

    def update(self, stat: list[float]) -> bool:
        if self._stat is None and self._tail.offset == 0 and stat[0] > FILE_TAIL_BYTES:
            found = self._files.lines_at(self._path, [int(stat[0]) - FILE_TAIL_BYTES])
            self._tail.skip_to(found[0][0] if found else 0)
        return super().update(stat)

    def shown(self, hosts: list[Any], now_unix: float) -> dict[str, Any]:
        """Return ranks and nodes for the page, with the medians that their verdicts are based on."""
        records = list(self.records)
        last = records[-1] if records else {}
        count = len(last.get("work_seconds", []))
        # After a restart with another number of ranks, older records are about other ranks.
        judged = [record for record in records if len(record["work_seconds"]) == count]
        work, wait = (
            [_median([_figure(record, name, rank) for record in judged]) for rank in range(count)]
            for name in ("work_seconds", "data_wait_seconds")
        )
        typical = _median(work)
        ranks = [
            {
                "rank": rank,
                "host": hosts[rank] if rank < len(hosts) else "",
                "work_seconds": work[rank],
                "data_wait_seconds": wait[rank],
                "memory_bytes": _figure(last, "memory_bytes", rank),
                "verdict": _verdict(work[rank], wait[rank], typical),
            }
            for rank in range(count)
        ]
        moment = last.get("time_unix")
        age = max(0.0, now_unix - moment) if isinstance(moment, int | float) else None
        return {"step": last.get("step"), "age_seconds": age, "ranks": ranks, "nodes": _nodes(ranks)}


def _figure(record: dict[str, Any], name: str, rank: int) -> float | None:
    values = record.get(name)
    value = values[rank] if isinstance(values, list) and rank < len(values) else None
    return value if isinstance(value, int | float) else None


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _verdict(work: float | None, wait: float | None, typical: float | None) -> str:
    if work is not None and typical is not None and work > max(SLOW_FACTOR * typical, typical + NOTABLE_SECONDS):
        return "slow"
    if wait is not None and wait > max(WAITING_SHARE * (typical or 0.0), NOTABLE_SECONDS):
        return "waits for data"
    return "ok"


def _nodes(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group ranks by host; a node has the verdict of its worst rank."""
    by_host: dict[str, list[dict[str, Any]]] = {}
    for rank in ranks:
        by_host.setdefault(rank["host"], []).append(rank)
    return [
        {
            "host": host,
            "ranks": [rank["rank"] for rank in own],
            "work_seconds": _median([rank["work_seconds"] for rank in own]),
            "verdict": min((rank["verdict"] for rank in own), key=VERDICTS.index),
        }
        for host, own in by_host.items()
    ]
