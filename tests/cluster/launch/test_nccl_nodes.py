"""Tests of real launches with NCCL on two nodes that share one GPU, each in its own namespaces with its own sshd.

NCCL treats them as two machines and uses sockets. As between real machines, a rank is not notified when another one
hangs, and collectives wait.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.docker_nodes import both_nodes, why_no_nodes, z2all, z2all_beside
from tests.helpers.ssh_server import make_key
from tests.helpers.training import losses, metrics, run_arguments, train
from z2all_ds.base.machine import gpu_count
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.writer import read_records
from z2all_ds.train.processes import flight_recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_count(), reason="needs a GPU"),
    pytest.mark.skipif(bool(why_no_nodes()), reason=why_no_nodes() or "they can be started"),
]
TOLERANCE = 2e-3
"""For bf16 sums of the same samples in another order; losses are about 7. The difference grows with the steps (3.8e-3
was measured in step 59)."""
COMPARED = 20
SHAPE = ("train.global_batch=4", "train.micro_batch=2", "train.hang_seconds=8", "data.num_workers=1")
STEPS = 300
STOP = "train.stop_at_step=60"
START_SECONDS = 120.0


class Launches:
    """The settings of all launches with one hostfile."""

    def __init__(self, hostfile: Path, corpus: Path, tokenizer: Path) -> None:
        self.hostfile, self.corpus, self.tokenizer = hostfile, corpus, tokenizer

    def words(self, run_dir: Path, options: list[str], *overrides: str) -> list[str]:
        arguments = run_arguments(run_dir, self.corpus, self.tokenizer, *SHAPE, f"train.steps={STEPS}", *overrides)
        return ["launch", "--hostfile", str(self.hostfile), *options, "--", *arguments]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Iterator[Launches]:
    folder = tmp_path_factory.mktemp("nodes")
    with both_nodes(folder, make_key(folder / "key")) as hostfile:
        yield Launches(hostfile, small_corpus, small_tokenizer)


@pytest.fixture(scope="module")
def by_one_rank(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> list[float]:
    """Return the losses of one rank on the same GPU."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    overrides = (*SHAPE, f"train.steps={STEPS}", f"train.stop_at_step={COMPARED}", "deepspeed=zero1")
    done = train(run_dir, small_corpus, small_tokenizer, *overrides, ranks=1)
    assert done.returncode == 0, done.stderr
    return losses(run_dir)


@pytest.fixture(scope="module")
def by_two_nodes(launches: Launches, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of two nodes without faults."""
    run_dir = tmp_path_factory.mktemp("two_nodes") / "run"
    answer = z2all(*launches.words(run_dir, [], "deepspeed=zero1", STOP))
    assert answer.returncode == 0, answer.stderr
    assert not list((run_dir / "logs" / "flight").iterdir())
    return losses(run_dir)


def rank_on(node: str) -> int:
    """Return the pid of the only rank on a node."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        started_as_rank = b"z2all_ds.train.pretrain" in command and b"deepspeed.launcher.runner" not in command
        if (
            started_as_rank
            and b"deepspeed.launcher.launch" not in command
            and f"NCCL_HOSTID={node}".encode() in variables
        ):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            found.append((int(process.name), parent))
    (rank,) = [pid for pid, parent in found if parent not in {pid for pid, _ in found}]  # excludes its data workers
    return rank


def workers_of(rank: int) -> list[int]:
    children = " ".join(path.read_text() for path in Path(f"/proc/{rank}/task").glob("*/children")).split()
    return [int(pid) for pid in children if b"watchdog" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for_steps(run_dir: Path, number: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < number:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=20)
        time.sleep(0.05)


def faults(run_dir: Path) -> list[dict[str, object]]:
    return [record for record in read_records(RunFolder(run_dir).events) if record["event"] == "fault"]


def nobody_is_left() -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        if not any(b"z2all_ds.train.pretrain" in command for command in commands):
            return True
        time.sleep(0.2)
    return False


def test_the_health_test_uses_nccl(launches: Launches, tmp_path: Path) -> None:
    answer = z2all("doctor", str(tmp_path), "--hostfile", str(launches.hostfile), "--json")
    findings = json.loads(answer.stdout)["findings"]
    print(json.dumps(findings, indent=1))
    assert [one for one in findings if one["status"] == "fail"] == []
    (health,) = [one["value"] for one in findings if one["name"] == "health"]
    assert health.startswith("2 nodes on cuda: ")


def test_two_nodes_have_the_losses_of_one_rank(
    launches: Launches, by_one_rank: list[float], by_two_nodes: list[float], tmp_path: Path
) -> None:
    answer = z2all(*launches.words(tmp_path / "run", [], "deepspeed=zero3", f"train.stop_at_step={COMPARED}"))
    assert answer.returncode == 0, answer.stderr
    for found in (by_two_nodes[:COMPARED], losses(tmp_path / "run")):
        print("off by", max(abs(a - b) for a, b in zip(found, by_one_rank, strict=True)))
        assert found == pytest.approx(by_one_rank, abs=TOLERANCE)


def test_a_restart_after_a_killed_rank_gives_the_same_losses(
    launches: Launches, by_two_nodes: list[float], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = ["--restarts", "1", "--no-health"]
    overrides = ("deepspeed=zero1", STOP, "checkpoint.every_steps=5")
    with z2all_beside(*launches.words(run_dir, options, *overrides)) as process:
        wait_for_steps(run_dir, 7, process)
        os.kill(rank_on("node2"), signal.SIGKILL)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    (fault,) = faults(run_dir)
    print(fault)
    print("off by", max(abs(a - b) for a, b in zip(losses(run_dir), by_two_nodes, strict=True)))
    assert losses(run_dir) == by_two_nodes
    assert (fault["fault"], fault["rank"]) == ("killed", 1)
    assert float(str(fault["seconds"])) < 30
    assert nobody_is_left()


def test_a_rank_that_waits_for_data_is_reported_as_a_hang(launches: Launches, tmp_path: Path) -> None:
    """The rank waits for its stopped data workers, while the other rank waits for it in NCCL."""
    run_dir = tmp_path / "run"
    with z2all_beside(*launches.words(run_dir, ["--no-health"], "deepspeed=zero1")) as process:
        wait_for_steps(run_dir, 7, process)
        workers = workers_of(rank_on("node2"))
        assert workers
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        _, said = process.communicate(timeout=200)
    print(said)
    assert process.returncode not in (0, None)
    (fault,) = faults(run_dir)
    print(fault)
    assert (fault["fault"], fault["rank"]) == ("hang", 1)
    assert float(str(fault["seconds"])) < 30
    flights = flight_recorder.read_flights(RunFolder(run_dir))
    assert sorted(flights) == [0, 1]
    assert any("started by rank 0, not by rank 1" in line for line in said.splitlines())
    assert "next" in (run_dir / "logs" / "stacks" / "rank_0001.txt").read_text()
    assert nobody_is_left()


def test_a_stopped_rank_is_reported_as_a_hang(launches: Launches, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with z2all_beside(*launches.words(run_dir, ["--no-health"], "deepspeed=zero3")) as process:
        wait_for_steps(run_dir, 7, process)
        os.kill(rank_on("node2"), signal.SIGSTOP)
        _, said = process.communicate(timeout=200)
    print(said)
    (fault,) = faults(run_dir)
    print(fault)
    assert (fault["fault"], fault["rank"]) == ("hang", 1)
    assert "its process is stopped" in str(fault["line"])
    assert sorted(flight_recorder.read_flights(RunFolder(run_dir))) == [0]
    assert "not finished" in said
    assert nobody_is_left()
