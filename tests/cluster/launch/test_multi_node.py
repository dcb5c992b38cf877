"""Tests of `z2all launch` without a second machine: a hostfile with localhost, and errors before the start."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.training import losses, run_arguments
from z2all_ds.cluster.launch.multi_node import is_this_machine
from z2all_ds.cluster.nodes import Node, SshAccess


def launch(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "z2all_ds", "launch", *words], capture_output=True, text=True)


def test_a_launch_on_this_machine_needs_no_ssh(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, "train.steps=2", "deepspeed=zero1")
    done = launch("--hostfile", str(tmp_path / "hosts"), "--", *arguments)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 2


def test_only_localhost_without_an_ssh_port_is_this_machine() -> None:
    assert is_this_machine([Node(name="localhost", slots=2)])
    assert not is_this_machine([Node(name="localhost", slots=2, ssh=SshAccess(port=2222))])
    assert not is_this_machine([Node(name="node1", slots=2)])
    assert not is_this_machine([Node(name="localhost", slots=1), Node(name="node1", slots=1)])


@pytest.mark.parametrize(
    ("hostfile", "options", "arguments", "code", "line"),
    [
        ("n1 slots=1\nn1 slots=1", [], [], 5, "line 2: n1: already listed in line 1"),
        ("n1 slots=1", ["--launcher", "rsh"], [], 5, "launcher 'rsh': must be one of ssh, pdsh, openmpi, slurm"),
        ("n1 slots=1", [], ["train.stepz=1"], 2, "train.stepz: no such setting. Did you mean train.steps?"),
    ],
)
def test_invalid_input_gives_a_one_line_error(
    tmp_path: Path, hostfile: str, options: list[str], arguments: list[str], code: int, line: str
) -> None:
    (tmp_path / "hosts").write_text(hostfile)
    done = launch("--hostfile", str(tmp_path / "hosts"), *options, "--", f"run_dir={tmp_path / 'run'}", *arguments)
    assert done.returncode == code, done.stderr
    assert line in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
