"""Tests that processes and Ray give the same results, pass on errors, and leave no process running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import ended
from z2all_ds.base.errors import ClusterError, ConfigError, DataError, MachineError
from z2all_ds.corpus import Executor


def square(number: int) -> int:
    return number * number


def fail_at_three(number: int) -> int:
    if number == 3:
        raise DataError("row 3", "is bad", "Fix it.")
    return number


def vanish(number: int) -> int:
    os._exit(9)


def process_id(number: int) -> int:
    time.sleep(0.05)
    return os.getpid()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_task_runs_once(workers: int) -> None:
    assert sorted(Executor(workers).run(square, range(10))) == [(n, n * n) for n in range(10)]
    assert list(Executor(workers).run(square, [])) == []


def test_tasks_are_distributed_to_all_worker_processes() -> None:
    found = {pid for _, pid in Executor(2).run(process_id, range(20))}
    assert len(found) == 2
    assert os.getpid() not in found
    assert {pid for _, pid in Executor(1).run(process_id, range(3))} == {os.getpid()}


@pytest.mark.parametrize("workers", [1, 2])
def test_package_errors_keep_their_fields(workers: int) -> None:
    with pytest.raises(DataError, match=r"^row 3: is bad\. Fix it\.$") as caught:
        list(Executor(workers).run(fail_at_three, range(10)))
    assert (caught.value.what, caught.value.rule, caught.value.fix) == ("row 3", "is bad", "Fix it.")


def test_a_worker_that_dies_is_reported() -> None:
    with pytest.raises(MachineError, match=r"ended unexpectedly.*fewer --workers"):
        list(Executor(2).run(vanish, range(2)))


def test_zero_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Executor(0)


SLEEPERS = """
import os, sys, time
from pathlib import Path
from z2all_ds.corpus import Executor

def sleep(path):
    Path(path).write_text(str(os.getpid()))
    time.sleep(120)

if __name__ == "__main__":
    list(Executor(2).run(sleep, sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent_process(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    marks = [tmp_path / "a", tmp_path / "b"]
    command = [sys.executable, str(script), *map(str, marks)]
    with ended(subprocess.Popen(command, stderr=subprocess.DEVNULL)) as owner:
        deadline = time.monotonic() + 60
        while not all(mark.exists() and mark.read_text() for mark in marks):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        owner.send_signal(number)
        owner.wait(30)
        pids = [int(mark.read_text()) for mark in marks]
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline, "a worker is still running"
            time.sleep(0.1)


ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")


@pytest.mark.extended
def test_ray_gives_the_same_results_and_passes_on_errors() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        executor = Executor(ray="local")  # uses the existing connection and keeps it open
        assert sorted(executor.run(square, range(10))) == [(n, n * n) for n in range(10)]
        with pytest.raises(DataError, match=r"^row 3: is bad\. Fix it\.$"):
            list(executor.run(fail_at_three, range(10)))
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_an_unreachable_ray_address_is_reported() -> None:
    with pytest.raises(ClusterError, match=r"not reachable.*ray start --head"):
        list(Executor(ray="127.0.0.1:1").run(square, [1]))


FAILS_WHILE_ANOTHER_SLEEPS = """
import os, sys, time
from pathlib import Path
from z2all_ds.corpus import Executor
from z2all_ds.base.errors import DataError

def sleep_or_fail(path):
    mark = Path(path)
    if mark.name == "sleeper":
        mark.write_text(str(os.getpid()))
        time.sleep(120)
    while not mark.with_name("sleeper").exists():
        time.sleep(0.05)
    raise DataError("row 3", "is bad", "Fix it.")

if __name__ == "__main__":
    list(Executor(ray="local").run(sleep_or_fail, sys.argv[1:]))
"""


@pytest.mark.extended
def test_an_error_on_ray_ends_the_other_tasks(tmp_path: Path) -> None:
    script = tmp_path / "tasks.py"
    script.write_text(FAILS_WHILE_ANOTHER_SLEEPS)
    command = [sys.executable, str(script), str(tmp_path / "sleeper"), str(tmp_path / "fails")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stderr.strip().splitlines()[-1].endswith("DataError: row 3: is bad. Fix it.")
    pid = int((tmp_path / "sleeper").read_text())
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "a task is still running"
        time.sleep(0.1)


INTERRUPTED = """
import time
from z2all_ds.corpus import Executor
try:
    list(Executor(2).run(time.sleep, [60, 60]))
except KeyboardInterrupt:
    raise SystemExit(130)
"""


def test_ctrl_c_while_the_workers_still_start_shows_no_traceback() -> None:
    def importing_workers() -> int:
        """Return how many workers have begun to import modules."""
        count = 0
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                is_worker = parent == process.pid and b"spawn_main" in (entry / "cmdline").read_bytes()
                count += is_worker and "lib-dynload" in (entry / "maps").read_text()
            except OSError:  # ended in the meantime
                continue
        return count

    command = [sys.executable, "-c", INTERRUPTED]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with ended(process):
        while importing_workers() < 2:
            assert process.poll() is None
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
