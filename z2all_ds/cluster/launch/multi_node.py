"""`z2all launch`: checks the nodes, starts ranks on all of them, classifies the outcome, and restarts if asked to.

hostfile ─▶ preflight ─▶ plan ─▶ ranks on all nodes ─▶ verdict ─▶ done
               ▲                                          │
               └── without failing nodes ◀── a recoverable fault, and restarts left
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from z2all_ds.base.child_process import end_group, owned, start
from z2all_ds.base.config import RunConfig
from z2all_ds.base.console import heartbeat, say
from z2all_ds.base.errors import EXIT_REQUEUE, ClusterError, Z2allError
from z2all_ds.base.fault_records import (
    FAULT_VARIABLE,
    LAUNCH_VARIABLE,
    NODE_LOST,
    Fault,
    forget_faults,
    name_launch,
    read_faults,
)
from z2all_ds.base.machine import device_type, free_port
from z2all_ds.base.paths import expanded, full_path
from z2all_ds.base.reports import print_lines
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.cluster import ssh
from z2all_ds.cluster.launch import slurm
from z2all_ds.cluster.launch.plan import LAUNCHERS, LaunchPlan, make_plan
from z2all_ds.cluster.launch.remote import NodeEnd, run_on_nodes
from z2all_ds.cluster.launch.verdicts import Verdict, judge
from z2all_ds.cluster.nodes import Node, SshAccess, read_nodes
from z2all_ds.cluster.preflight.checks import Preflight, Subject, preflight
from z2all_ds.cluster.preflight.command import describe
from z2all_ds.cluster.preflight.compare import NodeFinding
from z2all_ds.corpus.manifest import MANIFEST_NAME
from z2all_ds.tokenizer.declared_tokens import CONFIG_FILE, TOKENS_MAP_FILE
from z2all_ds.tokenizer.tokenization_z2all import TOKENIZER_FILE
from z2all_ds.track.writer import (
    RunWriter,
    count_events,
    last_outcome,
    last_record,
    may_record,
    record_failed_launch,
)
from z2all_ds.train.command import RanksFailed, train_on_this_machine
from z2all_ds.train.inputs import check_lanes
from z2all_ds.train.pretrain import parse
from z2all_ds.train.processes import flight_recorder
from z2all_ds.train.processes.stopping import StopSignals, requeue_on_signals, stop_on_signals
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.op_builds import needed_ops

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
USED_HERE = {"name", "slots"}
"""Settings of a node that training on this machine uses."""
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 2.0, 60.0
MAX_STANDSTILLS = 2
"""Consecutive tries without a new step after which a launch gives up."""


@dataclass(frozen=True)
class LaunchOptions:
    """Options of the command line."""

    hostfile: str | None
    """None: the nodes of the slurm allocation."""
    launcher: str = "ssh"
    restarts: int = 0
    min_nodes: int | None = None
    """Leave out failing nodes as long as this many remain; default: all must pass."""
    preflight: bool = True
    """Check the nodes before every start."""
    dry_run: bool = False
    master_port: int | None = None
    health: bool = True
    """Run the health test before the first start."""
    exclude_slow: bool = False
    """Treat slow nodes as failures."""

    def for_several_nodes(self) -> dict[str, bool]:
        """Return whether each option that one machine does not use is given."""
        return {
            f"--launcher {self.launcher}": self.launcher != LaunchOptions.launcher,
            "--restarts": self.restarts > 0,
            "--min-nodes": self.min_nodes is not None,
            "--exclude-slow": self.exclude_slow,
            "--master-port": self.master_port is not None,
        }


class Launch:
    """One `z2all launch` command."""

    def __init__(self, options: LaunchOptions, arguments: list[str]) -> None:
        if options.launcher not in LAUNCHERS:
            what, rule = f"launcher {options.launcher!r}", f"must be one of {', '.join(LAUNCHERS)}"
            raise ClusterError(what, rule, "Choose one.")
        if options.hostfile is None and options.launcher != "slurm":
            raise ClusterError(f"launcher {options.launcher}", "needs the list of nodes", "Give --hostfile FILE.")
        self.options = options
        self.nodes = [] if options.hostfile is None else read_nodes(options.hostfile)
        if options.launcher == "slurm":
            self.nodes = slurm.nodes_to_use(self.nodes, options.dry_run)
        parsed, self.run = parse(arguments)
        self.resume = parsed.resume
        self.folder = RunFolder(full_path(self.run.run_dir))
        self.port = options.master_port or free_port()
        self.tests_health = options.health and not options.dry_run
        self.unhealthy: list[NodeFinding] = []

    def check_nodes(self) -> Preflight:
        """Check all nodes of the hostfile, also those that were left out before. The health test runs only the first
        time, so that restarts are fast; its failures stay valid."""
        config = ssh.write_config(self.nodes, self.folder.root / "launch" / "ssh_config")
        files = shared_files(self.run)
        subject = Subject(self.nodes, config, os.getcwd(), str(self.folder.root), files, self.port)
        with heartbeat(f"checking {len(self.nodes)} nodes"):
            found = preflight(subject, self.tests_health, self.options.exclude_slow)
        found.findings += self.unhealthy
        self.unhealthy += found.health.failures if found.health else []
        self.tests_health = False
        return found

    def plan(self, extra: Mapping[str, str]) -> LaunchPlan:
        """Check the nodes unless --no-preflight, and plan a launch on those that pass, with these variables."""
        nodes, found, device = self.nodes, Preflight(), device_type()
        if self.options.preflight:
            found = self.check_nodes()
            nodes, device = self.fit_nodes(found), found.device
        ops = needed_ops(resolve(self.run, sum(node.slots for node in nodes), device), device)
        plan = make_plan(nodes, found.addresses, self.run, self.resume, self.port, ops, extra)
        plan.require_supported(self.options.launcher)
        return plan

    def fit_nodes(self, found: Preflight) -> list[Node]:
        """Return the nodes to start on; raise if too few pass."""
        unfit = found.unfit()
        blocking = [one for one in found.failures if self.options.min_nodes is None or one.concerns_all]
        if blocking:
            print_lines(describe(found))
            first = blocking[0]
            no_ssh = self.options.launcher == "slurm" and found.lost
            hint = " If ssh to the nodes is closed, launch with --no-preflight." if no_ssh else ""
            raise ClusterError(first.name, first.value, first.fix + hint)
        fit = healthy = [node for node in self.nodes if node.name not in unfit]
        least = self.options.min_nodes or len(self.nodes)
        if len(fit) < least:
            print_lines(describe(found))
            rule = f"at least {least} are needed (left out: {', '.join(unfit)})"
            raise ClusterError(f"{len(fit)} nodes without failures", rule, "Fix the failures listed above.")
        problems = []
        while fit and (problem := self._batch_problem(fit, found.device)):
            problems.append(problem)
            fit = fit[:-1]
        if len(fit) < least:
            print_lines(describe(found))
            problem, unused = problems[0], ", ".join(node.name for node in healthy[len(fit) :])
            possible = f"so {len(fit)} of the {len(healthy)} nodes without failures could be used (not {unused})"
            rule = f"{problem.rule}, {possible}, and at least {least} are needed"
            fix = f"{problem.fix} Or lower --min-nodes, or fix the failures listed above."
            raise ClusterError(problem.what, rule, fix)
        if len(fit) < len(self.nodes):
            reason = f" ({problems[0].what} {problems[0].rule})" if problems else ""
            say(f"without {', '.join(node.name for node in self.nodes if node not in fit)}{reason}")
        return fit

    def _batch_problem(self, nodes: list[Node], device: str) -> Z2allError | None:
        """Return why the global batch or the data lanes cannot be divided among the ranks of these nodes."""
        ranks = sum(node.slots for node in nodes)
        try:
            resolve(self.run, ranks, device)
            check_lanes(self.run, ranks)
        except Z2allError as error:
            if len(nodes) == len(self.nodes):  # a mistake in the config
                raise
            return error
        return None


def launch(options: LaunchOptions, arguments: list[str]) -> str:
    """Train on all nodes; return the outcome and raise as `z2all train` does."""
    with requeue_on_signals():
        return _launch(options, arguments)


def _launch(options: LaunchOptions, arguments: list[str]) -> str:
    """Do the same without the handling of early signals."""
    job = Launch(options, arguments)
    if options.launcher != "slurm" and is_this_machine(job.nodes):
        say("one node, this machine: same as `z2all train`, without ssh")
        (node,) = job.nodes
        ignored = [option for option, is_given in options.for_several_nodes().items() if is_given]
        # A hostfile must not set variables of processes on this machine, nor start a program here.
        ignored += [f"{name} (hostfile)" for name in node.model_dump(exclude_defaults=True, exclude=USED_HERE)]
        if ignored:
            say(f"without effect on this machine: {', '.join(ignored)}")
        if options.dry_run:
            say(f"dry run: {node.slots} ranks would train in {job.folder.root}")
            return "planned"
        return train_on_this_machine(job.run, node.slots, job.resume)
    if options.dry_run:
        with job.folder.launching():  # it writes the files that a launch in progress reads
            plan = job.plan({})
            plan.write(options.launcher)
        print_lines([plan.describe(options.launcher)])
        return "planned"
    with job.folder.launching(), stop_on_signals(job.folder) as signals:
        events_before = count_events(job.folder)
        try:
            verdict = supervise(job, signals)
        except KeyboardInterrupt as interrupt:
            record_failed_launch(job.folder, f"ended at once by a second signal, {interrupt}", events_before)
            raise
        error = failed(job.folder, verdict.fault, events_before) if verdict.fault else None
    if error is not None:
        if not (signals.received and verdict.is_recoverable):
            raise error
        say(f"{type(error).__name__}: {error}")
    if signals.received == signal.SIGINT:
        raise KeyboardInterrupt
    if verdict.outcome == "requeue" or signals.received:
        raise SystemExit(EXIT_REQUEUE)
    return verdict.outcome


def is_this_machine(nodes: list[Node]) -> bool:
    """True for a hostfile with only localhost. With ssh settings, localhost is the published port of a container."""
    return len(nodes) == 1 and nodes[0].name in LOCAL_NAMES and nodes[0].ssh == SshAccess()


def supervise(job: Launch, signals: StopSignals) -> Verdict:
    """Launch until the run succeeds, fails for good, or no restart is left."""
    fault_at: float | None = None
    standstills, events_before = 0, count_events(job.folder)
    for tries in count():
        (before, _), started = last_step(job.folder), time.time()
        try:
            verdict = run_once(job, fault_at)
        except ClusterError as error:  # too few nodes; perhaps some are still coming back
            if not tries:
                raise
            verdict = Verdict("failed", Fault(NODE_LOST, 0, "-", f"ClusterError: {error}", error.exit_code))
        if verdict.fault is None or signals.received:
            return verdict
        step, step_time = last_step(job.folder)
        standstills = 0 if step > before else standstills + 1
        fault_at = fault_at if standstills and fault_at else max(started, step_time)
        record_fault(job.folder, verdict.fault, step, fault_at, events_before)
        if tries >= job.options.restarts or not verdict.is_recoverable or standstills > MAX_STANDSTILLS:
            return verdict
        pause = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**standstills)
        restart = f"restart {tries + 1} of {job.options.restarts} in {pause:.0f} s"
        say(f"{verdict.fault.line} ({verdict.fault.host}); {restart}")
        time.sleep(pause)
        if signals.received:
            return verdict
        job.port = job.options.master_port or free_port()
    raise AssertionError("endless")


def run_once(job: Launch, fault_at: float | None) -> Verdict:
    """Run one launch to its end."""
    name = name_launch()
    extra = {LAUNCH_VARIABLE: name, **({FAULT_VARIABLE: str(fault_at)} if fault_at else {})}
    plan, launcher = job.plan(extra), job.options.launcher
    plan.write(launcher)
    forget_faults(job.folder)
    say(f"{plan.ranks} ranks on {', '.join(node.name for node in plan.nodes)}")
    if fault_at is None and not (plan.unsupported_settings() or plan.words_to_quote()):
        say(f"equivalent command: {plan.command_line(launcher)}")
    if launcher == "ssh":
        ends = run_on_nodes(plan.nodes, plan.ssh_config, plan.folder, plan.orders)
    else:
        ends = run_by_deepspeed(plan, launcher)
    return judge(last_outcome(job.folder, name), ends, read_faults(job.folder), plan.nodes)


def run_by_deepspeed(plan: LaunchPlan, launcher: str) -> list[NodeEnd]:
    """Run one of DeepSpeed's multi-node launchers to its end."""
    uses_srun = launcher == "slurm"
    environment = {**os.environ, **plan.own_variables(launcher)}
    stderr = subprocess.PIPE if uses_srun else None
    command = owned(plan.deepspeed_command(launcher))
    process = start(command, environment, stderr=stderr, text=True, errors="replace")
    output = slurm.SrunOutput(process.stderr) if process.stderr else None
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            if uses_srun:
                end_group(process)  # srun is in the group and ends the step; deepspeed does not pass signals on to it
            else:
                process.terminate()  # deepspeed passes it on to the nodes
                process.wait()
    if output:
        output.wait()
        slurm.record_killed(plan.run_folder, output.first_killed)
    return [NodeEnd(node.name, code, "") for node in plan.nodes]


