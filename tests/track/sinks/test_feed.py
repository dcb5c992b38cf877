"""Sinks that are killed, hang, or lack a login, a package or disk space: one warning, no delay, no lost record."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from tests.helpers.fed_runs import FedRun, hurt, sink_processes
from tests.helpers.processes import ended
from tests.helpers.small_disk import small_disk
from tests.helpers.wandb_files import exit_codes, offline_rows
from tests.track.sinks.test_tensorboard_sink import points
from z2all_ds.base.config.sections import TrackSection
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.machine import process_is_alive
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.feed import SinkFeed
from z2all_ds.track.sinks.session import Owner, run_session
from z2all_ds.track.sinks.settings import SinkSettings
from z2all_ds.track.writer import read_records

MOST_POLL_SECONDS = 0.05
"""Longest allowed delay of a step; measured: 0.0001 s."""
OWNER = """
import sys, time
from pathlib import Path
from tests.helpers.fed_runs import FedRun

run = FedRun(Path(sys.argv[1]), wandb="offline", tensorboard=True, finish_seconds=20)
run.event("started", 0)
run.steps(1, 20)
print("written", flush=True)
time.sleep(120)
"""


def warnings(run: FedRun) -> list[str]:
    return [line for line in run.said if "failed" in line or "has not confirmed" in line]


def is_sending(run: FedRun) -> bool:
    """Return whether both sinks have printed where their curves can be seen."""
    return sum(line.startswith(("W&B: ", "TensorBoard: ")) for line in run.said) == 2


def sessions_opened(run: FedRun) -> int:
    """Return the number of W&B sessions opened so far."""
    log = (run.folder.root / "logs" / "sinks.log").read_text(encoding="utf-8")
    return sum(line.startswith("W&B: ") and line.endswith("(offline)") for line in log.splitlines())


@pytest.mark.extended
def test_a_wandb_service_that_is_killed_and_then_hangs_loses_no_record(tmp_path: Path) -> None:
    run = FedRun(tmp_path / "run 一", hang_seconds=3.0, wandb="offline", tensorboard=True)
    run.event("started", 0)
    run.steps(1, 10)
    run.wait_for(lambda: is_sending(run))
    services = []
    for number, first_step in ((signal.SIGKILL, 11), (signal.SIGSTOP, 21)):
        services.append(sink_processes(os.getpid())["wandb-core"])
        hurt(services[-1], number)
        run.event("spike", first_step)
        run.steps(first_step, first_step + 9, pause_seconds=0.02)
        run.wait_for(lambda: sessions_opened(run) == len(services) + 1)
    run.go_back_to(25)
    run.steps(26, 35)
    run.close()

    (warning,) = warnings(run)
    assert warning.startswith("W&B failed (") and warning.endswith("training continues")
    rows = offline_rows(run.folder.root)
    written = {record["step"]: record["time_unix"] for record in read_records(run.folder.metrics)}
    assert {row["step"]: row["time_unix"] for row in rows} == written  # the last record of each repeated step
    assert list(written) == list(range(1, 36))
    assert rows[-1]["loss_of_中文"] == 2.0
    assert any("events/spike" in row for row in rows)
    assert [step for step, _ in points(run.folder.sinks / "tensorboard", "loss")] == list(range(1, 36))
    assert sorted(run.poll_seconds)[-2] < MOST_POLL_SECONDS  # a busy machine may delay a single poll
    assert not any(process_is_alive(*process) for process in services)
    assert not sink_processes(os.getpid())


def test_a_session_that_is_killed_is_started_again(tmp_path: Path) -> None:
    run = FedRun(tmp_path, tensorboard=True)
    run.steps(1, 5)
    first = run.wait_for(lambda: sink_processes(os.getpid()).get("tensorboard"))
    hurt(first, signal.SIGKILL)
    run.wait_for(lambda: warnings(run))
    run.steps(6, 9)
    run.wait_for(lambda: sink_processes(os.getpid()).get("tensorboard"))
    run.close()
    assert len(warnings(run)) == 1
    assert [step for step, _ in points(tmp_path / "sinks" / "tensorboard", "loss")] == list(range(1, 10))
    assert not process_is_alive(*first)


def test_sinks_of_a_killed_run_end_and_lose_no_record(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as owner:
        assert owner.stdout and owner.stdout.readline() == "written\n"
        deadline = time.monotonic() + 40
        while "wandb-core" not in (found := sink_processes(owner.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(os.getpgid(found["wandb"][0]), signal.SIGINT)  # sinks ignore Ctrl-C; only the run reacts to it
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        while any(process_is_alive(*process) for process in found.values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert [row["step"] for row in offline_rows(tmp_path)] == list(range(1, 21))
    assert exit_codes(tmp_path) == [1]  # although nobody has recorded the failure
    assert [step for step, _ in points(tmp_path / "sinks" / "tensorboard", "loss")] == list(range(1, 21))


def test_without_sinks_no_process_is_started(tmp_path: Path) -> None:
    run = FedRun(tmp_path)
    run.steps(1, 3)
    assert not sink_processes(os.getpid())
    run.close()
    assert run.said == []
    assert not run.folder.sinks.exists()


def test_the_sink_feed_of_rank_0_imports_neither_wandb_nor_torch() -> None:
    code = "import sys, z2all_ds.track.sinks.feed; print({'wandb', 'torch', 'tensorboard'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


HANGING_WANDB = """
import time
class Settings:
    def __init__(self, **_): pass
def init(**_):
    time.sleep(600)
