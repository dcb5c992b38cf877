"""The process that starts the ranks of one machine, with small modules instead of training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import ended
from tests.helpers.warm_python import FRESH
from z2all_ds.base.child_process import run_group
from z2all_ds.base.machine import process_is_alive
from z2all_ds.base.parent_watch import OWNER_VARIABLE, owner_mark
from z2all_ds.base.world import World
from z2all_ds.train.processes.local_ranks import local_command
from z2all_ds.train.processes.starter import STOP_SIGNALS, blocked_signals

WRITES_ITS_ENVIRONMENT = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps([sys.argv[2:], dict(os.environ)]))
"""
WRITES_ITS_SIGNALS = """
import signal
numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
ignored = (signal.getsignal(number) is signal.SIG_IGN for number in numbers)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), *ignored)
"""
RANK_1_FAILS = """
import os, sys, time
os.write(1, b"%d\\n" % os.getpid())  # one write: ranks share the file
if os.environ["RANK"] != "1":
    time.sleep(600)
{ending}
"""


def ranks_of(folder: Path, source: str) -> dict[str, str]:
    """Write the module `a_rank` and return an environment in which the ranks can import it."""
    (folder / "a_rank.py").write_text(source)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_each_rank_gets_its_environment_and_the_arguments(tmp_path: Path) -> None:
    environment = ranks_of(tmp_path, WRITES_ITS_ENVIRONMENT)
    arguments = [str(tmp_path), "--config", "my run.yaml", "train.steps=5"]
    assert run_group(local_command(arguments, 3, 29501, "a_rank"), environment, tmp_path / "log") == 0
    for rank in range(3):
        found, variables = json.loads((tmp_path / str(rank)).read_text())
        assert found == arguments[1:]
        assert World.from_environment(variables) == World(rank, 3, rank, 3)
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("127.0.0.1", "29501")


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(4)", 4), ("os.kill(os.getpid(), 9)", 128 + 9)])
def test_the_first_rank_that_fails_ends_all_with_its_exit_code(tmp_path: Path, ending: str, code: int) -> None:
    environment = ranks_of(tmp_path, RANK_1_FAILS.format(ending=ending))
    began = time.monotonic()
    assert run_group(local_command([], 3, 29501, "a_rank"), environment, tmp_path / "log") == code
    assert time.monotonic() - began < 60  # the others would sleep for 600
    pids = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert 1 <= len(pids) <= 3
    assert not any(process_is_alive(pid, None) for pid in pids)


def test_the_starter_loads_neither_torch_nor_deepspeed_nor_numpy() -> None:
    code = "import sys, z2all_ds.train.processes.starter; print({'torch', 'deepspeed', 'numpy'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_an_owned_starter_and_its_ranks_never_receive_signals_to_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FRESH, "1")  # a process forked from a warm one inherits neither blocked nor ignored signals
    environment = {**ranks_of(tmp_path, WRITES_ITS_SIGNALS), OWNER_VARIABLE: owner_mark()}
    with blocked_signals():
        process = subprocess.Popen(local_command([], 1, 29501, "a_rank"), env=environment, stdout=subprocess.PIPE)
    with ended(process):
        for number in STOP_SIGNALS:  # long before the interpreter has started
            process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stdout is not None and process.stdout.read() == b"set() True True True True\n"


def test_a_signal_to_the_process_group_ends_starter_and_ranks(tmp_path: Path) -> None:
    """`child_process.py` sends this signal on Ctrl-C."""
    environment = ranks_of(tmp_path, "import os, time; os.write(1, b'1'); time.sleep(600)")
    command = local_command([], 2, 29501, "a_rank")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"11"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) == -signal.SIGTERM
    assert process.stdout.read() == b""  # no rank is left that holds the pipe open
