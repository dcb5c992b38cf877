"""Tests of real launches over ssh on the nodes of a lab: losses, faults, restarts and leftover processes."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import node_lab
from tests.helpers.node_lab import SSH_PORT, Node
from tests.helpers.node_launches import NodeLaunch, assert_nothing_is_left, rank_on, write_hostfile
from tests.helpers.training import losses, metrics, run_arguments, train
from z2all_ds.base.errors import EXIT_REQUEUE
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.writer import read_records

TOLERANCE = 1e-6
"""For fp32 sums of the same samples in another order; losses are about 7."""
SHAPE = ("train.global_batch=12", "train.micro_batch=2", "train.hang_seconds=8", "checkpoint.every_steps=5")
STEPS = 40


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    if node_lab.why_no_lab():
        pytest.skip(node_lab.why_no_lab())
    with node_lab.node_lab(tmp_path_factory.mktemp("lab"), 3) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def _all_nodes_are_well(nodes: list[Node]) -> Iterator[None]:
    yield
    assert_nothing_is_left(nodes)


class Launches:
    """The nodes and settings that all launches of a test share."""

    def __init__(self, nodes: list[Node], place: Path, corpus: Path, tokenizer: Path) -> None:
        self.nodes, self.place, self.corpus, self.tokenizer = nodes, place, corpus, tokenizer

    def start(self, name: str, options: list[str], overrides: list[str], nodes: list[Node] | None = None) -> NodeLaunch:
        hostfile = write_hostfile(self.place / f"{name}.yaml", nodes or self.nodes)
        arguments = run_arguments(self.place / name, self.corpus, self.tokenizer, *SHAPE, *overrides)
        if "--health" not in options:  # it has its own tests and takes several seconds
            options = [*options, "--no-health"]
        return NodeLaunch(self.nodes[0], "launch", "--hostfile", str(hostfile), *options, "--", *arguments)

    def alone(self, name: str, *overrides: str) -> list[float]:
        """Run the same training with one rank and without faults, and return its losses."""
        done = train(self.place / name, self.corpus, self.tokenizer, *SHAPE, *overrides, ranks=1)
        assert done.returncode == 0, done.stderr
        return losses(self.place / name)


@pytest.fixture
def launches(nodes: list[Node], tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> Launches:
    return Launches(nodes, tmp_path, small_corpus, small_tokenizer)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> list[float]:
    place = tmp_path_factory.mktemp("alone")
    return Launches([], place, small_corpus, small_tokenizer).alone("run", f"train.steps={STEPS}", "deepspeed=zero1")


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(RunFolder(run_dir).events) if record["event"] == kind]


@pytest.mark.parametrize(
    ("number", "json", "launcher"),
    [
        (2, "zero1", "pdsh"),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in [(3, "zero3", "pdsh"), (2, "zero3", "ssh"), (3, "zero1", "ssh"), (2, "zero2", "openmpi")]
        ),
    ],
)
def test_several_nodes_have_the_losses_of_one_rank(
    launches: Launches, undisturbed: list[float], number: int, json: str, launcher: str
) -> None:
    if launcher == "openmpi" and not shutil.which("ompi_info"):
        pytest.skip("needs Debian's openmpi-bin")
    overrides = [f"deepspeed={json}", f"train.steps={STEPS}", "train.stop_at_step=6"]
    options = ["--launcher", launcher, *(["--health"] if launcher == "ssh" else [])]
    launch = launches.start("run", options, overrides, launches.nodes[:number])
    assert launch.wait() == 0, launch.output
    assert losses(launches.place / "run") == pytest.approx(undisturbed[:6], abs=TOLERANCE)
    assert events(launches.place / "run", "stopped")


@pytest.mark.extended
def test_the_command_line_that_a_dry_run_prints_works(launches: Launches, undisturbed: list[float]) -> None:
    overrides = ["deepspeed=zero1", f"train.steps={STEPS}", "train.stop_at_step=3"]
    shown = launches.start("run", ["--dry-run"], overrides, launches.nodes[:2])
    assert shown.wait() == 0, shown.output
    line = next(line for line in shown.output.splitlines() if line.startswith("PDSH_SSH_ARGS_APPEND="))
    done = launches.nodes[0].run("bash", "-c", line)
    assert done.returncode == 0, done.stderr
    assert losses(launches.place / "run") == pytest.approx(undisturbed[:3], abs=TOLERANCE)


@pytest.mark.extended
def test_a_launch_survives_one_fault_after_another(launches: Launches, undisturbed: list[float]) -> None:
    """A rank is killed, another one is stopped, and a node dies; two nodes continue, and all three once it is back."""
    run_dir, (_, second, third) = launches.place / "run", launches.nodes
    options = ["--restarts", "9", "--min-nodes", "2"]
    overrides = [f"train.steps={STEPS}", "deepspeed=zero1", "checkpoint.snapshot_every=1"]
    launch = launches.start("run", options, overrides)
    launch.wait_for_steps(run_dir, 6)
    os.kill(rank_on(second), signal.SIGKILL)
    launch.wait_for_words("restart 1 of 9")
    launch.wait_for_words(" in memory; ")  # every node has its part of the newest snapshot
    launch.wait_for_steps(run_dir, 12)
    os.kill(rank_on(third), signal.SIGSTOP)
    launch.wait_for_words("restart 2 of 9")
    launch.wait_for_steps(run_dir, 18)
    third.kill()
    launch.wait_for_words("without n2")
    launch.wait_for_steps(run_dir, 24)
    third.start()
    os.kill(rank_on(second), signal.SIGKILL)
    assert launch.wait() == 0, launch.output
    assert losses(run_dir) == pytest.approx(undisturbed, abs=TOLERANCE)
    faults = events(run_dir, "fault")
    assert [fault["fault"] for fault in faults] == ["killed", "hang", "node_lost", "killed"], faults
    assert [fault["host"] for fault in faults] == ["n1", "n2", "n2", "n1"]
    assert all(fault["seconds"] < 30 for fault in faults), faults
    assert len(events(run_dir, "recovered")) == 4
    ranks = [line for line in launch.output.splitlines() if " ranks on " in line]
    assert [line.split()[0] for line in ranks] == ["3", "3", "3", "2", "3"]


@pytest.mark.extended
def test_a_launch_continues_without_a_node_whose_link_is_cut(launches: Launches, undisturbed: list[float]) -> None:
    run_dir, third = launches.place / "run", launches.nodes[2]
    overrides = [f"train.steps={STEPS}", "train.stop_at_step=12", "deepspeed=zero1"]
    launch = launches.start("run", ["--restarts", "1", "--min-nodes", "2"], overrides)
    launch.wait_for_steps(run_dir, 6)
    third.cut()
    try:
        launch.wait_for_words("restart 1 of 1")
        # The node that is cut off ends its rank by itself.
        assert_nothing_is_left([third])
        assert launch.wait() == 0, launch.output
    finally:
        third.heal()
    assert losses(run_dir) == pytest.approx(undisturbed[:12], abs=TOLERANCE)
    (fault,) = events(run_dir, "fault")
    assert (fault["fault"], fault["host"]) == ("node_lost", "n2")
    assert fault["seconds"] < 30


@pytest.mark.extended
def test_a_launch_continues_without_a_node_whose_disk_is_full(launches: Launches, undisturbed: list[float]) -> None:
    """A small full disk is mounted over the run folder on one node, so that saves fail there."""
    run_dir, second = launches.place / "run", launches.nodes[1]
    overrides = [f"train.steps={STEPS}", "deepspeed=zero1", "checkpoint.background=never"]
    launch = launches.start("run", ["--restarts", "2", "--min-nodes", "2"], overrides)
    launch.wait_for_steps(run_dir, 6)
    full = f"mount -t tmpfs -o size=64k tmpfs {run_dir} && dd if=/dev/zero of={run_dir}/full bs=1k 2>/dev/null"
    second.run("bash", "-c", full)
    try:
        assert launch.wait() == 0, launch.output
    finally:
        second.run("umount", str(run_dir))
    assert losses(run_dir) == pytest.approx(undisturbed, abs=TOLERANCE)
    assert "without n1" in launch.output
    assert events(run_dir, "fault")[0]["host"] == "n1"


@pytest.mark.extended
def test_an_unfit_node_is_named_and_can_be_excluded(launches: Launches, tmp_path: Path) -> None:
    keys = launches.nodes[2].folder / "ssh" / "authorized_keys"
    right = keys.read_text()
    try:
        keys.write_text("")
        refused = launches.start("a", [], [])
        assert refused.wait() == 5, refused.output
        assert "n2: ssh: key not accepted" in refused.output
        assert "authorized_keys" in refused.output.splitlines()[-1]
        planned = launches.start("b", ["--dry-run", "--min-nodes", "2"], [])
        assert planned.wait() == 0, planned.output
        assert "without n2" in planned.output
    finally:
        keys.write_text(right)


@pytest.mark.extended
def test_a_node_with_an_older_package_is_refused(launches: Launches, tmp_path: Path) -> None:
    import z2all_ds

    file, third = Path(z2all_ds.__file__), launches.nodes[2]
    (tmp_path / "old.py").write_text(file.read_text() + "\n# an older state\n")
    third.run("mount", "--bind", str(tmp_path / "old.py"), str(file))
    try:
        refused = launches.start("a", [], [])
        assert refused.wait() == 5, refused.output
        assert "code of z2all_ds: n2 has" in refused.output.splitlines()[-1]
    finally:
        third.run("umount", str(file))


@pytest.mark.extended
def test_a_launch_listens_only_on_its_own_addresses_and_saves_on_sigterm(launches: Launches) -> None:
    run_dir = launches.place / "run"
    launch = launches.start("run", [], ["train.steps=100000", "deepspeed=zero3"], launches.nodes[:2])
    launch.wait_for_steps(run_dir, 3)
    for node in launches.nodes[:2]:
        ours = {(address, port) for address, port in node.listening() if port != SSH_PORT}
        assert {address for address, _ in ours} <= {node.address, "127.0.0.1"}, ours
        assert node is not launches.nodes[0] or ours, "the meeting point at least"
    (command,) = [pid for pid, text in launches.nodes[0].processes("z2all_ds launch").items() if "nsenter" not in text]
    connections = [process for process in psutil.Process(command).children() if process.name() == "ssh"]
    assert len(connections) == 2
    for pid in (*(process.pid for process in connections), command):  # systemd and slurm signal every process
        os.kill(pid, signal.SIGTERM)
    assert launch.wait() == EXIT_REQUEUE, launch.output
    (saved,) = events(run_dir, "checkpoint")
    assert saved["step"] == len(metrics(run_dir)) and events(run_dir, "requeue")


@pytest.mark.extended
def test_a_second_ctrl_c_ends_the_launch_at_once_and_leaves_nothing(launches: Launches) -> None:
    run_dir, used = launches.place / "run", launches.nodes[:2]
    overrides = ["train.steps=100000", "checkpoint.snapshot_every=1", "checkpoint.every_steps=100000"]
    launch = launches.start("run", [], overrides, used)
    launch.wait_for_steps(run_dir, 3)
    assert all(snapshots_in(node) for node in used)
    (command,) = [pid for pid, text in used[0].processes("z2all_ds launch").items() if "nsenter" not in text]
    for rank in map(rank_on, used):
        os.kill(rank, signal.SIGSTOP)  # else the first request would be completed before the second
    os.kill(command, signal.SIGINT)
    launch.wait_for_words("repeat to end it at once")
    os.kill(command, signal.SIGINT)
    assert launch.wait() == 130, launch.output
    assert_nothing_is_left(used, within_seconds=1.0)
    assert not any(snapshots_in(node) for node in used)


def snapshots_in(node: Node) -> list[str]:
    return [name for name in node.run("ls", "/dev/shm").stdout.split() if name.startswith("z2all_")]


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["ssh", "pdsh", "openmpi"])
def test_a_killed_launcher_leaves_nothing(launches: Launches, launcher: str) -> None:
    if launcher == "openmpi" and not shutil.which("ompi_info"):
        pytest.skip("needs Debian's openmpi-bin")
    run_dir = launches.place / "run"
    launch = launches.start("run", ["--launcher", launcher], ["train.steps=100000"], launches.nodes[:2])
    launch.wait_for_steps(run_dir, 2)
    for pid in launches.nodes[0].processes("z2all_ds launch"):
        os.kill(pid, signal.SIGKILL)
    launch.wait()
    began = time.monotonic()
    assert_nothing_is_left(launches.nodes)
    assert time.monotonic() - began < 30


@pytest.mark.extended
def test_secrets_are_neither_printed_nor_saved_nor_on_a_command_line(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-0123")
    run_dir = launches.place / "run"
    launch = launches.start("run", [], ["train.steps=100000"], launches.nodes[:2])
    launch.wait_for_steps(run_dir, 2)
    commands = b"".join(command_line(process) for process in Path("/proc").glob("[0-9]*"))
    assert b"z2all_ds.cluster.launch.node" in commands
    given = Path(f"/proc/{rank_on(launches.nodes[1])}/environ").read_bytes()
    (run_dir / "stop").touch()
    assert launch.wait() == EXIT_REQUEUE
    assert b"WANDB_API_KEY=very-secret-0123" in given
    assert b"very-secret" not in commands
    assert "very-secret" not in launch.output
    written = [path for path in run_dir.rglob("*") if path.is_file() and b"very-secret" in path.read_bytes()]
    assert written == []


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
