"""health.jsonl as the board shows it: which rank or node is slower than the others."""

from collections import deque
from statistics import median
from typing import Any

from z2all_ds.track.board.files import Files, OneFile
from z2all_ds.track.tables import parse_line
from z2all_ds.track.tail import LineTail

RECORDS_KEPT, RECORDS_JUDGED = 200, 5
SLOW_FACTOR = 1.2
"""Times the median of all ranks."""
WAITING_SHARE = 0.2
"""Of a rank's work: waiting longer than that for data is worth a word."""
FILE_TAIL_BYTES = 8 << 20
"""Older records are not read: only the last ones are shown."""


class HealthLog:
    """Follows the file; `look` is called by the run's thread."""

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._path = files, path
        self._tail = LineTail(OneFile(files, path))
        self._seen: list[float] | None = None
        self.count = 0
        self.records: deque[dict[str, Any]] = deque(maxlen=RECORDS_KEPT)

    def look(self, sign: list[float]) -> bool:
        """True: there is more to read at once."""
        if sign == self._seen:
            return False
        if self._seen is None and sign[0] > FILE_TAIL_BYTES:
            found_there = self._files.lines_at(self._path, [int(sign[0]) - FILE_TAIL_BYTES])
            self._tail.skip_to(found_there[0][0] if found_there else 0)
        found = self._tail.read()
        if found.begins_anew:
            self.records.clear()
        for line in found.lines:
            record = parse_line(line)
            if record is not None and isinstance(record.get("work_seconds"), list):
                self.records.append(record)
                self.count += 1
        self._seen = sign if found.is_all else []
        return not found.is_all

    def shown(self, hosts: list[str], now_unix: float) -> dict[str, Any]:
        """As the page wants it."""
        records = list(self.records)
        last = records[-1] if records else {}
        work = last.get("work_seconds", [])
        # A run that was started again with another number of ranks: the older records speak of others.
        judged = [record for record in records[-RECORDS_JUDGED:] if len(record["work_seconds"]) == len(work)]
        work_of = [_median_of(judged, "work_seconds", rank) for rank in range(len(work))]
        wait_of = [_median_of(judged, "data_wait_seconds", rank) for rank in range(len(work))]
        typical = _median(work_of)
        ranks = [
            {
                "rank": rank,
                "host": hosts[rank] if rank < len(hosts) else "",
                "work_seconds": _at(last, "work_seconds", rank),
                "data_wait_seconds": _at(last, "data_wait_seconds", rank),
                "memory_bytes": _at(last, "memory_bytes", rank),
                "verdict": _verdict(work_of[rank], wait_of[rank], typical),
            }
            for rank in range(len(work))
        ]
        moment = last.get("time_unix")
        return {
            "hosts": hosts,
            "step": last.get("step"),
            "age_seconds": max(0.0, now_unix - moment) if isinstance(moment, int | float) else None,
            "ranks": ranks,
            "nodes": _nodes(ranks),
            "history": {
                "step": [record.get("step") for record in records],
                "work_seconds": [record["work_seconds"] for record in records],
            },
        }


def _at(record: dict[str, Any], key: str, rank: int) -> float | None:
    values = record.get(key)
    value = values[rank] if isinstance(values, list) and rank < len(values) else None
    return value if isinstance(value, int | float) else None


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _median_of(records: list[dict[str, Any]], key: str, rank: int) -> float | None:
    return _median([_at(record, key, rank) for record in records])


def _verdict(work: float | None, wait: float | None, typical: float | None) -> str:
    if work is not None and typical is not None and work > SLOW_FACTOR * typical:
        return "slow"
    if wait is not None and wait > WAITING_SHARE * (typical or 0.0):
        return "waits for data"
    return "ok"


def _nodes(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A node is as its worst rank is."""
    by_host: dict[str, list[dict[str, Any]]] = {}
    for rank in ranks:
        by_host.setdefault(rank["host"], []).append(rank)
    nodes = []
    for host, own in by_host.items():
        verdicts = {rank["verdict"] for rank in own}
        worst = next(verdict for verdict in ("slow", "waits for data", "ok") if verdict in verdicts)
        work = _median([rank["work_seconds"] for rank in own])
        nodes.append({"host": host, "ranks": [rank["rank"] for rank in own], "work_seconds": work, "verdict": worst})
    return nodes
