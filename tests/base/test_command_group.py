"""Ending what was started: real trees of processes of which nothing may be left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from z2all_ds.base import command_group
from z2all_ds.base.command_group import end_group, run_group
from z2all_ds.base.machine import group_is_alive

# A shell, its python, and that one's python, which does not listen to SIGTERM.
POLITE = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
# It holds some memory, so that even a SIGKILL takes a moment to end it.
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); ballast = b'x' * 200_000_000; {POLITE}"
BETWEEN = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
SHELL = '"$0" -c "$1" "$2"; true'


def start_tree(innermost: str) -> tuple["subprocess.Popen[bytes]", int]:
    """The shell, leader of its own session, and the number of the innermost process."""
    command = ["bash", "-c", SHELL, sys.executable, BETWEEN, innermost]
    shell = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert shell.stdout
    return shell, int(shell.stdout.readline())


def living_members(group: int) -> list[int]:
    """Processes of a group that are neither gone nor zombies, straight from /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(folder.name))
    return sorted(found)


def end(shell: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_group, "GRACE_SECONDS", grace_seconds)
        end_group(shell)
    assert shell.stdout
    shell.stdout.close()


@pytest.mark.parametrize("innermost", [DEAF, POLITE], ids=["deaf", "polite"])
def test_no_process_of_the_group_is_left(innermost: str) -> None:
    shell, deepest = start_tree(innermost)
    members = living_members(shell.pid)
    assert {shell.pid, deepest} < set(members)
    assert len(members) == 3
    assert group_is_alive(shell.pid)
    end(shell, 0.3)
    assert living_members(shell.pid) == []
    assert not group_is_alive(shell.pid)
    assert shell.returncode is not None


def test_orphans_are_ended_after_the_leader_is_gone() -> None:
    shell, deepest = start_tree(DEAF)
    os.kill(shell.pid, signal.SIGKILL)
    shell.wait()
    assert deepest in living_members(shell.pid)
    end(shell, 0.3)
    assert living_members(shell.pid) == []
    assert shell.returncode == -signal.SIGKILL


def test_ending_what_has_ended_is_no_error() -> None:
    shell = subprocess.Popen(["true"], stdout=subprocess.PIPE, start_new_session=True)
    shell.wait()
    end(shell, 60)  # were it to wait, this test would hang
    assert shell.returncode == 0


def test_the_process_itself_is_outside_the_group_it_ends() -> None:
    shell, _ = start_tree(POLITE)
    assert os.getpgid(shell.pid) == shell.pid != os.getpgid(0)
    end(shell, 5)
    assert shell.returncode == -signal.SIGTERM


def test_a_second_ctrl_c_ends_them_at_once() -> None:
    """A process that ends a deaf tree with a long grace, interrupted while it waits."""
    code = f"""
import subprocess, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from tests.base.test_command_group import DEAF, start_tree
from z2all_ds.base import command_group

command_group.GRACE_SECONDS = 60.0
shell, deepest = start_tree(DEAF)
print(shell.pid, flush=True)
command_group.end_group(shell)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as us:
        assert us.stdout
        number = int(us.stdout.readline())
        while len(living_members(number)) == 3:  # until SIGTERM has ended all but the deaf one
            time.sleep(0.01)
        us.send_signal(signal.SIGINT)
        _, errors = us.communicate(timeout=50)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert living_members(number) == []


def test_a_command_is_run_to_its_end(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "out.log"
    command = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"]
    assert run_group(command, os.environ, log, stderr_to_log=True) == 3
    assert sorted(log.read_text().split()) == ["err", "out"]
