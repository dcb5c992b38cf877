"""Runs the health test through the agents of all nodes: rounds of pairs, then an all-reduce over all healthy nodes.

    torch loads on every node, during the other checks ─▶ rounds of pairs ─▶ judged (`health_rules.py`)
                                                                           ─▶ all-reduce over the healthy nodes

This side assigns the pairs and waits for all answers, so a node that hangs delays nobody: it only gives no answer.
"""

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from z2all_ds.cluster.agents.fleet import RemoteAgent, wait_for_all
from z2all_ds.cluster.doctor import FAIL, OK
from z2all_ds.cluster.nodes import DataAddress, Node, forwarded, inside_port, rendezvous
from z2all_ds.cluster.preflight.compare import NodeFinding
from z2all_ds.cluster.preflight.health_rules import Pair, Turn, judge_health, pairs_of_round

MODULE = "z2all_ds.cluster.preflight.health_worker"
TORCH_SECONDS = 60.0
"""For loading torch: some seconds, and more from a shared disk that all nodes read at once."""
ORDER_SECONDS = 20.0
"""The worker itself gives up after 5 s of silence, for each of its few messages."""
TRANSIT_SECONDS = 3.0


@dataclass
class Health:
    """The result of the health test."""

    turns: list[Turn] = field(default_factory=list)
    findings: list[NodeFinding] = field(default_factory=list)
    reduce_ms: float | None = None
    """Time of the all-reduce over all nodes."""
    device: str | None = None
    """cpu or cuda; None if something failed."""

    @property
    def failures(self) -> list[NodeFinding]:
        return [finding for finding in self.findings if finding.status == FAIL]


def load_torch(nodes: list[Node], agents: Mapping[str, RemoteAgent]) -> "dict[str, Future[None]]":
    """Start the workers, which load torch. Failures show when the test begins."""
    return {
        node.name: agents[node.name].ask(
            "start_worker", module=MODULE, environment={**forwarded(os.environ), **node.environment}
        )
        for node in nodes
    }