"""


@pytest.fixture
def hanging_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "wandb.py").write_text(HANGING_WANDB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.usefixtures("hanging_wandb")
def test_waiting_for_a_sink_is_reported_and_does_not_look_like_a_hang(tmp_path: Path) -> None:
    run, beats = FedRun(tmp_path / "run 1", wandb="offline", finish_seconds=3.0), []
    run.steps(1, 3)
    run.feed.close(beat=lambda: beats.append(time.monotonic()))
    assert len(beats) > 5
    waiting, left = run.said[-2:]
    assert waiting == "waiting for W&B, up to 3 s (track.finish_seconds)"
    command = f"z2all track sync '{tmp_path / 'run 1'}'"
    assert left == f"W&B has not confirmed 3 records: `{command}` sends the missing ones"
    assert not sink_processes(os.getpid())


@pytest.mark.usefixtures("hanging_wandb")
def test_after_an_error_the_run_does_not_wait_and_sinks_end_by_themselves(tmp_path: Path) -> None:
    run = FedRun(tmp_path / "run", wandb="offline", tensorboard=True, finish_seconds=60.0)
    run.steps(1, 3)
    run.wait_for(lambda: any(line.startswith("TensorBoard: ") for line in run.said))
    found = sink_processes(os.getpid())
    began = time.monotonic()
    run.close(waits=False)
    assert time.monotonic() - began < 20  # finish_seconds is 60
    deadline = time.monotonic() + 40
    while process_is_alive(*found["tensorboard"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [step for step, _ in points(run.folder.sinks / "tensorboard", "loss")] == [1, 2, 3]


def test_a_session_waits_for_the_previous_session_to_end(tmp_path: Path) -> None:
    """This happens when a killed run is restarted immediately. It is not reported as a failure."""
    (tmp_path / "sinks").mkdir()
    with (tmp_path / "sinks" / ".tensorboard.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = FedRun(tmp_path, tensorboard=True)
        run.steps(1, 3)
        run.wait_for(lambda: sink_processes(os.getpid()).get("tensorboard"))
        time.sleep(1.5)
        assert run.said == []
    run.wait_for(lambda: run.said)
    run.close()
    assert run.said == [f"TensorBoard: tensorboard --load_fast=false --logdir {tmp_path / 'sinks' / 'tensorboard'}"]
    assert [step for step, _ in points(tmp_path / "sinks" / "tensorboard", "loss")] == [1, 2, 3]


def test_links_in_place_of_the_lock_and_the_log_are_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    folder, settings = RunFolder(tmp_path / "run"), TrackSection(tensorboard=True)
    for link in (folder.sinks / ".tensorboard.lock", folder.root / "logs" / "sinks.log"):
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="lock: is a link"):
        run_session(folder, "tensorboard", cast(SinkSettings, None), cast(Owner, None))
    with pytest.raises(ConfigError, match="log: is a link"):
        SinkFeed(settings, folder, print, 30.0).poll()
    assert (tmp_path / "target").read_text() == "kept"


def test_the_reason_for_offline_mode_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(SinkFeed, "poll", lambda feed: None)  # no process is needed
    for key in ("", "k"):
        monkeypatch.setenv("WANDB_API_KEY", key)
        monkeypatch.setenv("WANDB_MODE", "offline")
        SinkFeed(TrackSection(wandb="auto"), RunFolder(tmp_path), said.append)
    sync = f"`z2all track sync {tmp_path}` sends the run"
    assert said == [
        f"W&B: offline (no API key); `wandb login`, then {sync}",
        f"W&B: offline (WANDB_MODE=offline); {sync}",
    ]


def test_a_missing_login_causes_one_warning_that_names_the_fix(tmp_path: Path) -> None:
    run = FedRun(tmp_path, wandb="online", finish_seconds=1.0)
    run.steps(1, 3)
    run.wait_for(lambda: warnings(run))
    run.close()
    first, last = warnings(run)
    assert first.startswith("W&B failed (no API key: run `wandb login`): retrying")
    assert last == f"W&B has not confirmed 3 records: `z2all track sync {tmp_path}` sends the missing ones"


def test_broken_and_missing_packages_cause_one_warning_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "wandb.py").write_text("raise OSError('half of it is missing')\n")
    (packages / "tensorboard.py").write_text("raise ModuleNotFoundError(\"No module named 'tensorboard'\")\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]))
    run = FedRun(tmp_path / "run", wandb="offline", tensorboard=True, finish_seconds=1.0)
    run.steps(1, 3)
    run.wait_for(lambda: len(warnings(run)) == 2)
    run.close()
    of_wandb, of_tensorboard = sorted(warnings(run)[:2], reverse=True)
    assert "OSError: half of it is missing" in of_wandb and "retrying" in of_wandb
    assert "pip install 'z2all_ds[tensorboard]'" in of_tensorboard and "switched off" in of_tensorboard


def test_sinks_continue_when_a_full_disk_has_space_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run" / "sinks", 256 << 10) as disk:
        filling = disk / "filling"
        with suppress(OSError), filling.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        run = FedRun(tmp_path / "run", tensorboard=True, wandb="offline")
        run.steps(1, 5)
        run.wait_for(lambda: len(warnings(run)) == 2)
        filling.unlink()
        run.steps(6, 9)
        run.close()
        assert len(warnings(run)) == 2, run.said
        assert [step for step, _ in points(disk / "tensorboard", "loss")] == list(range(1, 10))
        assert {row["step"] for row in offline_rows(tmp_path / "run")} == set(range(1, 10))
