"""Tests of the watchdog with real processes that are killed, stopped, silent, or end normally."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.command import ROOT
from z2all_ds.base.fault_records import BUG, HANG, KILLED, LAUNCH_VARIABLE, Fault, first_fault, has_fault, read_faults
from z2all_ds.base.run_folder import LAUNCH_LOCK, LOCK, RunFolder, open_lock_file, wait_for_lock
from z2all_ds.cluster.launch.watchdog import read_ranks
from z2all_ds.track.writer import RunWriter, read_records

RANK = """
import sys, time
from pathlib import Path
from z2all_ds.train.processes.progress import Progress
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
run, rank, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
progress = Progress(RunFolder(run), World(rank, 2, rank, 2), 2.5, *map(int, words))
print(progress.path.parent, flush=True)
step = 0
while not (run / "end").exists():
    if not (run / f"silent_{rank}").exists():
        step += 1
        progress.beat(step)
    time.sleep(0.02)
progress.end()
"""


class Ranks:
    """Two ranks; the first one has started a watchdog."""

    def __init__(self, run: Path, *words: str) -> None:
        self.run = RunFolder(run)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": "29777"}
        command = [sys.executable, "-c", RANK, str(run)]
        self.processes = [
            subprocess.Popen([*command, str(rank), *words], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        folders = {process.stdout.readline().strip() for process in self.processes if process.stdout}
        (folder,) = folders
        self.folder = Path(folder)

    def wait_for_fault(self, rank: int) -> None:
        """Wait until a fault of the rank is recorded. As with a launcher, the other rank is ended only afterwards."""
        deadline = time.monotonic() + 10
        while not has_fault(self.run, rank):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def first_fault(self) -> Fault:
        """Wait until both ranks have ended, and return the first fault."""
        for process in self.processes:
            process.wait(40)
        deadline = time.monotonic() + 10
        while len(read_faults(self.run)) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        fault = first_fault(read_faults(self.run))
        assert fault
        return fault

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.close()


def test_ranks_that_end_normally_leave_no_faults_or_files(ranks: Ranks, tmp_path: Path) -> None:
    assert sorted(read_ranks(ranks.folder)) == [0, 1]
    (tmp_path / "end").touch()
    assert [process.wait(20) for process in ranks.processes] == [0, 0]
    assert not ranks.folder.exists()
    assert read_faults(ranks.run) == []
    assert not list((tmp_path / "logs" / "stacks").iterdir())


def test_no_watchdog_is_left_if_the_ranks_end_before_its_first_look(tmp_path: Path) -> None:
    (tmp_path / "end").touch()
    ranks = Ranks(tmp_path)
    assert [process.wait(20) for process in ranks.processes] == [0, 0]
    deadline = time.monotonic() + 10
    while watchdogs_of(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def watchdogs_of(run: Path) -> list[int]:
    """Return the processes of the running watchdogs of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            words = path.read_bytes().split(b"\0")
            if b"z2all_ds.cluster.launch.watchdog" in words and str(run).encode() in words:
                found.append(int(path.parent.name))
    return found


def test_a_pause_of_the_whole_node_is_no_hang(ranks: Ranks, tmp_path: Path) -> None:
    """As with `docker pause`, or on a machine that swaps: the watchdog is paused, too."""
    (watchdog,) = watchdogs_of(tmp_path)
    everybody = [watchdog, *(process.pid for process in ranks.processes)]
    time.sleep(0.5)
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)  # the watchdog looks before the ranks have continued
    (tmp_path / "end").touch()
    assert [process.wait(20) for process in ranks.processes] == [0, 0]
    assert read_faults(ranks.run) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named(ranks: Ranks, victim: int, tmp_path: Path) -> None:
    ranks.processes[victim].kill()
    ranks.wait_for_fault(victim)
    ranks.processes[1 - victim].terminate()
    fault = ranks.first_fault()
    assert (fault.kind, fault.rank) == (KILLED, victim)
    assert fault.line.startswith(f"ClusterError: rank {victim}: its process was killed from outside in step ")