def shared_files(run: RunConfig) -> list[str]:
    """Return the files that every node reads: a DeepSpeed JSON of the user, the tokenizer, the corpus manifest.

    The further files of the tokenizer are optional: they count if this machine has them.
    """
    files = [run.deepspeed] if run.deepspeed.endswith(".json") else []
    if run.data.tokenizer:
        files.append(f"{run.data.tokenizer}/{TOKENIZER_FILE}")
        further = [f"{run.data.tokenizer}/{name}" for name in (CONFIG_FILE, TOKENS_MAP_FILE)]
        files += [file for file in further if expanded(file).is_file()]
    if run.data.corpus and "://" not in run.data.corpus:
        files.append(f"{run.data.corpus}/{MANIFEST_NAME}")
    return [str(expanded(file).absolute()) for file in files]


def failed(folder: RunFolder, fault: Fault, events_before: int) -> RanksFailed:
    """Return the error of a failed launch, after printing the unfinished collectives."""
    for line in flight_recorder.unfinished_lines(folder):
        say(line)
    rule = f"rank {fault.rank} on {fault.host} failed first: {fault.line}"
    record_failed_launch(folder, fault.line, events_before)
    fix = f"See {folder.root / 'logs'}; the same command resumes from the last checkpoint."
    return RanksFailed(f"training in {folder.root}", rule, fix, fault.code)


def last_step(folder: RunFolder) -> tuple[int, float]:
    """Return number and time of the last recorded step; zero if there is none."""
    record = last_record(folder.metrics)
    return (record["step"], record["time_unix"]) if record else (0, 0.0)


def record_fault(folder: RunFolder, fault: Fault, step: int, fault_at: float, events_before: int) -> None:
    """Append the fault to events.jsonl, unless another job has taken over the run."""
    details = {
        "rank": fault.rank,
        "host": fault.host,
        "line": fault.line,
        "collectives": flight_recorder.unfinished_lines(folder),
    }
    with may_record(folder, events_before) as is_ours:
        if is_ours:
            writer = RunWriter(folder)
            writer.event("fault", step=step, fault=fault.kind, **details, seconds=round(time.time() - fault_at, 3))
            writer.close()
