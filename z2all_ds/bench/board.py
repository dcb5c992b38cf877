"""`z2all bench board`: how soon the board shows a long run, how long it reads, and the memory it takes.

The real command starts on a made run folder with records as wide as real ones. Seconds count from the start of the
process. Files just written are in memory: a cold disk adds what it takes to read some 2,000 places of it.
"""

import json
import math
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from z2all_ds.base.console import heartbeat, human_bytes, progress
from z2all_ds.base.errors import MachineError
from z2all_ds.base.process_memory import peak_of_process
from z2all_ds.base.reports import Shown
from z2all_ds.bench.board_page import PageCosts, browser, opened, why_no_browser
from z2all_ds.bench.shared import require_at_least, scratch_folder

TEMPLATES = 997
"""Kinds of lines; a prime, so that no power of two of buckets sees the same one again and again."""
BLOCK_RECORDS = 10_000
VALIDATED_EVERY = 500
NAMES = ("loss", "loss_of_zh", "loss_of_en", "loss_of_code", "grad_norm", "lr", "tokens_per_second")
START_SECONDS, READ_SECONDS = 60.0, 500.0


@dataclass(frozen=True)
class BoardCosts:
    """Of one run's folder. Seconds count from the start of the process unless they are those of an answer.

    The first curves have points over the whole run; `first_read_share` of the file was read by then. Later the same
    request takes `seconds_of_curves`; the zoom is into a twentieth of the run, at most 20,000 steps. `pages` were
    opened in a browser just started, while the board reads, and once more; None where there is no browser.
    """

    records: int
    file_bytes: int
    seconds_to_listening: float
    seconds_to_first_curves: float
    first_read_share: float
    slowest_answer_while_reading_seconds: float
    seconds_to_all: float
    seconds_of_curves: float
    seconds_of_zoom: float
    peak_memory_bytes: int
    pages: list[PageCosts] | None


def bench_board(records: int, folder: Path | None = None) -> BoardCosts:
    """Writes, starts, asks, measures; the folder is removed again."""
    require_at_least(1000, records=records)
    with scratch_folder(folder) as made:
        run = made / "long_run"
        run.mkdir()
        file_bytes = write_run(run, records)
        with heartbeat("board"):
            with started_board(run) as board:
                costs = _measured(board, records, file_bytes)
            return replace(costs, pages=_pages(run))


def _pages(run: Path) -> list[PageCosts] | None:
    if why_no_browser():
        return None
    with browser() as chromium, started_board(run) as board:
        context = chromium.new_context()
        return [opened(context, board.address) for _ in range(2)]


@dataclass
class StartedBoard:
    """The process and where it answers."""

    process: "subprocess.Popen[bytes]"
    address: str
    began: float
    seconds_to_listening: float

    def get(self, path: str) -> tuple[Any, float]:
        """An answer, and the seconds that it took."""
        began = time.perf_counter()
        with urllib.request.urlopen(f"{self.address}{path}", timeout=60) as answer:
            content = json.load(answer)
        return content, time.perf_counter() - began