@pytest.mark.parametrize(
    ("launch", "recorded", "locked", "kinds"),
    [
        ("", [], "", ["failed"]),
        ("", ["started"], "", ["started", "failed"]),
        ("", ["failed"], "", ["failed"]),  # by rank 0
        ("", ["started", "failed"], "", ["started", "failed", "failed"]),  # rank 0 knew only that rank 1 was gone
        ("", ["started", "done"], "", ["started", "done"]),
        ("", ["started"], LOCK, ["started"]),  # by the next job
        ("0123", ["started"], "", ["started", "failed"]),  # the launcher was killed
        ("0123", ["started"], LAUNCH_LOCK, ["started"]),  # it lives
        ("0123", ["started", "failed"], "", ["started", "failed"]),  # it has ended
    ],
)
def test_without_a_living_launcher_of_ours_the_end_of_the_run_is_recorded(
    launch: str, recorded: list[str], locked: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCH_VARIABLE, launch)
    ranks = Ranks(tmp_path, "1")
    lock = open_lock_file(tmp_path / (locked or "unused"))
    assert wait_for_lock(lock, 0.0)
    try:
        writer = RunWriter(ranks.run)
        for kind in ("stopped", *recorded):  # the first is of an earlier launch
            writer.event(kind, step=3)
        writer.close()
        ranks.processes[1].kill()
        ranks.wait_for_fault(1)
        ranks.processes[0].terminate()
        ranks.first_fault()
        deadline = time.monotonic() + 10
        while watchdogs_of(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        ranks.close()
        os.close(lock)
    _, *events = read_records(ranks.run.events)
    assert [event["event"] for event in events] == kinds
    if len(kinds) > len(recorded):
        assert events[-1]["step"] == 3
        assert events[-1]["reason"].startswith("ClusterError: rank 1: its process was killed from outside in step ")


def test_a_stopped_rank_is_named_and_the_stacks_of_the_other_are_kept(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "silent_0").touch()  # rank 0 waits for rank 1, as in a collective
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    fault = ranks.first_fault()
    assert (fault.kind, fault.rank) == (HANG, 1)
    assert "its process is stopped" in fault.line
    assert "most recent call first" in ranks.run.stacks(0).read_text()
    assert [process.returncode for process in ranks.processes] == [-signal.SIGTERM, -signal.SIGKILL]


def test_a_silent_rank_that_is_behind_is_named_with_its_stacks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "silent_1").touch()
    time.sleep(0.3)
    (tmp_path / "silent_0").touch()
    fault = ranks.first_fault()
    assert (fault.kind, fault.rank) == (HANG, 1)
    assert str(ranks.run.stacks(1)) in fault.line
    assert "<module>" in ranks.run.stacks(1).read_text()


def test_a_crashed_rank_is_named_with_its_stacks(ranks: Ranks) -> None:
    os.kill(ranks.processes[1].pid, signal.SIGSEGV)
    ranks.wait_for_fault(1)
    ranks.processes[0].terminate()
    fault = ranks.first_fault()
    assert (fault.kind, fault.rank) == (BUG, 1)
    assert "crashed in step " in fault.line
    assert f"(Segmentation fault). See {ranks.run.stacks(1)}." in fault.line
    assert "most recent call first" in ranks.run.stacks(1).read_text()


def test_a_rank_that_torch_aborts_is_not_the_first_fault(ranks: Ranks) -> None:
    """torch aborts a rank after it has logged that NCCL has lost another one."""
    log = ranks.run.rank_log(0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("[rank0]:[E1116 15:06:57.45 ProcessGroupNCCL.cpp:2303] failure detected by watchdog\n")
    os.kill(ranks.processes[0].pid, signal.SIGABRT)
    ranks.processes[0].wait()
    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    fault = ranks.first_fault()
    assert (fault.kind, fault.rank) == (KILLED, 1), read_faults(ranks.run)


def test_faults_are_plain_json(ranks: Ranks) -> None:
    ranks.processes[1].kill()
    ranks.processes[0].kill()
    ranks.first_fault()
    for file in ranks.run.faults.glob("*.json"):
        assert json.loads(file.read_text())["kind"] == KILLED


BUSY_RANK = """
import sys, time
from pathlib import Path
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.train.processes.progress import Progress, watch_folder

run, restarts = RunFolder(Path(sys.argv[1])), sys.argv[2] == "restarts"
print(watch_folder(run), flush=True)
progress = Progress(run, World(1, 2, 1, 2), 60.0)
deadline = time.monotonic() + 2.0
while time.monotonic() < deadline:
    if restarts:
        time.sleep(0.001)
        progress.end()
        progress = Progress(run, World(1, 2, 1, 2), 60.0)
    else:
        for _ in range(1000):
            progress.beat()
progress.end()
"""


@pytest.mark.parametrize("what", ["beats", "restarts"])
def test_a_busy_rank_never_looks_silent_and_survives_the_request_for_its_stacks(tmp_path: Path, what: str) -> None:
    command = [sys.executable, "-c", BUSY_RANK, str(tmp_path / "run"), what]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout
        folder = Path(rank.stdout.readline().strip())
        reads = 0
        while rank.poll() is None:
            for seen in read_ranks(folder).values():
                reads += 1
                assert time.monotonic() - seen.beat_at < 60 and seen.step == -1, seen
                if what == "restarts":
                    os.kill(seen.pid, signal.SIGUSR2)
                    # A flood once ended the rank by signal 11, perhaps in faulthandler, which reads changing frames.
                    time.sleep(0.0005)
    assert rank.returncode == 0
    assert reads > 10
