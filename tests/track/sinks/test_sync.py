"""`z2all track sync` and online runs, with the real W&B client and a fake server."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.fed_runs import FedRun, hurt, sink_processes
from tests.helpers.processes import ended
from tests.helpers.wandb_files import offline_rows
from tests.helpers.wandb_server import WandbServer, wandb_server
from tests.track.sinks.test_tensorboard_sink import points
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.track.sinks.sync import sync_runs

RECORDS = 8000
"""More than W&B sends in one request."""


def sync(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "z2all_ds", "track", "sync", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def log_in(server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)


def test_each_record_reaches_the_server_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The W&B service is killed, then the server refuses all rows, then it accepts them again and a sync runs."""
    with wandb_server() as server:
        log_in(server, monkeypatch)

        def rows() -> list[tuple[int, int]]:
            return [(row["step"], row["_step"]) for row in server.rows.get(run_id, [])]

        run = FedRun(tmp_path / "名字", wandb="auto", finish_seconds=4.0)
        run.steps(1, 5)
        run.wait_for(lambda: server.rows)
        ((run_id, name),) = server.names.items()
        assert name == "名字"
        run.wait_for(lambda: len(rows()) == 5)
        hurt(sink_processes(os.getpid())["wandb-core"], signal.SIGKILL)
        run.steps(6, 12)
        run.wait_for(lambda: len(rows()) == 12)
        server.refuses_rows = True
        run.go_back_to(10)
        run.steps(11, 14)
        run.close()
        assert [line.partition(" (")[0] for line in run.said if "failed" in line] == ["W&B failed"]
        assert f"`z2all track sync {shlex.quote(str(tmp_path / '名字'))}` sends the missing ones" in run.said[-1]

        server.refuses_rows = False
        answer = sync(str(tmp_path / "名字"))
        assert answer.returncode == 0, answer.stderr
        steps = [*range(1, 13), *range(11, 15)]
        assert rows() == [(step, row) for row, step in enumerate(steps, start=1)]
        again = sync(str(tmp_path / "名字"))
        assert "W&B has everything" in again.stderr
        assert len(rows()) == len(steps)


@pytest.mark.extended
def test_a_sync_that_is_killed_sends_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FedRun(tmp_path)
    run.steps(1, RECORDS)
    run.close()
    with wandb_server() as server:
        log_in(server, monkeypatch)
        command = [sys.executable, "-m", "z2all_ds", "track", "sync", str(tmp_path)]
        with ended(subprocess.Popen(command, stderr=subprocess.DEVNULL)) as first:
            deadline = time.monotonic() + 60
            while not any(server.rows.values()):
                assert time.monotonic() < deadline and first.poll() is None
                time.sleep(0.01)
            found = sink_processes(first.pid)
            for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: each ends by itself without the other
                for name in ("wandb-core", "wandb"):
                    hurt(found[name], number)
        ((run_id, rows),) = server.rows.items()
        assert 0 < len(rows) < RECORDS
        answer = sync(str(tmp_path))
        assert answer.returncode == 0, answer.stderr
        assert [row["step"] for row in server.rows[run_id]] == list(range(1, RECORDS + 1))


def test_sync_writes_a_finished_run_for_wandb_and_tensorboard(tmp_path: Path) -> None:
    run = FedRun(tmp_path)
    run.event("started", 0)
    time.sleep(0.002)  # times of events are rounded to milliseconds
    run.steps(1, 4)
    time.sleep(0.002)
    run.event("spike", 4)
    time.sleep(0.002)
    run.steps(5, 7)
    time.sleep(0.002)
    run.event("checkpoint", 7)
    run.close()
    for words in (["--offline", "--project", "p"], ["--to", "tensorboard"]):
        answer = sync(str(tmp_path), *words)
        assert answer.returncode == 0, answer.stderr
        assert "7 records" in answer.stderr
    rows = offline_rows(tmp_path)
    assert [row["step"] for row in rows] == [*range(1, 8), 7]
    marks = {place: key for place, row in enumerate(rows) for key in row if key.startswith("events/")}
    assert marks == {0: "events/started", 4: "events/spike", 7: "events/checkpoint"}
    assert [step for step, _ in points(tmp_path / "sinks" / "tensorboard", "loss")] == list(range(1, 8))


def test_invalid_arguments_and_a_missing_login_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DataError, match=r"has no metrics\.jsonl"):
        sync_runs([tmp_path / "x"], "wandb", None, offline=False)
    with pytest.raises(ConfigError, match="--to paper: must be one of wandb, tensorboard"):
        sync_runs([tmp_path], "paper", None, offline=False)
    with pytest.raises(ConfigError, match="--offline: only applies to W&B"):
        sync_runs([tmp_path], "tensorboard", None, offline=True)
    answer = sync(str(tmp_path))
    assert answer.returncode == ConfigError.exit_code
    (line,) = answer.stderr.splitlines()
    assert line.startswith("ConfigError: W&B: no API key is set. Run `wandb login`")
