"""Runs the cases of `z2all bench data`, each in a process of its own on one core, in turn, and takes the middle."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import MachineError
from z2all_ds.bench.data.cases import OURS, PEER_SOURCES, Case, Cases
from z2all_ds.bench.peers import environments
from z2all_ds.bench.peers.measuring import ONE_THREAD
from z2all_ds.bench.shared import last_words, middle, why_ended

Figures = dict[str, Any]
OUR_PROCESS = ["-c", "from z2all_ds.bench.data.process import work; work()"]


@dataclass(frozen=True)
class Measured:
    """A case and the middle of its repeats. A failed one has its last words and no figures."""

    name: str
    by: str
    failed: str = ""
    figures: Figures = field(default_factory=dict)


class Runner:
    """Knows who can be measured, and how a process is started."""

    def __init__(self, scratch: Path, environment: Path, repeats: int) -> None:
        """`environment` is the folder of the peers'."""
        self._scratch, self._environment, self._repeats = scratch, environment, repeats
        self._core = max(os.sched_getaffinity(0))
        self._peers: dict[str, str] = {}
        """Peer -> its last words if it failed."""
        self.packages: dict[str, dict[str, str]] = {}
        """By whom they are used."""

    def prepare_peers(self, cases: Cases, peers: Iterable[str] = PEER_SOURCES) -> None:
        """Installs them, and lets each write the documents in its own form. One that fails is left out."""
        for peer in peers:
            try:
                environments.make_ready(self._environment, peer)
                for source in PEER_SOURCES[peer]:
                    cases.samples_written[peer, source] = self.run(cases.prepare(peer, source))["samples"]
                self._peers[peer] = ""
            except MachineError as error:
                self._peers[peer] = str(error)
                say(f"bench data: {peer} is left out: {error}")

    def measure(self, label: str, cases: Sequence[Case]) -> list[Measured]:
        """Runs all cases in turn, `repeats` times; of each the middle one counts."""
        return self._in_turn(label, cases, [""] * self._repeats, _middle)

    def measure_resume(self, cases: Sequence[Case]) -> list[Measured]:
        """Each reads half an epoch once and then goes on from there `repeats` times, in a new process each time."""

        def resumed(found: list[Figures]) -> Figures:
            half, figures = found[0], _middle(found[1:])
            exact = figures.pop("next_batch") == half["next_batch"]
            return {**figures, "state_bytes": half["state_bytes"], "exact": exact}

        return self._in_turn("resume", cases, ["half", *["resume"] * self._repeats], resumed)

    def run(self, case: Case) -> Figures:
        """One process, from its start to its figures."""
        command = [sys.executable, *OUR_PROCESS]
        own = {**os.environ, **ONE_THREAD}
        if case.by != OURS:
            script = Path(environments.__file__).with_name(f"{case.by}.py")
            command = [str(environments.python_of(self._environment)), str(script)]
            own.pop("PYTHONPATH", None)  # our packages are not theirs
            own |= {"HF_HOME": str(self._scratch / "hf_home"), "HF_HUB_OFFLINE": "1"}
        job = json.dumps({**case.job, "core": self._core})
        done = subprocess.run(command, input=job, capture_output=True, text=True, env=own)
        if done.returncode:
            rule = f"{why_ended(done.returncode)}: {last_words(done.stderr)}"
            raise MachineError(f"{case.by}, {case.name}", rule, "Run it again.")
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        self.packages.setdefault(case.by, {}).update(figures.pop("packages"))
        return figures

    def _in_turn(
        self, label: str, cases: Sequence[Case], tasks: Sequence[str], summarise: Callable[[list[Figures]], Figures]
    ) -> list[Measured]:
        """Runs each task of all cases before the next one; a task "" is the case's own. One that fails is left out."""
        cases = [case for case in cases if case.by == OURS or case.by in self._peers]
        found: list[list[Figures]] = [[] for _ in cases]
        failed = [self._peers.get(case.by, "") for case in cases]
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
            Measured(case.name, case.by, why, {} if why else summarise(figures))
            for case, figures, why in zip(cases, found, failed, strict=True)
        ]


def _middle(repeats: Sequence[Figures]) -> Figures:
    """Speed by processor time; what people wait for by the clock."""
    by = "first_batch_seconds" if "first_batch_seconds" in repeats[0] else "seconds"
    if "tokens" in repeats[0]:
        by = "cpu_seconds"
    figures = dict(middle(repeats, by))
    if "tokens" in figures:
        figures["tokens_per_cpu_second"] = figures["tokens"] / figures["cpu_seconds"]
        figures["tokens_per_second"] = figures["tokens"] / figures["seconds"]
    return figures
