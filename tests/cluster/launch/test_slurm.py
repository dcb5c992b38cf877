"""Tests of launches with DeepSpeed's slurm launcher: with real slurm daemons, and parsing and errors without them."""

import io
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.helpers import node_lab, slurm_lab
from tests.helpers.command import ROOT
from tests.helpers.node_lab import Node
from tests.helpers.node_launches import NodeLaunch, assert_nothing_is_left, write_hostfile
from tests.helpers.training import losses, run_arguments, train
from z2all_ds.base.child_process import package_environment
from z2all_ds.base.config import RunConfig
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.fault_records import KILLED, Fault, first_fault, forget_faults, read_faults, write_fault
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World, tasks_of_nodes
from z2all_ds.cluster.launch import slurm
from z2all_ds.cluster.launch.plan import LaunchPlan, make_plan
from z2all_ds.cluster.nodes import Node as PlannedNode

TOLERANCE = 1e-6
"""For fp32 sums of the same samples in another order; losses are about 7."""
SHAPE = ("train.global_batch=8", "train.micro_batch=2", "train.hang_seconds=30", "deepspeed=zero1")
STEPS = 4
SHELL = """\
"$@"
code=$?
for _ in $(seq 20); do
    left=$(squeue --steps --noheader --format=%i)
    [ -z "$left" ] && break
    sleep 0.1
done
echo "steps left: ${left:-none}"
exit $code
"""
"""The user's shell in an allocation, which continues after the launch and does not end the launch's processes."""


@dataclass(frozen=True)
class Lab:
    """Two nodes that run slurm."""

    nodes: list[Node]
    config: Path

    def start(self, allocation: list[str], words: list[str], arguments: list[str]) -> NodeLaunch:
        within = ["env", f"SLURM_CONF={self.config}", "salloc", "--quiet", "--nodes=2", *allocation]
        within += ["bash", "-c", SHELL, "shell"]
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
    """Return the pids of the ranks on a node, as seen from outside it."""
    found = node.processes("/launch/rank.py")
    return [pid for pid, command in found.items() if "srun" not in command and "launcher" not in command]


@pytest.mark.extended
def test_a_launch_on_the_whole_allocation_without_ssh_has_the_losses_of_one_rank(
    lab: Lab, undisturbed: list[float], tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *SHAPE, f"train.steps={STEPS}")
    launch = lab.start(["--ntasks-per-node=2"], ["--no-preflight"], arguments)
    assert launch.wait() == 0, launch.output
    assert "2 nodes, slots=2 on each (SLURM_TASKS_PER_NODE)" in launch.output
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, abs=TOLERANCE)
    assert len(list((tmp_path / "run" / "logs").glob("rank_*.log"))) == 4
    assert_nothing_is_left(lab.nodes)


@pytest.mark.extended
def test_a_killed_rank_is_named_and_ranks_are_in_the_order_of_the_hostfile(
    lab: Lab, tmp_path: Path, small_corpus: Path, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is on n1, to which the master's address points; slurm would start with n0 by default."""
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-0123")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0,mlx5_1")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1,mlx5_1:1")  # DeepSpeed puts it on srun's command line
    hostfile = write_hostfile(tmp_path / "hosts.yaml", lab.nodes[::-1])
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *SHAPE, "train.steps=100000")
    launch = lab.start([], ["--hostfile", str(hostfile)], arguments)
    launch.wait_for_steps(tmp_path / "run", 2)
    (first,), (second,) = ranks_on(lab.nodes[1]), ranks_on(lab.nodes[0])
    given = {pid: Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in (first, second)}
    commands = "".join("".join(node.processes("").values()) for node in lab.nodes)
    began = time.monotonic()
    for process in (*lab.nodes[0].processes("z2all_ds.cluster.launch.watchdog"), second):  # slurm's cgroups kill both
        os.kill(process, signal.SIGKILL)
    assert launch.wait() == ClusterError.exit_code, launch.output
    assert time.monotonic() - began < 10
    assert "steps left: none" in launch.output
    assert "rank 1 on n0 failed first: ClusterError: rank 1: its process was killed from outside (srun" in launch.output
    assert_nothing_is_left(lab.nodes)
    for environment in given.values():
        assert {"WANDB_API_KEY=very-secret-0123", "NCCL_IB_HCA=mlx5_0,mlx5_1"} <= set(environment)
        assert "UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1" in environment
    assert "SLURM_PROCID=0" in given[first]
    assert "srun" in commands
    assert "very-secret" not in commands + launch.output


