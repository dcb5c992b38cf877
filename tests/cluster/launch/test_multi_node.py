"""Tests of `z2all launch` without a second machine: a hostfile with localhost, and errors before the start."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.helpers.training import losses, run_arguments
from z2all_ds.base.errors import EXIT_REQUEUE, ClusterError
from z2all_ds.base.fault_records import FAULT_VARIABLE, LAUNCH_VARIABLE, NODE_LOST, Fault
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.cluster.launch import multi_node
from z2all_ds.cluster.launch.multi_node import Launch, LaunchOptions, is_this_machine, shared_files
from z2all_ds.cluster.launch.remote import NodeEnd
from z2all_ds.cluster.launch.verdicts import Verdict
from z2all_ds.cluster.nodes import Node, SshAccess
from z2all_ds.cluster.preflight.checks import Preflight
from z2all_ds.track.writer import RunWriter, read_records
from z2all_ds.train.command import RanksFailed


def launch(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "z2all_ds", "launch", *words], capture_output=True, text=True)


def test_a_launch_on_this_machine_needs_no_ssh(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, "train.steps=2", "deepspeed=zero1")
    done = launch("--hostfile", str(tmp_path / "hosts"), "--", *arguments)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 2


def test_nodes_must_have_the_same_tokenizer_files(tmp_path: Path) -> None:
    run = SimpleNamespace(deepspeed="zero1", data=SimpleNamespace(tokenizer=str(tmp_path), corpus=""))
    names = ["tokenizer.json"]
    for name in ("tokenizer_config.json", "special_tokens_map.json"):  # both decide which tokens are control tokens
        assert shared_files(cast(Any, run)) == [str(tmp_path / one) for one in names]
        (tmp_path / name).write_text("{}")
        names.append(name)
    assert shared_files(cast(Any, run)) == [str(tmp_path / one) for one in names]


def test_only_localhost_without_an_ssh_port_is_this_machine() -> None:
    assert is_this_machine([Node(name="localhost", slots=2)])
    assert not is_this_machine([Node(name="localhost", slots=2, ssh=SshAccess(port=2222))])
    assert not is_this_machine([Node(name="node1", slots=2)])
    assert not is_this_machine([Node(name="localhost", slots=1), Node(name="node1", slots=1)])


def test_settings_without_effect_on_this_machine_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    def train(*given: Any) -> str:
        started.append(given[1:])
        return "done"

    monkeypatch.setattr(multi_node, "train_on_this_machine", train)
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    settings = "slots: 2, interface: eth7, environment: {NCCL_DEBUG: INFO}, python: /tmp/theirs"
    (tmp_path / "hosts.yaml").write_text(f"nodes:\n  localhost: {{{settings}}}\n")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    for name, restarts in (("hosts.yaml", 1), ("hosts", 0)):
        options = LaunchOptions(str(tmp_path / name), restarts=restarts)
        assert multi_node.launch(options, [f"run_dir={tmp_path / 'run'}"]) == "done"
    lines = [line for line in capsys.readouterr().err.splitlines() if "without effect" in line]
    named = "--restarts, interface (hostfile), environment (hostfile), python (hostfile)"
    assert [line.partition("without effect on this machine: ")[2] for line in lines] == [named]
    assert started == [(2, "auto")] * 2
    assert "NCCL_DEBUG" not in os.environ


@pytest.mark.parametrize(
    ("min_nodes", "overrides", "names", "line"),
    [
        (
            7,
            ["train.global_batch=512"],
            None,
            "train.global_batch=512: must be a multiple of train.micro_batch × ranks = 1 × 56, so 4 of the 7 nodes"
            " without failures could be used (not n4, n6, n7), and at least 7 are needed. With this micro_batch, ranks"
            " may be 1, 2, 4, 8, 16, 32, 64, 128, 256, 512. Or lower --min-nodes, or fix the failures listed above.",
        ),
        (
            8,
            ["train.global_batch=512"],
            None,
            "7 nodes without failures: at least 8 are needed (left out: n5). Fix the failures listed above.",
        ),
        (
            4,
            ["train.global_batch=512"],
            "n0 n1 n2 n3",
            "without n4, n5, n6, n7 (train.global_batch=512 must be a multiple of train.micro_batch × ranks = 1 × 56)",
        ),
        (7, ["train.global_batch=448"], "n0 n1 n2 n3 n4 n6 n7", "without n5"),
    ],
)
def test_a_batch_that_the_remaining_nodes_cannot_divide_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    min_nodes: int,
    overrides: list[str],
    names: str | None,
    line: str,
) -> None:
    (tmp_path / "hosts").write_text("".join(f"n{number} slots=8\n" for number in range(8)))
    options = LaunchOptions(str(tmp_path / "hosts"), min_nodes=min_nodes)
    job = Launch(options, [f"run_dir={tmp_path / 'run'}", "train.micro_batch=1", *overrides])
    found = Preflight()
    found.fail("n5: ssh", "no answer", "Start it.", ["n5"])
    if names is None:
        with pytest.raises(ClusterError) as refused:
            job.fit_nodes(found)
        assert str(refused.value) == line
    else:
        assert [node.name for node in job.fit_nodes(found)] == names.split()
        assert capsys.readouterr().err.rstrip().endswith(line)


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


def outcome_of(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    verdict: Verdict | None,
    *numbers: signal.Signals,
    has_started: bool = True,
) -> tuple[object, list[dict[str, Any]]]:
    """Run a launch that receives these signals; return its exit code or error, and the last events of the run."""

    def supervise(*arguments: Any) -> Verdict:
        writer = RunWriter(folder)
        if has_started:
            writer.event("started", step=0)
        writer.close()
        for number in numbers:
            os.kill(os.getpid(), number)
        assert verdict is not None
        return verdict

    job = SimpleNamespace(folder=folder, nodes=[], run=None)
    monkeypatch.setattr(multi_node, "Launch", lambda *_: job)
    monkeypatch.setattr(multi_node, "supervise", supervise)
    with pytest.raises((SystemExit, KeyboardInterrupt, RanksFailed)) as ended:
        multi_node.launch(LaunchOptions("hosts"), [])
    events = [event for event in read_records(folder.events) if event["event"] != "started"]
    return getattr(ended.value, "code", ended.type), events


LOST = Fault(NODE_LOST, 0, "n1", "ClusterError: node n1: lost.", ClusterError.exit_code)


@pytest.mark.parametrize("has_started", [True, False])
@pytest.mark.parametrize(
    ("fault", "numbers", "expected"),
    [
        (LOST, [signal.SIGTERM], EXIT_REQUEUE),
        (LOST, [signal.SIGUSR1], EXIT_REQUEUE),
        (LOST, [signal.SIGINT], KeyboardInterrupt),
        (LOST, [], RanksFailed),
        (replace(LOST, kind="data"), [signal.SIGTERM], RanksFailed),
    ],
)
def test_a_fault_is_recorded_also_after_a_signal(
    fault: Fault,
    numbers: list[signal.Signals],
    expected: object,
    has_started: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = Verdict("failed", fault)
    found, (event,) = outcome_of(RunFolder(tmp_path), monkeypatch, verdict, *numbers, has_started=has_started)
    assert found == expected
    assert (event["event"], event["reason"]) == ("failed", fault.line)


def test_a_second_signal_to_a_launch_is_recorded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, (event,) = outcome_of(RunFolder(tmp_path), monkeypatch, None, signal.SIGUSR1, signal.SIGTERM)
    assert found is KeyboardInterrupt
    assert (event["event"], event["reason"]) == ("failed", "ended at once by a second signal, SIGTERM")


@pytest.mark.parametrize(
    ("before", "new", "kinds"),
    [
        ([], [[], []], ["fault", "fault", "failed"]),
        (["started", "stopped"], [[], []], ["fault", "fault", "failed"]),  # not the outcome of an earlier launch
        (["started", "done"], [[], []], ["fault", "fault"]),
        ([], [["started"], []], ["started", "fault", "fault", "failed"]),
        ([], [[], ["started", "done"]], ["fault", "started", "done"]),
        ([], [["started"], ["started by another job", "stopped"]], ["started", "fault", "started", "stopped"]),
    ],
)
def test_only_the_last_try_of_a_launch_can_be_the_end_of_its_run(
    before: list[str], new: list[list[str]], kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try records these events; its ranks end with a code and leave no fault record."""
    folder, tries, locks = RunFolder(tmp_path), iter(new), list[int]()

    def record(events: list[str]) -> None:
        writer = RunWriter(folder)
        for event in events:
            kind, *by_another = event.split(maxsplit=1)
            if by_another:
                locks.append(folder.acquire_lock())
            writer.event(kind, step=0, **({} if by_another else {"launch": os.environ.get(LAUNCH_VARIABLE)}))
        writer.close()

    def run_on_nodes(nodes: list[Node], *_: Any) -> list[NodeEnd]:
        record(next(tries))
        return [NodeEnd(node.name, 1, "out of luck") for node in nodes]

    class Plan(SimpleNamespace):
        nodes, ranks, ssh_config, folder, orders = (Node(name="n1", slots=1),), 1, "", "", ()

        def write(self, launcher: str) -> None: ...

        def unsupported_settings(self) -> list[str]:
            return ["not shown"]

    options = LaunchOptions("hosts", restarts=1)
    job = SimpleNamespace(folder=folder, nodes=[], run=None, options=options, port=1, plan=lambda extra: Plan())
    monkeypatch.setattr(multi_node, "Launch", lambda *_: job)
    monkeypatch.setattr(multi_node, "run_on_nodes", run_on_nodes)
    monkeypatch.setattr(multi_node, "FIRST_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr("z2all_ds.track.writer.SILENT_SECONDS", 0.0)
    folder.claim()
    record(before)
    with nullcontext() if "done" in kinds else pytest.raises(RanksFailed):
        multi_node.launch(options, [])
    for lock in locks:
        os.close(lock)
    events = list(read_records(folder.events))[len(before) :]
    assert [event["event"] for event in events] == kinds
    reason = "ClusterError: node n1: its launcher ended with code 1: out of luck"
    assert all(event["reason"].startswith(reason) for event in events if event["event"] == "failed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_start_of_a_launch_ends_it_with_the_requeue_code(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node, "Launch", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        multi_node.launch(LaunchOptions("hosts"), [])
    assert ended.value.code == EXIT_REQUEUE


def test_every_try_gives_its_ranks_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def plan(extra: dict[str, str]) -> None:
        assert extra[LAUNCH_VARIABLE] == os.environ[LAUNCH_VARIABLE]  # here, too, where their records are read
        given.append(extra)
        raise NotImplementedError

    job = cast(Launch, SimpleNamespace(plan=plan, options=LaunchOptions("hosts")))
    monkeypatch.setenv(LAUNCH_VARIABLE, "")  # restored afterwards
    for fault_at in (None, 12.5):
        with pytest.raises(NotImplementedError):
            multi_node.run_once(job, fault_at)
    first, second = (extra.pop(LAUNCH_VARIABLE) for extra in given)
    assert first != second and given == [{}, {FAULT_VARIABLE: "12.5"}]


def test_a_dry_run_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = SimpleNamespace(write=lambda _: None, describe=lambda _: "# file a\n\x1b[2J")
    job = SimpleNamespace(folder=SimpleNamespace(launching=nullcontext), plan=lambda _: plan)
    monkeypatch.setattr(multi_node, "Launch", lambda *_: job)
    options = cast(LaunchOptions, SimpleNamespace(launcher="slurm", dry_run=True))
    assert multi_node.launch(options, []) == "planned"
    assert capsys.readouterr().out == "# file a\n\\x1b[2J\n"
