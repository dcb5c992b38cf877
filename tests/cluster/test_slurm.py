"""Launches by DeepSpeed's slurm launcher: on real slurm daemons, and what is read and refused without any."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import node_lab, slurm_lab
from tests.helpers.node_lab import Node
from tests.helpers.node_launches import NodeLaunch, assert_nothing_is_left, write_hostfile
from tests.helpers.training import losses, run_arguments, train
from z2all_ds.cluster import slurm
from z2all_ds.cluster.nodes import Node as PlannedNode
from z2all_ds.cluster.plan import LaunchPlan, make_plan
from z2all_ds.errors import ClusterError
from z2all_ds.train.slurm_rank import rank_environment

TOLERANCE = 1e-6
"""fp32 sums of the same samples in another order; losses are about 7."""
SHAPE = ("train.global_batch=8", "train.micro_batch=2", "train.hang_seconds=30", "deepspeed=zero1")
STEPS = 4


@dataclass(frozen=True)
class Lab:
    """Two nodes, with slurm on them."""

    nodes: list[Node]
    config: Path

    def start(self, allocation: list[str], words: list[str], arguments: list[str]) -> NodeLaunch:
        within = ["env", f"SLURM_CONF={self.config}", "salloc", "--quiet", "--nodes=2", *allocation]
        options = ["--launcher", "slurm", "--no-health", *words]
        return NodeLaunch(self.nodes[0], "launch", *options, "--", *arguments, within=within)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if why := node_lab.why_no_lab() or slurm_lab.why_no_slurm():
        pytest.skip(why)
    with node_lab.node_lab(tmp_path_factory.mktemp("lab"), 2) as nodes:
        with slurm_lab.slurm_lab(tmp_path_factory.mktemp("slurm"), nodes) as config:
            yield Lab(nodes, config)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> list[float]:
    place = tmp_path_factory.mktemp("alone") / "run"
    done = train(place, small_corpus, small_tokenizer, *SHAPE, f"train.steps={STEPS}", ranks=1)
    assert done.returncode == 0, done.stderr
    return losses(place)


def ranks_on(node: Node) -> list[int]:
    """By their numbers outside."""
    found = node.processes("/launch/rank.py")
    return [pid for pid, command in found.items() if "srun" not in command and "launcher" not in command]


def test_the_losses_of_one_rank_on_all_of_the_allocation_without_ssh(
    lab: Lab, undisturbed: list[float], tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *SHAPE, f"train.steps={STEPS}")
    launch = lab.start(["--ntasks-per-node=2"], ["--no-preflight"], arguments)
    assert launch.wait() == 0, launch.output
    assert "2 nodes, 2 slots each (SLURM_TASKS_PER_NODE)" in launch.output
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, abs=TOLERANCE)
    assert len(list((tmp_path / "run" / "logs").glob("rank_*.log"))) == 4
    assert_nothing_is_left(lab.nodes)


def test_a_killed_rank_is_named_and_the_order_is_the_hostfile_s(
    lab: Lab, tmp_path: Path, small_corpus: Path, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is on n1, where the master's address points; slurm by itself would begin with n0."""
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-0123")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0,mlx5_1")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1,mlx5_1:1")  # DeepSpeed writes it on srun's command line
    hostfile = write_hostfile(tmp_path / "hosts.yaml", lab.nodes[::-1])
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *SHAPE, "train.steps=100000")
    launch = lab.start([], ["--hostfile", str(hostfile)], arguments)
    launch.wait_for_steps(tmp_path / "run", 2)
    (first,), (second,) = ranks_on(lab.nodes[1]), ranks_on(lab.nodes[0])
    given = {pid: Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in (first, second)}
    commands = "".join("".join(node.processes("").values()) for node in lab.nodes)
    began = time.monotonic()
    os.kill(second, signal.SIGKILL)
    assert launch.wait() == ClusterError.exit_code, launch.output
    assert time.monotonic() - began < 10
    assert "rank 1 on n0 failed first: ClusterError: rank 1: its process was killed from outside" in launch.output
    assert_nothing_is_left(lab.nodes)
    for environment in given.values():
        assert {"WANDB_API_KEY=very-secret-0123", "NCCL_IB_HCA=mlx5_0,mlx5_1"} <= set(environment)
        assert "UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1" in environment
    assert "SLURM_PROCID=0" in given[first]
    assert "srun" in commands
    assert "very-secret" not in commands + launch.output


def test_a_second_ctrl_c_leaves_nothing(lab: Lab, tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *SHAPE, "train.steps=100000")
    launch = lab.start([], ["--no-preflight"], arguments)
    launch.wait_for_steps(tmp_path / "run", 2)
    found = lab.nodes[0].processes("z2all_ds launch")
    (command,) = [pid for pid, text in found.items() if "salloc" not in text]
    for node in lab.nodes:
        for rank in ranks_on(node):
            os.kill(rank, signal.SIGSTOP)  # the first request would be granted before the second comes
    os.kill(command, signal.SIGTERM)
    launch.wait_for_words("once more ends it at once")
    os.kill(command, signal.SIGTERM)
    assert launch.wait() == 130, launch.output
    assert_nothing_is_left(lab.nodes, within_seconds=3.0)