@pytest.mark.extended
def test_without_ssh_the_error_suggests_the_option_no_preflight(
    lab: Lab, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    """Slurm provides no ssh port, and nothing listens on port 22 of the nodes."""
    launch = lab.start([], [], run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *SHAPE, "train.steps=1"))
    assert launch.wait() == ClusterError.exit_code
    (line,) = [line for line in launch.output.splitlines() if line.startswith("ClusterError: ")]
    assert line.startswith("ClusterError: n0: ssh: ")
    assert line.endswith("If ssh to the nodes is closed, launch with --no-preflight.")


@pytest.mark.extended
def test_a_second_sigterm_ends_the_launch_at_once_and_leaves_nothing(
    lab: Lab, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *SHAPE, "train.steps=100000")
    launch = lab.start([], ["--no-preflight"], arguments)
    launch.wait_for_steps(tmp_path / "run", 2)
    found = lab.nodes[0].processes("z2all_ds launch")
    (command,) = [pid for pid, text in found.items() if "squeue" not in text]
    for node in lab.nodes:
        for rank in ranks_on(node):
            os.kill(rank, signal.SIGSTOP)  # else the first request would be completed before the second
    os.kill(command, signal.SIGTERM)
    launch.wait_for_words("repeat to end it at once")
    os.kill(command, signal.SIGTERM)
    assert launch.wait() == 130, launch.output
    assert "steps left: none" in launch.output
    assert_nothing_is_left(lab.nodes, within_seconds=3.0)


@pytest.mark.extended
def test_a_killed_launcher_leaves_nothing(lab: Lab, tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *SHAPE, "train.steps=100000")
    launch = lab.start([], ["--no-preflight"], arguments)
    launch.wait_for_steps(tmp_path / "run", 2)
    for pid, text in lab.nodes[0].processes("z2all_ds launch").items():
        if "squeue" not in text:
            os.kill(pid, signal.SIGKILL)
    assert_nothing_is_left(lab.nodes)
    assert launch.wait() == 128 + signal.SIGKILL


# Without slurm


STEP = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "PATH": "/usr/bin",
}


def planned(place: Path, environment: dict[str, str], slots: int = 2) -> LaunchPlan:
    nodes = [PlannedNode(name="n2", slots=slots), PlannedNode(name="n0", slots=slots)]
    return make_plan(nodes, {}, RunConfig(run_dir=str(place)), "auto", 29501, [], {}, environment)


@pytest.mark.parametrize(
    ("written", "tasks"),
    [("2", [2]), ("2(x3)", [2, 2, 2]), ("2,1", [2, 1]), ("2(x2),1(x2),4", [2, 2, 1, 1, 4]), ("", []), ("2(x", [])],
)
def test_slurms_notation_of_tasks_per_node_is_parsed(written: str, tasks: list[int]) -> None:
    assert tasks_of_nodes(written) == tasks


def test_the_environment_of_a_rank_is_derived_from_slurms_variables() -> None:
    found = slurm.rank_environment(STEP)
    expected = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert {name: found[name] for name in expected} == expected
    assert "GLOO_SOCKET_IFNAME" not in found
    assert World.from_environment(found) == World(3, 5, 0, 2)


def test_slurm_variables_are_ignored_in_a_batch_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert World.take_from_environment() == World(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, "default")),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, (8, "SLURM_GPUS_ON_NODE")),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, (4, "SLURM_GPUS_PER_NODE")),
        (
            {"SLURM_GPUS_ON_NODE": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"},
            (2, "SLURM_TASKS_PER_NODE"),
        ),
        ({"SLURM_TASKS_PER_NODE": "64(x2)"}, (1, "default")),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}, (1, "default")),
    ],
)
def test_slots_per_node_are_read_from_slurms_variables(environment: dict[str, str], expected: tuple[int, str]) -> None:
    assert slurm.slots_per_node(environment) == expected


def test_deepspeeds_own_runner_builds_the_srun_command(tmp_path: Path) -> None:
    from deepspeed.launcher.multinode_runner import SlurmRunner
    from deepspeed.launcher.runner import parse_args

    made = planned(tmp_path / "a b", {"NCCL_IB_HCA": "a,b"})
    made.write("slurm")
    words = made.deepspeed_command("slurm")
    arguments = parse_args(words[3:])
    line = SlurmRunner(arguments, "", {}).get_cmd({}, {"n2": [0, 1], "n0": [0, 1]})
    script = str(made.rank_script)
    assert line[:4] == ["srun", "-n", "4", f"--nodelist={made.tasks}"]
    config = str(tmp_path / "a b" / "launch" / "run.yaml")
    assert line[-6:] == ["-u", script, "--config", config, "--resume", "auto"]
    assert made.tasks.read_text().split() == ["n2", "n2", "n0", "n0"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in (made.tasks, made.rank_script))