class HealthTest:
    """The test of nodes that passed all other checks and on which torch is being loaded."""

    def __init__(
        self, nodes: list[Node], data: Mapping[str, DataAddress], agents: Mapping[str, RemoteAgent], master_port: int
    ) -> None:
        self.nodes, self.data, self.agents, self.master_port = nodes, data, agents, master_port
        self.result = Health()
        self.ports: dict[str, int] = {}
        """Ports of the stores, of all nodes that take part."""
        self.device = "cpu"

    def run(self, loading: "Mapping[str, Future[None]]", exclude_slow: bool = False) -> Health:
        for name, problem in self._open_stores(self.nodes, loading).items():
            fix = f"Run `python -c 'import torch'` on {name} with the interpreter of its ranks."
            self.result.findings.append(NodeFinding(f"{name}: torch", FAIL, problem, fix, (name,)))
        number = 1
        while pairs := pairs_of_round(number, list(self.ports), self.result.turns):
            self._run_round(number, pairs)
            number += 1
        self.result.findings += judge_health(self.result.turns, exclude_slow)
        failed = {name for finding in self.result.failures for name in finding.nodes}
        healthy = [node for node in self.nodes if node.name in self.ports and node.name not in failed]
        if len(healthy) > 1 and not any(finding.pair for finding in self.result.failures):
            self._reduce(healthy)
        if not self.result.failures:
            self.result.device = self.device
            self.result.findings.append(NodeFinding("health", OK, self._summary()))
        return self.result

    def _open_stores(self, nodes: list[Node], loading: "Mapping[str, Future[None]]") -> dict[str, str]:
        """Open a store on each node as soon as torch is loaded there; return the problems."""
        _, not_started = wait_for_all({node.name: loading[node.name] for node in nodes}, TORCH_SECONDS)
        names = [node.name for node in nodes if node.name not in not_started]
        answers, problems = self._work({name: self._open_order(name, 0) for name in names}, TORCH_SECONDS)
        self.ports |= {name: answer["port"] for name, answer in answers.items()}
        if len(answers) == len(self.ports) and all(answer["device"] == "cuda" for answer in answers.values()):
            self.device = "cuda"
        problems |= {name: {"problem": failure.message} for name, failure in not_started.items()}
        return {name: reply["problem"] for name, reply in problems.items()}

    def _open_order(self, name: str, port: int) -> dict[str, Any]:
        return {"do": "open", "address": self.data[name].address, "port": port, "interface": self.data[name].interface}

    def _run_round(self, number: int, pairs: list[Pair]) -> None:
        """Compute on all nodes first: in an exchange, a node that computes slowly would look like one that hangs."""
        names = [name for pair in pairs for name in pair]
        computed, failed = self._work({name: {"do": "compute", "device": self.device} for name in names})
        orders = {}
        for pair in pairs:
            store = {"address": self.data[pair[0]].address, "port": self.ports[pair[0]]}
            if all(name in computed for name in pair):
                for rank, name in enumerate(pair):
                    world = {"name": f"round {number}", "rank": rank, "size": 2, **store}
                    orders[name] = {"do": "exchange", "device": self.device, **world}
        exchanged, problems = self._work(orders)
        for one, other in (each for pair in pairs for each in (pair, pair[::-1])):
            reply = failed.get(one) or problems.get(one) or {}
            self.result.turns.append(
                Turn(
                    round=number,
                    node=one,
                    partner=other,
                    matmul_ms=computed.get(one, {}).get("matmul_ms"),
                    gather_gbps=exchanged.get(one, {}).get("gather_gbps"),
                    problem=reply.get("problem", ""),
                    alone=one in failed or "ended" in reply,
                )
            )
        # A worker that hangs beyond torch's timeouts, perhaps because of its partner, gets another try with the next.
        late = [node for node in self.nodes if "late" in problems.get(node.name, {})]
        if late:
            self._open_stores(late, load_torch(late, self.agents))

    def _reduce(self, nodes: list[Node]) -> None:
        """All-reduce over all nodes, at the address and port where the ranks will meet."""
        master, data = nodes[0], self.data[nodes[0].name]
        inside = data.address, inside_port(master, self.master_port)
        _, problems = self._work({master.name: self._open_order(master.name, inside[1])})
        if not problems:
            outside = rendezvous(master, data, self.master_port)
            orders = {}
            for rank, node in enumerate(nodes):
                address, port = outside if rank else inside
                world = {"name": "all", "rank": rank, "size": len(nodes), "address": address, "port": port}
                orders[node.name] = {"do": "reduce", "device": self.device, **world}
            answers, problems = self._work(orders)
            self.result.reduce_ms = max((answer["ms"] for answer in answers.values()), default=None)
        if problems:
            value = "; ".join(f"{name}: {reply['problem']}" for name, reply in problems.items())
            fix = "The tested pairs work: look for a pair without a route, or for limits on connections."
            self.result.findings.append(NodeFinding("all-reduce", FAIL, value, fix, tuple(problems)))

    def _work(
        self, orders: Mapping[str, Mapping[str, Any]], seconds: float = ORDER_SECONDS
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Send all orders at once; return answers and problems (see `Worker.ask`) by node."""
        asked = {name: self.agents[name].ask("work", order=order, seconds=seconds) for name, order in orders.items()}
        replies, lost = wait_for_all(asked, seconds + TRANSIT_SECONDS)
        answers = {name: reply["answer"] for name, reply in replies.items() if "answer" in reply}
        problems = {name: reply for name, reply in replies.items() if "problem" in reply}
        problems |= {name: {"problem": failure.message, "ended": True} for name, failure in lost.items()}
        return answers, problems

    def _summary(self) -> str:
        matmuls = [turn.matmul_ms for turn in self.result.turns if turn.matmul_ms is not None]
        gathers = [turn.gather_gbps for turn in self.result.turns if turn.gather_gbps is not None]
        return (
            f"{len(self.ports)} nodes on {self.device}: matmul {min(matmuls):.2f} to {max(matmuls):.2f} ms, all-gather"
            f" {min(gathers):.3g} to {max(gathers):.3g} GB/s, all-reduce correct in {self.result.reduce_ms:.0f} ms"
        )
