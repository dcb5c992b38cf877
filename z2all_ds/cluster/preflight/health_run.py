"""Runs the health test over the agents of all nodes: a torch job in rounds of pairs, then a sum over all of them.

    torch loads on every node, while other things are looked at ─▶ rounds of pairs ─▶ judged (`health.py`)
                                                                               ─▶ all-reduce over those that are well

This side leads: it says who meets whom and waits for all, so a node that never comes is one without an answer here, and
hangs nobody.
"""

import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from typing import Any

from z2all_ds.cluster.agents.fleet import NoAnswer, RemoteAgent
from z2all_ds.cluster.doctor import FAIL, OK
from z2all_ds.cluster.forwarded import forwarded
from z2all_ds.cluster.launch.rendezvous import DataAddress, inside_port, meeting_point
from z2all_ds.cluster.nodes import Node
from z2all_ds.cluster.preflight.compare import NodeFinding
from z2all_ds.cluster.preflight.health_rules import Pair, Turn, judge_health, pairs_of_round

MODULE = "z2all_ds.cluster.preflight.health_worker"
TORCH_SECONDS = 60.0
"""For loading torch, which takes some seconds, and more from a shared disk that is asked by all nodes at once."""
ORDER_SECONDS = 20.0
"""The process itself gives up after 5 s of silence, for each of its few messages."""
ON_THE_WAY_SECONDS = 3.0


@dataclass
class Health:
    """All that was found."""

    turns: list[Turn] = field(default_factory=list)
    findings: list[NodeFinding] = field(default_factory=list)
    reduce_ms: float | None = None
    """Of the sum over all nodes."""

    @property
    def failures(self) -> list[NodeFinding]:
        return [finding for finding in self.findings if finding.status == FAIL]


def load_torch(nodes: list[Node], agents: Mapping[str, RemoteAgent]) -> "dict[str, Future[None]]":
    """Begins it; what goes wrong is told when the test itself begins."""
    loading = {}
    for node in nodes:
        environment = {**forwarded(os.environ), **node.environment}
        loading[node.name] = agents[node.name].ask("start_worker", module=MODULE, environment=environment)
    return loading