@contextmanager
def started_board(*places: str | Path) -> Iterator[StartedBoard]:
    """The real command on a free port, ended with Ctrl-C."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "z2all_ds", "board", *map(str, places), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr
        is_there, _, _ = select.select([process.stderr], [], [], START_SECONDS)
        line = process.stderr.readline().decode(errors="replace") if is_there else ""
        found = re.search(r"http://\S+", line)
        if found is None:
            raise MachineError("z2all board", f"did not start: {line.strip()}", "Start it by hand to see why.")
        yield StartedBoard(process, found[0], began, time.perf_counter() - began)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stderr:
            process.stderr.close()


def _measured(board: StartedBoard, records: int, file_bytes: int) -> BoardCosts:
    curves = f"/api/curves?run=0&names={','.join(NAMES)}&points=800"
    while True:
        answer, _ = board.get(curves)
        if answer["x"] and answer["x"][-1] > 0.9 * records:
            break
        time.sleep(0.02)
    first = time.perf_counter() - board.began
    first_share = board.get("/api/runs")[0]["runs"][0]["read_share"]
    slowest = 0.0
    while True:
        state, _ = board.get("/api/runs")
        if state["runs"][0]["read_share"] >= 1.0 and state["runs"][0]["records"] == records:
            break
        if time.perf_counter() - board.began > READ_SECONDS:
            raise MachineError("z2all board", f"has not read all in {READ_SECONDS:.0f} s", "Give fewer --records.")
        slowest = max(slowest, board.get(curves)[1])
        time.sleep(0.2)
    read_all = time.perf_counter() - board.began
    zoom = f"{curves}&from={records // 2}&to={records // 2 + min(20_000, records // 20)}"
    times = (round(board.seconds_to_listening, 3), round(first, 3), round(first_share, 4), round(slowest, 3))
    later = (round(board.get(curves)[1], 3), round(board.get(zoom)[1], 3))
    peak = peak_of_process(board.process.pid)
    return BoardCosts(records, file_bytes, *times, round(read_all, 3), *later, peak, None)


def write_run(run: Path, records: int) -> int:
    """metrics.jsonl and events.jsonl of a run that is over. Returns the bytes of its metrics."""
    start = 1_790_000_000.0
    templates, validated = ([_rest(number, extra) for number in range(TEMPLATES)] for extra in (False, True))
    path = run / "metrics.jsonl"
    with path.open("wb") as file, progress("writing records", records, "records") as advance:
        for first in range(1, records + 1, BLOCK_RECORDS):
            block = range(first, min(first + BLOCK_RECORDS, records + 1))
            for step in block:
                rest = (templates if step % VALIDATED_EVERY else validated)[step % TEMPLATES]
                record = (step, step * 65536, rest, start + 0.9 * step)
                file.write(b'{"step": %d, "tokens_seen": %d, %s, "time_unix": %.3f}\n' % record)
            advance(len(block))
    events = [
        {"time_unix": start, "event": "started", "step": 0, "world_size": 8, "deepspeed": "zero1", "steps": records},
        {"time_unix": start + 0.9 * records + 1, "event": "done", "step": records, "goodput": 0.95},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path.stat().st_size


def _rest(number: int, is_validated: bool) -> bytes:
    """A record's fields but those that grow, with figures as long as real ones."""
    wave = math.sin(number) / 7
    losses = {"": 2.4, "_of_code": 1.9, "_of_en": 2.6, "_of_zh": 2.8}
    record: dict[str, Any] = {"loss": 2.4 + wave, "grad_norm": 0.7 + wave}
    record |= {f"loss{of}": loss + wave for of, loss in losses.items()}
    record |= {f"perplexity{of}": math.exp(loss + wave) for of, loss in losses.items()}
    if is_validated:
        record |= {f"validation_loss{of}": loss + wave for of, loss in losses.items()}
        record |= {f"validation_perplexity{of}": math.exp(loss + wave) for of, loss in losses.items()}
    record |= {f"tokens_of_{domain}": 20000 + number for domain in ("code", "en", "zh")}
    record |= {"data_position": 32 * number, "lr": 3e-4 * (1 + wave), "step_taken": True, "step_seconds": 0.9 + wave}
    parts = ("data_wait", "forward", "backward", "optimizer", "communication", "checkpoint", "validation", "other")
    record |= {f"{part}_seconds": round(abs(wave), 6) for part in parts}
    record |= {"tokens_per_second": 68519.1 + number, "mfu": 0.59861, "mfu_exact": 0.52343, "hfu": 0.52343}
    record |= {f"{kind}memory_bytes": 43097746944 + number for kind in ("", "peak_", "reserved_", "host_")}
    return json.dumps(record)[1:-1].encode()


def describe(costs: BoardCosts) -> Shown:
    """Yields a line for each thing that a person waits for."""
    yield f"{costs.records:,} records, {human_bytes(costs.file_bytes)}"
    first = f"first curves after {costs.seconds_to_first_curves:.2f} s"
    yield f"listening after {costs.seconds_to_listening:.2f} s, {first}"
    slowest = f"{costs.slowest_answer_while_reading_seconds:.2f} s"
    yield f"everything read after {costs.seconds_to_all:.1f} s; the slowest answer until then took {slowest}"
    yield f"curves {costs.seconds_of_curves:.3f} s, zoom {costs.seconds_of_zoom:.3f} s"
    yield f"peak memory {human_bytes(costs.peak_memory_bytes)}"
    if costs.pages is None:
        yield f"in a browser: not measured, {why_no_browser()}"
        return
    seconds = [f"curves {one.seconds_to_curves:.2f} s, charts {one.seconds_to_charts:.2f} s" for one in costs.pages]
    yield f"in a browser, after: {'; once more: '.join(seconds)}"
