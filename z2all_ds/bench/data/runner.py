"""Runs the cases of `z2all bench data`, each in a process of its own on one core, and takes the median repeat."""

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from z2all_ds.base.child_process import module_command
from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import MachineError
from z2all_ds.bench.data.cases import OURS, PEER_SOURCES, Case, Cases
from z2all_ds.bench.peers import environments
from z2all_ds.bench.peers.measuring import ONE_THREAD, Figures
from z2all_ds.bench.shared import error_line, median_repeat, run_process


@dataclass(frozen=True)
class Measured:
    """A case and its median repeat. A failed one has the error instead of figures."""

    name: str
    by: str
    failed: str = ""
    figures: Figures = field(default_factory=dict)


class Runner:
    """Starts the processes of all cases."""

    def __init__(self, scratch: Path, environment: Path, repeats: int) -> None:
        """`environment`: folder of the peers' environment."""
        self._scratch, self._environment, self._repeats = scratch, environment, repeats
        self._core = max(os.sched_getaffinity(0))
        self._peer_failures: dict[str, str] = {}
        """Peer -> its error, "" if it is ready."""
        self.packages: dict[str, dict[str, str]] = {}
        """Loader -> versions of its packages."""

    def prepare_peers(self, cases: Cases, peers: Iterable[str] = PEER_SOURCES) -> None:
        """Installs the peers, and lets each write the documents in its own format. One that fails is skipped."""
        for peer in peers:
            self._peer_failures[peer] = ""
            try:
                environments.make_ready(self._environment, peer)
                for source in PEER_SOURCES[peer]:
                    cases.samples_written[peer, source] = self.run(cases.prepare(peer, source))["samples"]
            except MachineError as error:
                self._peer_failures[peer] = str(error)
                say(f"bench data: {peer} is skipped: {error}")

    def measure(self, label: str, cases: Sequence[Case]) -> list[Measured]:
        """Runs all cases `repeats` times and takes the median of each."""
        return self._alternate(label, cases, [""] * self._repeats, _median)

    def measure_resume(self, cases: Sequence[Case]) -> list[Measured]:
        """Lets each case read half an epoch once and resume from there `repeats` times, always in a new process."""

        def compare(found: list[Figures]) -> Figures:
            half, figures = found[0], _median(found[1:])
            exact = figures.pop("next_batch") == half["next_batch"]
            return {**figures, "state_bytes": half["state_bytes"], "exact": exact}

        return self._alternate("resume", cases, ["half", *["resume"] * self._repeats], compare)

    def run(self, case: Case) -> Figures:
        """Runs one process and returns its figures."""
        command = module_command("z2all_ds.bench.data.process")
        environment = {**os.environ, **ONE_THREAD}
        if case.by != OURS:
            script = Path(environments.__file__).with_name(f"{case.by}.py")
            command = [str(environments.python_of(self._environment)), str(script)]
            environment.pop("PYTHONPATH", None)  # the peers have their own packages
            environment |= {"HF_HOME": str(self._scratch / "hf_home"), "HF_HUB_OFFLINE": "1"}
        done = run_process(command, {**case.job, "core": self._core}, stderr=subprocess.PIPE, env=environment)
        if done.returncode:
            rule = f"failed with exit code {done.returncode}: {error_line(done.stderr)}"
            raise MachineError(f"{case.by}, {case.name}", rule, "Run it again.")
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        self.packages.setdefault(case.by, {}).update(figures.pop("packages"))
        return figures

    def _alternate(
        self, label: str, cases: Sequence[Case], tasks: Sequence[str], summarize: Callable[[list[Figures]], Figures]
    ) -> list[Measured]:
        """Runs each task of all cases before the next task; "" is the case's own. After a failure a case is skipped."""
        cases = [case for case in cases if case.by == OURS or case.by in self._peer_failures]
        found: list[list[Figures]] = [[] for _ in cases]
        failed = [self._peer_failures.get(case.by, "") for case in cases]
        with progress(f"bench data, {label}", len(cases) * len(tasks), "measurements") as advance:
            for task, (number, case) in itertools.product(tasks, enumerate(cases)):
                if not failed[number]:
                    job = {**case.job, "task": task} if task else case.job
                    try:
                        found[number].append(self.run(Case(case.name, case.by, job)))
                    except MachineError as error:
                        failed[number] = str(error)
                advance(1, f"{case.by}: {case.name}")
        return [
            Measured(case.name, case.by, why, {} if why else summarize(figures))
            for case, figures, why in zip(cases, found, failed, strict=True)
        ]


def _median(repeats: Sequence[Figures]) -> Figures:
    """Returns the median repeat: of speed by CPU time, of a resume by wall-clock time."""
    by = next(name for name in ("cpu_seconds", "first_batch_seconds", "seconds") if name in repeats[0])
    figures = dict(median_repeat(repeats, by))
    if "tokens" in figures:
        figures["tokens_per_cpu_second"] = figures["tokens"] / figures["cpu_seconds"]
        figures["tokens_per_second"] = figures["tokens"] / figures["seconds"]
    return figures
