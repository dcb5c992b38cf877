"""What `z2all launch` does: nodes looked at, ranks started on all of them, the outcome judged, and again if asked to.

hostfile ─▶ preflight ─▶ plan ─▶ ranks on all nodes ─▶ verdict ─▶ done
               ▲                                          │
               └── without the nodes that are gone ◀── a fault that may be cured, and tries left
"""

import os
import subprocess
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from z2all_ds.base.child_process import end_group, owned, start
from z2all_ds.base.config import RunConfig
from z2all_ds.base.console import heartbeat, say
from z2all_ds.base.errors import EXIT_REQUEUE, ClusterError, Z2allError
from z2all_ds.base.fault_records import FAULT_VARIABLE, NODE_LOST, Fault, forget_faults, read_faults
from z2all_ds.base.machine import device_type, free_port
from z2all_ds.base.reports import print_lines
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.cluster import ssh
from z2all_ds.cluster.launch import slurm
from z2all_ds.cluster.launch.plan import LAUNCHERS, LaunchPlan, make_plan
from z2all_ds.cluster.launch.remote import NodeEnd, run_on_nodes
from z2all_ds.cluster.launch.verdicts import Verdict, judge
from z2all_ds.cluster.nodes import Node, SshAccess, read_nodes
from z2all_ds.cluster.preflight import report
from z2all_ds.cluster.preflight.checks import Preflight, Subject, preflight
from z2all_ds.cluster.preflight.compare import NodeFinding
from z2all_ds.corpus.manifest import MANIFEST_NAME
from z2all_ds.track.writer import RunWriter, last_outcome, last_record, read_records
from z2all_ds.train.command import RanksFailed, train_on_this_machine
from z2all_ds.train.pretrain import parse
from z2all_ds.train.processes import flight_recorder
from z2all_ds.train.processes.stopping import StopSignals, stop_on_signals
from z2all_ds.zero.ds_config import resolve
from z2all_ds.zero.op_builds import needed_ops

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
FIRST_BACKOFF_SECONDS, MOST_BACKOFF_SECONDS = 2.0, 60.0
STANDSTILLS = 2
"""So many tries in a row without a new step are enough: more would end in the same way."""


@dataclass(frozen=True)
class LaunchOptions:
    """As on the command line."""

    hostfile: str | None
    """None: the nodes of the slurm allocation."""
    launcher: str = "ssh"
    restarts: int = 0
    min_nodes: int | None = None
    """Start without nodes that are not fit, as long as so many are; default: all must be."""
    looks: bool = True
    """At the nodes, before every start."""
    dry_run: bool = False
    master_port: int | None = None
    health: bool = True
    """Also test their health with a torch job, before the first start."""
    exclude_slow: bool = False
    """Slow nodes are not fit."""


