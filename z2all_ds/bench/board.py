"""`z2all bench board`: how soon the board shows a long run, how long it takes to read it, and its peak memory.

The real command runs on a generated run folder whose records are as wide as real ones. Seconds count from the start of
the process. The files were just written and are in the page cache: a cold disk adds the time of about 2,000 reads.
"""

import json
import math
import re
import select
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from z2all_ds.base.child_process import GRACE_SECONDS, end_group, module_command, start
from z2all_ds.base.console import heartbeat, human_bytes, progress
from z2all_ds.base.errors import MachineError
from z2all_ds.base.process_memory import peak_of_process
from z2all_ds.base.reports import Shown
from z2all_ds.bench.board_page import browser, measure_page, why_no_browser
from z2all_ds.bench.shared import Report, require_at_least, scratch_folder

TEMPLATES = 997
"""Number of different lines; a prime, so that buckets of a power of two see all of them."""
BLOCK_RECORDS = 10_000
VALIDATION_INTERVAL = 500
NAMES = ("loss", "loss_of_zh", "loss_of_en", "loss_of_code", "grad_norm", "lr", "tokens_per_second")
START_SECONDS, READ_SECONDS = 60.0, 500.0


def bench_board(records: int, folder: Path | None = None) -> Report:
    """Write a run folder, measure the board on it, and remove the folder.

    Seconds count from the start of the process, except those of an answer. The first curves have points over the whole
    run; the zoom is into a twentieth of the run, at most 20,000 steps. `pages`: the page opened twice in a new browser
    while the board reads; None without a browser.
    """
    require_at_least(1000, records=records)
    with scratch_folder(folder) as made:
        run = made / "long_run"
        run.mkdir()
        file_bytes = write_run(run, records)
        with heartbeat("board"):
            with started_board(run) as board:
                costs = _measure(board, records)
            return {"records": records, "file_bytes": file_bytes, **costs, "pages": _measure_pages(run)}


def _measure_pages(run: Path) -> list[dict[str, float]] | None:
    if why_no_browser():
        return None
    with browser() as chromium, started_board(run) as board:
        context = chromium.new_context()
        return [measure_page(context, board.address) for _ in range(2)]


@dataclass
class StartedBoard:
    """A board's process, its address with the token, and an opener that is logged in."""

    process: "subprocess.Popen[bytes]"
    address: str
    opener: urllib.request.OpenerDirector
    started: float
    seconds_to_listening: float

    def get(self, path: str) -> tuple[Any, float]:
        """Return an answer, and the seconds until it came."""
        began = time.perf_counter()
        with self.opener.open(urljoin(self.address, path), timeout=60) as answer:
            content = json.load(answer)
        return content, time.perf_counter() - began


