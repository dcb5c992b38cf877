"""Child processes, all of them real: ending a process tree, exchanging messages, and owned commands."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from z2all_ds.base import child_process
from z2all_ds.base.child_process import JsonProcess, end_group, owned, package_environment, run_group, start
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.machine import group_is_alive

# The tree: a shell, a Python process, and its Python child, which is POLITE (ends on SIGTERM) or DEAF (ignores it).
POLITE = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
# DEAF allocates memory so that even SIGKILL takes a moment to end it.
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); ballast = b'x' * 200_000_000; {POLITE}"
BETWEEN = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
SHELL = '"$0" -c "$1" "$2"; true'


def start_tree(innermost: str) -> tuple["subprocess.Popen[bytes]", int]:
    """Start the tree; return the shell, which leads its own session, and the pid of the innermost process."""
    command = ["bash", "-c", SHELL, sys.executable, BETWEEN, innermost]
    shell = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert shell.stdout
    return shell, int(shell.stdout.readline())


def living_members(group: int) -> list[int]:
    """Return the pids in a process group that are still running (no zombies), read from /proc."""
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
        patch.setattr(child_process, "GRACE_SECONDS", grace_seconds)
        end_group(shell)
    assert shell.stdout
    shell.stdout.close()


@pytest.mark.parametrize("innermost", [DEAF, POLITE], ids=["deaf", "polite"])
def test_end_group_leaves_no_process_of_the_group(innermost: str) -> None:
    shell, deepest = start_tree(innermost)
    members = living_members(shell.pid)
    assert {shell.pid, deepest} < set(members)
    assert len(members) == 3
    assert group_is_alive(shell.pid)
    end(shell, 0.3)
    assert living_members(shell.pid) == []
    assert not group_is_alive(shell.pid)
    assert shell.returncode is not None


def test_orphans_are_ended_after_their_group_leader_is_gone() -> None:
    shell, deepest = start_tree(DEAF)
    os.kill(shell.pid, signal.SIGKILL)
    shell.wait()
    assert deepest in living_members(shell.pid)
    end(shell, 0.3)
    assert living_members(shell.pid) == []
    assert shell.returncode == -signal.SIGKILL


def test_ending_a_process_that_has_already_ended_is_not_an_error() -> None:
    shell = subprocess.Popen(["true"], stdout=subprocess.PIPE, start_new_session=True)
    shell.wait()
    end(shell, 60)  # would take a minute if it waited for the grace period
    assert shell.returncode == 0


def test_the_calling_process_is_not_in_the_group_it_ends() -> None:
    shell, _ = start_tree(POLITE)
    assert os.getpgid(shell.pid) == shell.pid != os.getpgid(0)
    end(shell, 5)
    assert shell.returncode == -signal.SIGTERM


def test_a_second_ctrl_c_kills_the_tree_at_once() -> None:
    """Interrupt a process that waits out a long grace period for a tree that ignores SIGTERM."""
    code = f"""
import subprocess, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from tests.base.test_child_process import DEAF, start_tree
from z2all_ds.base import child_process

child_process.GRACE_SECONDS = 60.0
shell, deepest = start_tree(DEAF)
print(shell.pid, flush=True)
child_process.end_group(shell)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as us:
        assert us.stdout
        number = int(us.stdout.readline())
        while len(living_members(number)) == 3:  # until SIGTERM has ended all but the innermost process
            time.sleep(0.01)
        us.send_signal(signal.SIGINT)
        _, errors = us.communicate(timeout=50)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert living_members(number) == []


def test_run_group_waits_for_the_command_and_logs_its_output(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "out.log"
    command = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"]
    assert run_group(command, os.environ, log, stderr_to_log=True) == 3
    assert sorted(log.read_text().split()) == ["err", "out"]


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "log").symlink_to("target")
    with pytest.raises(ConfigError, match="is a link"):
        run_group([sys.executable, "-c", ""], os.environ, tmp_path / "log")
    assert (tmp_path / "target").read_text() == "kept"