class Launch:
    """One command's."""

    def __init__(self, options: LaunchOptions, arguments: list[str]) -> None:
        if options.launcher not in LAUNCHERS:
            what, rule = f"launcher {options.launcher!r}", f"must be one of {', '.join(LAUNCHERS)}"
            raise ClusterError(what, rule, "Choose one.")
        self.options = options
        self.nodes = nodes_of(options)
        parsed, self.run = parse(arguments)
        self.resume = parsed.resume
        self.folder = RunFolder(Path(self.run.run_dir).expanduser().resolve())
        self.port = options.master_port or free_port()
        self.tests_health = options.health and not options.dry_run
        self.unhealthy: list[NodeFinding] = []

    def look(self) -> Preflight:
        """At all nodes of the hostfile, also those that were left out before. Their health is tested the first time
        alone, for a restart has no time to lose; so what was found then stays true."""
        config = ssh.write_config(self.nodes, self.folder.root / "launch" / "ssh_config")
        files = shared_files(self.run)
        subject = Subject(self.nodes, config, os.getcwd(), str(self.folder.root), files, self.port)
        with heartbeat(f"looking at {len(self.nodes)} nodes"):
            found = preflight(subject, self.tests_health, self.options.exclude_slow)
        found.findings += self.unhealthy
        self.unhealthy += found.health.failures if found.health else []
        self.tests_health = False
        return found

    def find_nodes(self) -> tuple[list[Node], Preflight]:
        """Those to start on, and what is known of them."""
        if not self.options.looks:
            return self.nodes, Preflight()
        found = self.look()
        return self.fit_nodes(found), found

    def fit_nodes(self, found: Preflight) -> list[Node]:
        """Those to start on; refuses where too few are fit."""
        unfit = found.unfit()
        must_not = [finding for finding in found.failures if self.options.min_nodes is None or finding.is_of_no_node]
        if must_not:
            print_lines(report.describe(found))
            first = must_not[0]
            closed = self.options.launcher == "slurm" and found.lost
            without = " Where ssh to nodes is closed, launch with --no-preflight." if closed else ""
            raise ClusterError(first.name, first.value, first.fix + without)
        fit = [node for node in self.nodes if node.name not in unfit]
        least = self.options.min_nodes or len(self.nodes)
        while fit and not self._shape_fits(fit, found.device):
            fit = fit[:-1]
        if len(fit) < least:
            print_lines(report.describe(found))
            rule = f"at least {least} are needed (left out: {', '.join(unfit)})"
            raise ClusterError(f"{len(fit)} fit nodes", rule, "Put right what is said above.")
        if len(fit) < len(self.nodes):
            say(f"without {', '.join(node.name for node in self.nodes if node not in fit)}")
        return fit

    def _shape_fits(self, nodes: list[Node], device: str) -> bool:
        """Whether the global batch and the lanes of the data can be dealt out to so many ranks."""
        ranks = sum(node.slots for node in nodes)
        if len(nodes) == len(self.nodes):
            resolve(self.run, ranks, device)  # what does not fit all nodes is a mistake of the config, and said
            return True
        try:
            resolve(self.run, ranks, device)
        except Z2allError:
            return False
        return self.run.num_lanes % ranks == 0

    def plan(self, nodes: list[Node], found: Preflight, fault_at: float | None) -> LaunchPlan:
        device = found.device if self.options.looks else device_type()
        ops = needed_ops(resolve(self.run, sum(node.slots for node in nodes), device), device)
        extra = {FAULT_VARIABLE: str(fault_at)} if fault_at else {}
        return make_plan(nodes, found.places, self.run, self.resume, self.port, ops, extra)


def nodes_of(options: LaunchOptions) -> list[Node]:
    """Of the hostfile, or of the slurm allocation."""
    by_slurm = options.launcher == "slurm"
    if options.hostfile is None and not by_slurm:
        raise ClusterError(f"launcher {options.launcher}", "needs to know the nodes", "Give --hostfile FILE.")
    nodes = read_nodes(options.hostfile) if options.hostfile else []
    return slurm.nodes_to_use(nodes, options.dry_run) if by_slurm else nodes


def launch(options: LaunchOptions, arguments: list[str]) -> str:
    """Trains on all nodes; returns and ends as `z2all train` does."""
    job = Launch(options, arguments)
    if options.launcher != "slurm" and is_this_machine(job.nodes):
        say("one node, this machine: as `z2all train`, without ssh")
        return train_here(job)
    if options.dry_run:
        plan = job.plan(*job.find_nodes(), None)
        plan.write()
        print(plan.shown(options.launcher))
        return "planned"
    with stop_on_signals(job.folder) as signals:
        verdict = supervise(job, signals)
    if verdict.outcome == "requeue" and signals.received and signals.received.name == "SIGINT":
        raise KeyboardInterrupt
    if verdict.fault and not (signals.received and verdict.may_be_cured):
        raise failed(job.folder, verdict.fault)
    if verdict.outcome == "requeue" or signals.received:
        raise SystemExit(EXIT_REQUEUE)
    return verdict.outcome


def is_this_machine(nodes: list[Node]) -> bool:
    """A hostfile as DeepSpeed's users have it for one box; with ssh settings, localhost is a container's port."""
    return len(nodes) == 1 and nodes[0].name in LOCAL_NAMES and nodes[0].ssh == SshAccess()


def train_here(job: Launch) -> str:
    return train_on_this_machine(job.run, job.nodes[0].slots, job.resume)


def supervise(job: Launch, signals: StopSignals) -> Verdict:
    """Tries until it is done, cannot be cured, or no try is left."""
    fault_at: float | None = None
    standstills = 0
    for tries in count():
        before, started = last_step(job.folder), time.time()
        try:
            verdict = run_once(job, *job.find_nodes(), fault_at)
        except ClusterError as error:  # too few nodes, perhaps because they are only now coming back
            if not tries:
                raise
            verdict = Verdict("failed", Fault(NODE_LOST, 0, "-", f"ClusterError: {error}", error.exit_code))
        if verdict.fault is None or signals.received:
            return verdict
        step = last_step(job.folder)
        standstills = 0 if step > before else standstills + 1
        fault_at = fault_at if standstills and fault_at else max(started, last_step_time(job.folder))
        tell(job.folder, verdict.fault, step, fault_at)
        if tries >= job.options.restarts or not verdict.may_be_cured or standstills > STANDSTILLS:
            return verdict
        pause = min(MOST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**standstills)
        say(f"{verdict.fault.line} ({verdict.fault.host}); try {tries + 1} of {job.options.restarts} in {pause:.0f} s")
        time.sleep(pause)
        if signals.received:
            return verdict
        job.port = job.options.master_port or free_port()
    raise AssertionError("endless")


