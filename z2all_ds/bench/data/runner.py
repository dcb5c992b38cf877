"""Runs the cases of `z2all bench data`, each in a process of its own on one core, in turn, and takes the middle."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import MachineError
from z2all_ds.bench.data.cases import OURS, PEER_SOURCES, Case, Cases
from z2all_ds.bench.peers import environments
from z2all_ds.bench.peers.measuring import ONE_THREAD

Key = tuple[str, str]
"""By whom, and the name."""
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
            except (environments.PeerMissing, MachineError) as error:
                self._peers[peer] = str(error)
                say(f"bench data: {peer} is left out: {error}")

    def measure(self, label: str, cases: Sequence[Case]) -> list[Measured]:
        """All cases in turn, `repeats` times; of each the middle one."""
        with progress(f"bench data, {label}", self._count(cases) * self._repeats, "measurements") as advance:
            found, failed = self._in_turn(cases, [""] * self._repeats, advance)
        return [
            Measured(name, by, failed[by, name]) if (by, name) in failed else Measured(name, by, "", _middle(repeats))
            for (by, name), repeats in found.items()
        ]

    def measure_resume(self, cases: Sequence[Case]) -> list[Measured]:
        """Each reads half an epoch once and then goes on from there `repeats` times, in a new process each time."""
        tasks = ["half", *["resume"] * self._repeats]
        with progress("bench data, resume", self._count(cases) * len(tasks), "measurements") as advance:
            found, failed = self._in_turn(cases, tasks, advance)
        results = []
        for (by, name), repeats in found.items():
            if (by, name) in failed:
                results.append(Measured(name, by, failed[by, name]))
                continue
            half, middle = repeats[0], _middle(repeats[1:])
            exact = middle.pop("next_batch") == half["next_batch"]
            results.append(Measured(name, by, "", {**middle, "state_bytes": half["state_bytes"], "exact": exact}))
        return results

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
            why = f"exit code {done.returncode}" if done.returncode > 0 else f"killed by signal {-done.returncode}"
            rule = f"{why}: {environments.last_words(done.stderr)}"
            raise MachineError(f"{case.by}, {case.name}", rule, "Run it again.")
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        self.packages.setdefault(case.by, {}).update(figures.pop("packages"))
        return figures

    def _count(self, cases: Sequence[Case]) -> int:
        return len([case for case in cases if case.by == OURS or case.by in self._peers])

    def _in_turn(
        self, cases: Sequence[Case], tasks: Sequence[str], advance: Any
    ) -> tuple[dict[Key, list[Figures]], dict[Key, str]]:
        """(figures of every task, last words of those that failed). A task "" is the case's own."""
        cases = [case for case in cases if case.by == OURS or case.by in self._peers]
        found: dict[Key, list[Figures]] = {(case.by, case.name): [] for case in cases}
        failed = {(case.by, case.name): self._peers[case.by] for case in cases if self._peers.get(case.by)}
        for task in tasks:
            for case in cases:
                key = (case.by, case.name)
                if key not in failed:
                    job = {**case.job, "task": task} if task else case.job
                    try:
                        found[key].append(self.run(Case(case.name, case.by, job)))
                    except MachineError as error:
                        failed[key] = str(error)
                advance(1, f"{case.by}: {case.name}")
        return found, failed


def _middle(repeats: Sequence[Figures]) -> Figures:
    """Speed by processor time; what people wait for by the clock."""
    by = "first_batch_seconds" if "first_batch_seconds" in repeats[0] else "seconds"
    if "tokens" in repeats[0]:
        by = "cpu_seconds"
    middle = dict(sorted(repeats, key=lambda one: one[by])[(len(repeats) - 1) // 2])
    if "tokens" in middle:
        middle["tokens_per_cpu_second"] = middle["tokens"] / middle["cpu_seconds"]
        middle["tokens_per_second"] = middle["tokens"] / middle["seconds"]
    return middle