TALKS = """
import os, sys, time
from z2all_ds.base.child_process import MARK, read_messages, write_message

os.write(1, b"a banner\\n" + MARK.encode() + b"no JSON\\n" + MARK.encode() + b"[1]\\n{}\\n")
for message in read_messages(sys.stdin):
    print('{"plain": true}', message["text"], file=sys.stderr, sep="\\n", flush=True)
    write_message(sys.stdout, message)
    time.sleep(message.get("seconds", 0))
sys.exit(3)
"""


def talking(error_mark: str = child_process.MARK) -> JsonProcess:
    return JsonProcess([sys.executable, "-c", TALKS], child_process.package_environment(), error_mark=error_mark)


def test_messages_are_sent_and_received_and_other_lines_are_skipped() -> None:
    process = talking()
    for text in ("ä one", "two"):
        process.send({"text": text})
        assert process.receive(60) == {"text": text}
    with pytest.raises(TimeoutError):
        process.receive(0.01)
    process.close(60)
    assert process.receive(60) is None
    assert process.receive(60) is None
    assert process.wait() == 3
    assert [*process.error_lines] == ['{"plain": true}', "ä one", '{"plain": true}', "two"]
    process.send({"text": "nobody hears it"})


def test_plain_json_objects_on_stderr_are_messages_if_requested() -> None:
    process = talking(error_mark="")
    process.send({"text": "one"})
    found = [process.receive(60), process.receive(60)]
    assert {"plain": True} in found and {"text": "one"} in found
    process.close(60)
    process.wait()
    assert [*process.error_lines] == ["one"]


def test_a_process_that_does_not_end_in_time_is_killed() -> None:
    process = talking()
    process.send({"text": "", "seconds": 600})
    assert process.receive(60)
    process.close(0.1)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(("script", "code"), [("exit 4", 4), ("kill -9 $$", 137), ("echo; exec sleep 60", 128 + 15)])
def test_an_owned_command_returns_its_exit_code_and_receives_sigterm(script: str, code: int) -> None:
    with start(owned(["sh", "-c", f'test -z "$Z2ALL_OWNER" && {script}']), stdout=subprocess.PIPE) as process:
        assert process.stdout
        if process.stdout.readline():
            process.terminate()
        assert process.wait(30) == code


def test_an_owned_command_ends_after_its_owner_is_killed() -> None:
    code = """
import subprocess
from z2all_ds.base.child_process import owned, start
process = start(owned(["sh", "-c", "sleep 60 & echo; wait"]), stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
process.wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as us:
        assert us.stdout
        group = int(us.stdout.readline())
        assert len(living_members(group)) == 3
        us.kill()
    deadline = time.monotonic() + 20
    while living_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living_members(group) == []


@pytest.mark.processes
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know PYTHONSAFEPATH")
def test_a_child_finds_this_package_but_imports_nothing_from_its_current_folder(tmp_path: Path) -> None:
    for planted in ("z2all_ds.py", "colorsys.py"):
        (tmp_path / planted).write_text("raise SystemExit(7)")
    command = [sys.executable, "-c", "import colorsys, z2all_ds.base.child_process"]
    for python_path in ("", ":/nowhere"):  # an empty part means the current folder
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        assert start(command, {**environment, "PYTHONPATH": python_path}, cwd=tmp_path).wait() == 0


def test_pythonsafepath_of_the_user_stays() -> None:
    assert package_environment({"PYTHONSAFEPATH": ""})["PYTHONSAFEPATH"] == ""
    once = package_environment({"PYTHONPATH": "/a"})
    assert package_environment(once) == once


@pytest.mark.processes
def test_stderr_of_a_child_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    process = JsonProcess(["sh", "-c", "printf 'a\\tb\\033]0;title\\007\\n' >&2"], shows_errors=True)
    assert process.wait() == 0
    assert capsys.readouterr().err == "a\tb\\x1b]0;title\\x07\n"