def logged_in(address: str) -> urllib.request.OpenerDirector:
    """Return an opener with the cookie of the board at the printed address."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    opener.open(address.replace("/?", "/api/runs?"), timeout=60).close()
    return opener


@contextmanager
def started_board(*places: str | Path) -> Iterator[StartedBoard]:
    """Run `z2all board` on a free port and end it with Ctrl-C."""
    started = time.perf_counter()
    process = start(module_command("z2all_ds", "board", *map(str, places), "--port", "0"), stderr=subprocess.PIPE)
    assert process.stderr
    with process.stderr:
        try:
            is_readable, _, _ = select.select([process.stderr], [], [], START_SECONDS)
            line = process.stderr.readline().decode(errors="replace") if is_readable else ""
            found = re.search(r"http://\S+", line)
            if found is None:
                raise MachineError("z2all board", f"did not start: {line.strip()}", "Run it yourself to see why.")
            seconds = time.perf_counter() - started
            yield StartedBoard(process, found[0], logged_in(found[0]), started, seconds)
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            end_group(process)


def _measure(board: StartedBoard, records: int) -> dict[str, Any]:
    curves = f"/api/curves?run=0&names={','.join(NAMES)}&points=800"
    while not (x := board.get(curves)[0]["x"]) or x[-1] <= 0.9 * records:
        time.sleep(0.02)
    first_curves = time.perf_counter() - board.started
    slowest = 0.0
    while True:
        state = board.get("/api/runs")[0]["runs"][0]
        if state["read_share"] >= 1.0 and state["records"] == records:
            break
        if time.perf_counter() - board.started > READ_SECONDS:
            raise MachineError("z2all board", f"has not read all in {READ_SECONDS:.0f} s", "Give fewer --records.")
        slowest = max(slowest, board.get(curves)[1])
        time.sleep(0.2)
    read_all = time.perf_counter() - board.started
    zoom = f"{curves}&from={records // 2}&to={records // 2 + min(20_000, records // 20)}"
    seconds = {
        "seconds_to_listening": board.seconds_to_listening,
        "seconds_to_first_curves": first_curves,
        "slowest_answer_while_reading_seconds": slowest,
        "seconds_to_all": read_all,
        "seconds_of_zoom": board.get(zoom)[1],
    }
    rounded = {name: round(value, 3) for name, value in seconds.items()}
    return {**rounded, "peak_memory_bytes": peak_of_process(board.process.pid)}


def write_run(run: Path, records: int) -> int:
    """Write metrics.jsonl and events.jsonl of a finished run. Return the bytes of metrics.jsonl."""
    start_time = 1_790_000_000.0
    templates, validated = ([_fields(number, extra) for number in range(TEMPLATES)] for extra in (False, True))
    path = run / "metrics.jsonl"
    with path.open("wb") as file, progress("writing records", records, "records") as advance:
        for first in range(1, records + 1, BLOCK_RECORDS):
            block = range(first, min(first + BLOCK_RECORDS, records + 1))
            for step in block:
                rest = (templates if step % VALIDATION_INTERVAL else validated)[step % TEMPLATES]
                record = (step, step * 65536, rest, start_time + 0.9 * step)
                file.write(b'{"step": %d, "tokens_seen": %d, %s, "time_unix": %.3f}\n' % record)
            advance(len(block))
    started = {"event": "started", "step": 0, "world_size": 8, "deepspeed": "zero1", "steps": records}
    done = {"event": "done", "step": records, "goodput": 0.95}
    events = [{"time_unix": start_time, **started}, {"time_unix": start_time + 0.9 * records + 1, **done}]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path.stat().st_size


def _fields(number: int, is_validated: bool) -> bytes:
    """Return the fields of a record that do not grow with the step, with numbers as long as real ones."""
    wave = math.sin(number) / 7
    losses = {"": 2.4, "_of_code": 1.9, "_of_en": 2.6, "_of_zh": 2.8}
    record: dict[str, Any] = {"grad_norm": 0.7 + wave}
    for prefix in ("", "validation_")[: 1 + is_validated]:
        record |= {f"{prefix}loss{of}": loss + wave for of, loss in losses.items()}
        record |= {f"{prefix}perplexity{of}": math.exp(loss + wave) for of, loss in losses.items()}
    record |= {f"tokens_of_{domain}": 20000 + number for domain in ("code", "en", "zh")}
    record |= {"data_position": 32 * number, "lr": 3e-4 * (1 + wave), "step_taken": True, "step_seconds": 0.9 + wave}
    parts = ("data_wait", "forward", "backward", "optimizer", "communication", "checkpoint", "validation", "other")
    record |= {f"{part}_seconds": round(abs(wave), 6) for part in parts}
    record |= {"tokens_per_second": 68519.1 + number, "mfu": 0.59861, "mfu_exact": 0.52343, "hfu": 0.52343}
    record |= {f"{kind}memory_bytes": 43097746944 + number for kind in ("", "peak_", "reserved_", "host_")}
    return json.dumps(record)[1:-1].encode()


def describe(costs: Report) -> Shown:
    """Yield the size of the run and the measured times."""
    yield f"{costs['records']:,} records, {human_bytes(costs['file_bytes'])}"
    first = f"first curves after {costs['seconds_to_first_curves']:.2f} s"
    yield f"listening after {costs['seconds_to_listening']:.2f} s, {first}"
    slowest = f"{costs['slowest_answer_while_reading_seconds']:.2f} s"
    yield f"everything read after {costs['seconds_to_all']:.1f} s; the slowest answer until then took {slowest}"
    yield f"zoom {costs['seconds_of_zoom']:.3f} s"
    yield f"peak memory {human_bytes(costs['peak_memory_bytes'])}"
    if costs["pages"] is None:
        yield f"in a browser: not measured, {why_no_browser()}"
        return
    pages = [
        f"curves {one['seconds_to_curves']:.2f} s, charts {one['seconds_to_charts']:.2f} s" for one in costs["pages"]
    ]
    yield f"in a browser, after: {'; second time: '.join(pages)}"