def run_once(job: Launch, nodes: list[Node], found: Preflight, fault_at: float | None) -> Verdict:
    """One launch on these nodes, to its end."""
    plan = job.plan(nodes, found, fault_at)
    plan.write()
    forget_faults(job.folder)
    words = sum(1 for _ in read_records(job.folder.events))
    say(f"{plan.ranks} ranks on {', '.join(node.name for node in plan.nodes)}")
    if fault_at is None and not plan.told_apart():
        say(f"by hand: {plan.plain_line(job.options.launcher)}")
    if job.options.launcher == "ssh":
        ends = run_on_nodes(plan.nodes, plan.ssh_config, plan.folder, plan.orders)
    else:
        ends = run_by_deepspeed(plan, job.options.launcher)
    said_something = sum(1 for _ in read_records(job.folder.events)) > words
    return judge(last_outcome(job.folder) if said_something else None, ends, read_faults(job.folder), plan.nodes)


def run_by_deepspeed(plan: LaunchPlan, launcher: str) -> list[NodeEnd]:
    """DeepSpeed's own way over all nodes."""
    differing = plan.told_apart(launcher)
    if differing:
        raise ClusterError(
            f"launcher {launcher}",
            f"has one value for all nodes, and these differ or are secret: {', '.join(differing)}",
            "Use --launcher ssh (the default).",
        )
    started = time.monotonic()
    variables = plan.deepspeed_variables(launcher)
    by_srun = launcher == "slurm"
    process = start(
        owned(plan.deepspeed_command(launcher)),
        {**os.environ, **variables},
        stderr=subprocess.PIPE if by_srun else None,
        text=True,
        errors="replace",
    )
    words = slurm.SrunWords(process.stderr) if process.stderr else None
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            if by_srun:
                end_group(process)  # srun is in it, and ends the step; deepspeed would pass nothing on
            else:
                process.terminate()  # it passes that on to the nodes
                process.wait()
    if words:
        words.wait()
        slurm.note_killed(RunFolder(Path(plan.orders[plan.nodes[0].name].run_dir)), words.first_killed)
    return [NodeEnd(node.name, code, "", time.monotonic() - started) for node in plan.nodes]


def shared_files(run: RunConfig) -> list[str]:
    """What every node reads: the DeepSpeed JSON if it is your own, the tokenizer, the corpus's manifest."""
    files = [run.deepspeed] if run.deepspeed.endswith(".json") else []
    if run.data.tokenizer:
        files.append(str(Path(run.data.tokenizer).expanduser() / "tokenizer.json"))
    if run.data.corpus and "://" not in run.data.corpus:
        files.append(str(Path(run.data.corpus).expanduser() / MANIFEST_NAME))
    return [str(Path(file).expanduser().absolute()) for file in files]


def failed(folder: RunFolder, fault: Fault) -> RanksFailed:
    where = f"rank {fault.rank} on {fault.host}"
    for line in flight_recorder.told(folder):
        say(line)
    fix = f"See {folder.root / 'logs'}; the same command goes on from the last checkpoint."
    return RanksFailed(f"training in {folder.root}", f"{where} failed first: {fault.line}", fix, fault.code)


def last_step(folder: RunFolder) -> int:
    record = last_record(folder.metrics)
    return record["step"] if record else 0


def last_step_time(folder: RunFolder) -> float:
    record = last_record(folder.metrics)
    return record["time_unix"] if record else 0.0


def tell(folder: RunFolder, fault: Fault, step: int, fault_at: float) -> None:
    """In events.jsonl, beside what the run itself writes there."""
    folder.root.mkdir(parents=True, exist_ok=True)
    writer = RunWriter(folder)
    noticed = round(time.time() - fault_at, 3)
    who = {"rank": fault.rank, "host": fault.host, "line": fault.line, "collectives": flight_recorder.told(folder)}
    writer.event("fault", step=step, fault=fault.kind, **who, seconds=noticed)
    writer.close()
