"""Tests of the builds of DeepSpeed's ops: an interrupted build leaves no process and no lock that others wait for."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.built_ops import own_deepspeed, pretend_built
from z2all_ds.base import machine
from z2all_ds.base.config import load_run_config
from z2all_ds.zero.build_locks import find_locks
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.op_builds import needed_ops, prebuild, wait_for_locks

BUILD = "from z2all_ds.zero.op_builds import prebuild; prebuild(['deepspeed_shm_comm'])"
PATIENCE_SECONDS = 60


def compilers_in(folder: Path) -> list[str]:
    """Return the command lines of processes that work inside a build folder: ninja and its compilers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve().is_relative_to(folder) and process.name != str(os.getpid()):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # the process has ended
            continue
    return found


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_compiler_running(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    # Exits on SIGTERM and runs `finally` blocks, as z2all does.
    code = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); {BUILD}"
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(compilers_in(tmp_path)) >= 2, "the compiler")  # ninja and one compiler
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_SECONDS)
    wait_for(lambda: not compilers_in(tmp_path), "the end of the compilers")
    # The lock of the interrupted build does not block the next build.
    for lock in find_locks(tmp_path):
        an_hour_ago = time.time() - 3600  # in a container the holder may be invisible, so only the age counts
        os.utime(lock.path, (an_hour_ago, an_hour_ago))
    wait_for_locks(tmp_path, ["deepspeed_shm_comm"])
    assert find_locks(tmp_path) == []


def test_an_op_built_for_another_environment_counts_as_not_built(tmp_path: Path) -> None:
    """The other path may even end in the path of this environment. Torch would build the op again in every rank."""
    pretend_built(tmp_path, "async_io")
    assert machine.op_is_built(tmp_path, "async_io")
    pretend_built(tmp_path, "async_io", Path(f"/clone{own_deepspeed()}"))
    assert not machine.op_is_built(tmp_path, "async_io")


def test_a_library_that_needs_no_compiler_is_built_once(tmp_path: Path) -> None:
    """A killed build of another environment leaves its plan. Ours is written again, newer than the finished library."""
    op = "deepspeed_shm_comm"
    prebuild([op])
    shutil.copytree(machine.extensions_dir() / op, tmp_path / op, ignore=shutil.ignore_patterns("lock"))
    (tmp_path / op / "build.ninja").touch()
    assert not machine.op_is_built(tmp_path, op)
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    command = [sys.executable, "-c", BUILD]
    first, second = (subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2))
    assert f"built DeepSpeed op {op}" in first.stderr
    assert (second.returncode, second.stderr) == (0, "")
    assert machine.op_is_built(tmp_path, op)


def test_locks_of_ops_that_are_not_needed_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "async_io").mkdir()
    with (tmp_path / "async_io" / "lock").open("w"):
        wait_for_locks(tmp_path, ["cpu_adam"])
        (lock,) = find_locks(tmp_path)
        assert lock.state == "held"


def test_a_failed_build_is_reported_in_one_line_that_names_the_log(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"), "CXX": str(compiler)}
    command = [sys.executable, "-c", f"import sys; sys.argv = ['z2all']; {BUILD}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    last = result.stderr.strip().splitlines()[-1]
    assert "MachineError: DeepSpeed op deepspeed_shm_comm: does not build" in last
    assert re.search(r"deepspeed_shm_comm\.\S+-\d+\.build\.log", last)


@pytest.mark.parametrize(
    ("name", "device", "ops"),
    [
        ("zero2", "cpu", ["deepspeed_shm_comm"]),
        ("zero2_offload", "cpu", ["deepspeed_shm_comm", "cpu_adam"]),
        ("zero2", "cuda", []),
        ("zero3_offload", "cuda", ["cpu_adam"]),
    ],
)
def test_only_ops_that_the_run_loads_are_built(name: str, device: str, ops: list[str]) -> None:
    run = load_run_config("z2all_tiny", [f"deepspeed={name}"])
    assert needed_ops(resolve(run, 1, device), device) == ops