class HealthTest:
    """On nodes that passed all else, and on which torch is being loaded."""

    def __init__(
        self, nodes: list[Node], places: Mapping[str, DataAddress], agents: Mapping[str, RemoteAgent], master_port: int
    ) -> None:
        self.nodes, self.places, self.agents, self.master_port = nodes, places, agents, master_port
        self.result = Health()
        self.ports: dict[str, int] = {}
        """Of the stores; has all who take part."""
        self.device = "cpu"

    def run(self, loading: "Mapping[str, Future[None]]", exclude_slow: bool = False) -> Health:
        self._blame_torch(self._open_stores(self.nodes, loading))
        number = 1
        while pairs := pairs_of_round(number, list(self.ports), self.result.turns):
            self._play(number, pairs)
            number += 1
        self.result.findings += judge_health(self.result.turns, exclude_slow)
        out = {name for finding in self.result.failures for name in finding.nodes}
        well = [node for node in self.nodes if node.name in self.ports and node.name not in out]
        if len(well) > 1 and not any(finding.pair for finding in self.result.failures):
            self._reduce(well)
        if not self.result.failures:
            self.result.findings.append(NodeFinding("health", OK, self._told()))
        return self.result

    def _open_stores(self, nodes: list[Node], loading: "Mapping[str, Future[None]]") -> dict[str, str]:
        """On each node, as soon as torch is loaded there; returns the problems."""
        _, not_begun = _answers({node.name: loading[node.name] for node in nodes}, TORCH_SECONDS)
        orders = {
            node.name: {
                "do": "open",
                "address": self.places[node.name].address,
                "port": 0,
                "interface": self.places[node.name].interface,
            }
            for node in nodes
            if node.name not in not_begun
        }
        answers, problems = self._work(orders, TORCH_SECONDS)
        self.ports |= {name: answer["port"] for name, answer in answers.items()}
        if len(answers) == len(self.ports) and all(answer["device"] == "cuda" for answer in answers.values()):
            self.device = "cuda"
        return {**not_begun, **{name: reply["problem"] for name, reply in problems.items()}}

    def _blame_torch(self, problems: Mapping[str, str]) -> None:
        for name, problem in problems.items():
            fix = f"Run `python -c 'import torch'` on {name} with the interpreter of its ranks."
            self.result.findings.append(NodeFinding(f"{name}: torch", FAIL, problem, fix, (name,)))

    def _play(self, number: int, pairs: list[Pair]) -> None:
        """Matmuls first and on all: in a meeting, who computes slowly would look like who does not come."""
        names = [name for pair in pairs for name in pair]
        computed, failed = self._work({name: {"do": "compute", "device": self.device} for name in names})
        orders = {}
        for pair in pairs:
            store = {"address": self.places[pair[0]].address, "port": self.ports[pair[0]]}
            if all(name in computed for name in pair):
                for rank, name in enumerate(pair):
                    world = {"name": f"round {number}", "rank": rank, "size": 2, **store}
                    orders[name] = {"do": "meet", "device": self.device, **world}
        met, problems = self._work(orders)
        for one, other in (each for pair in pairs for each in (pair, pair[::-1])):
            reply = failed.get(one) or problems.get(one) or {}
            self.result.turns.append(
                Turn(
                    round=number,
                    node=one,
                    partner=other,
                    matmul_ms=computed.get(one, {}).get("matmul_ms"),
                    gather_gbps=met.get(one, {}).get("gather_gbps"),
                    problem=reply.get("problem", ""),
                    alone=one in failed or "ended" in reply,
                )
            )
        # Stuck where no timeout of torch's reaches, perhaps by the partner's doing; with the next one it may go well.
        late = [node for node in self.nodes if "late" in problems.get(node.name, {})]
        if late:
            self._open_stores(late, load_torch(late, self.agents))

    def _reduce(self, nodes: list[Node]) -> None:
        """Met at the very point where ranks will meet."""
        master, place = nodes[0], self.places[nodes[0].name]
        inside = inside_port(master, self.master_port)
        open_there = {"do": "open", "address": place.address, "port": inside, "interface": place.interface}
        _, problems = self._work({master.name: open_there})
        if not problems:
            outside = meeting_point(master, place, self.master_port)
            orders = {}
            for rank, node in enumerate(nodes):
                address, port = (place.address, inside) if rank == 0 else outside
                world = {"name": "all", "rank": rank, "size": len(nodes), "address": address, "port": port}
                orders[node.name] = {"do": "reduce", "device": self.device, **world}
            answers, problems = self._work(orders)
            self.result.reduce_ms = max((answer["ms"] for answer in answers.values()), default=None)
        if problems:
            told = "; ".join(f"{name}: {reply['problem']}" for name, reply in problems.items())
            fix = "Every pair works alone: look for a way that some two have not, or for limits on connections."
            self.result.findings.append(NodeFinding("all-reduce", FAIL, told, fix, tuple(problems)))

    def _work(
        self, orders: Mapping[str, Mapping[str, Any]], seconds: float = ORDER_SECONDS
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Answers, and what is said of problems (see `Worker.ask`); all work at the same time."""
        asked = {name: self.agents[name].ask("work", order=order, seconds=seconds) for name, order in orders.items()}
        replies, lost = _answers(asked, seconds)
        answers = {name: reply["answer"] for name, reply in replies.items() if "answer" in reply}
        problems = {name: reply for name, reply in replies.items() if "problem" in reply}
        return answers, {**problems, **{name: {"problem": said, "ended": True} for name, said in lost.items()}}

    def _told(self) -> str:
        matmuls = [turn.matmul_ms for turn in self.result.turns if turn.matmul_ms is not None]
        gathers = [turn.gather_gbps for turn in self.result.turns if turn.gather_gbps is not None]
        return (
            f"{len(self.ports)} nodes on {self.device}: matmul {min(matmuls):.2f} to {max(matmuls):.2f} ms, all-gather"
            f" {min(gathers):.3g} to {max(gathers):.3g} GB/s, sum over all right in {self.result.reduce_ms:.0f} ms"
        )


def _answers(asked: Mapping[str, "Future[Any]"], seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    deadline = time.monotonic() + seconds + ON_THE_WAY_SECONDS
    answers, problems = {}, {}
    for name, future in asked.items():
        try:
            answers[name] = future.result(max(0.0, deadline - time.monotonic()))
        except NoAnswer as problem:
            problems[name] = problem.trouble.said
        except NotInTime:
            problems[name] = NoAnswer.late(seconds).trouble.said
    return answers, problems