def test_a_rank_of_srun_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """DeepSpeed puts it on PYTHONPATH."""
    (tmp_path / "z2all_ds.py").write_text("raise SystemExit(7)")
    script = slurm.RANK_SCRIPT.replace("sys.exit(run_rank())", "")
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "rank.py").write_text(script)
    environment = package_environment({"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    command = [sys.executable, str(tmp_path / "launch" / "rank.py")]
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == 0


def test_ranks_get_their_settings_through_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    made = planned(tmp_path, {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "a,b", "HF_TOKEN": "hush"})
    assert made.unsupported_settings() == ["HF_TOKEN"]
    assert made.unsupported_settings("slurm") == []
    meeting = {"MASTER_ADDR": "n2", "MASTER_PORT": "29501", "DS_ENV_FILE": os.devnull}
    assert made.deepspeed_variables("slurm") == {"NCCL_IB_HCA": "a,b", "HF_TOKEN": "hush", **meeting}
    shown = made.describe("slurm")
    assert "hush" not in shown
    line = shlex.split(shown.splitlines()[-1])
    assert line[:2] == ["NCCL_IB_HCA=a,b", "HF_TOKEN=***"]
    config = str(tmp_path / "launch" / "run.yaml")
    assert line[-5:] == [str(made.rank_script), "--config", config, "--resume", "auto"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("srun: error: n1: task 3: Killed\n", (3, "n1")),
        ("srun: error: n1: tasks 2-3: Segmentation fault (core dumped)\n", (2, "n1")),
        ("srun: error: n1: task 3: Terminated\n", None),
        ("srun: error: n1: task 3: Exited with exit code 5\n", None),
        ("loss 7.1\n", None),
    ],
)
def test_a_rank_that_srun_reports_as_killed_is_recognised(line: str, found: tuple[int, str] | None) -> None:
    killed = slurm.killed_rank(line)
    assert (killed and (killed.rank, killed.host)) == found


def test_stderr_of_srun_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    slurm.SrunOutput(io.StringIO("a\tb\x1b]0;title\x07\n")).wait()
    assert capsys.readouterr().err == "a\tb\\x1b]0;title\\x07\n"


def test_the_rank_that_srun_reports_as_killed_is_the_first_fault(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    early, late = (Fault(KILLED, rank, f"n{rank}", f"rank {rank}", 5, 0, float(rank)) for rank in (1, 2))
    killed = slurm.killed_rank("srun: error: n2: task 2: Killed")
    for faults, first in (([early, late], late), ([early], killed), ([early, replace(late, kind="data")], "data")):
        for fault in faults:
            write_fault(folder, fault)
        slurm.record_killed(folder, killed)
        found_fault = first_fault(read_faults(folder))
        assert found_fault is not None
        assert found_fault.kind == first if isinstance(first, str) else found_fault.line == first.line
        forget_faults(folder)


def launch(folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, "-m", "z2all_ds", "launch", *words, "--", f"run_dir={folder / 'run'}"]
    return subprocess.run(command, capture_output=True, text=True, env={**kept, **environment})


@pytest.mark.parametrize(
    ("words", "hostfile", "environment", "line"),
    [
        ([], None, {}, "launcher ssh: needs the list of nodes. Give --hostfile FILE."),
        (["--launcher", "slurm"], None, {"PATH": "/nowhere"}, "PATH has no srun, sinfo, scontrol"),
        (["--launcher", "slurm"], "a slots=1\nb slots=2\n", {}, "slots (a 1, b 2): must be the same on all nodes"),
    ],
)
def test_an_impossible_launch_is_a_one_line_error(
    tmp_path: Path, words: list[str], hostfile: str | None, environment: dict[str, str], line: str
) -> None:
    if hostfile:
        (tmp_path / "hosts").write_text(hostfile)
        words = [*words, "--hostfile", str(tmp_path / "hosts")]
    done = launch(tmp_path, *words, **environment)
    assert done.returncode == ClusterError.exit_code, done.stderr
    assert line in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_missing_allocation_and_nodes_outside_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="works inside an allocation, but SLURM_JOB_NODELIST is not set"):
        slurm.allocated_names({})
    monkeypatch.setattr(slurm, "require_slurm", lambda: None)
    monkeypatch.setattr(slurm, "allocated_names", lambda: ["n0", "n1"])
    listed = [PlannedNode(name="n0", slots=1), PlannedNode(name="n7", slots=1)]
    with pytest.raises(ClusterError, match="node n7: is not in the allocation, which has n0, n1"):
        slurm.nodes_to_use(listed, is_dry_run=False)


def test_a_dry_run_needs_no_slurm(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("b slots=1\na slots=1\n")
    words = ["--launcher", "slurm", "--no-preflight", "--dry-run", "--hostfile", str(tmp_path / "hosts")]
    done = launch(tmp_path, *words, PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert "--launcher slurm" in done.stdout.splitlines()[-1]
    assert "ssh_config" not in done.stdout
