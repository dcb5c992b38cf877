"""Tests of the health test with fake agents, for cases that real agents cannot produce in time."""

from concurrent.futures import Future
from typing import Any

from z2all_ds.cluster.doctor import FAIL
from z2all_ds.cluster.nodes import DataAddress, Node
from z2all_ds.cluster.preflight.health_run import Health, HealthTest, load_torch


class FakeAgent:
    """A fake agent whose worker succeeds; with `late_once` its first exchange exceeds the time limit."""

    def __init__(self, device: str = "cpu", late_once: bool = False) -> None:
        self.device, self.late_once = device, late_once
        self.starts = 0
        self.orders: list[dict[str, Any]] = []

    def ask(self, what: str, **details: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        if what == "start_worker":
            self.starts += 1
            future.set_result(None)
        else:
            self.orders.append(details["order"])
            future.set_result(self.reply(details["order"]["do"]))
        return future

    def reply(self, do: str) -> dict[str, Any]:
        if do == "exchange" and self.late_once:
            self.late_once = False
            return {"problem": "not done within 20 s", "late": True}
        answers = {"open": {"port": 4000 + self.starts, "device": self.device}, "compute": {"matmul_ms": 1.0}}
        return {"answer": {**answers, "exchange": {"gather_gbps": 1.0}, "reduce": {"ms": 1.0}}[do]}


def health_of(agents: dict[str, FakeAgent]) -> Health:
    nodes = [Node(name=name, slots=1) for name in agents]
    data = {name: DataAddress(f"10.0.0.{number}", "eth0") for number, name in enumerate(agents)}
    test = HealthTest(nodes, data, agents, 29500)  # type: ignore[arg-type]
    return test.run(load_torch(nodes, agents))  # type: ignore[arg-type]


def test_a_late_worker_is_restarted_for_the_next_round() -> None:
    agents = {f"n{i}": FakeAgent(late_once=i == 1) for i in range(4)}
    found = health_of(agents)
    assert {name: agent.starts for name, agent in agents.items()} == {"n0": 1, "n1": 2, "n2": 1, "n3": 1}
    (failure,) = found.failures
    assert failure.pair == ("n0", "n1") and failure.nodes == ()  # it can be either of the two
    assert found.reduce_ms is None


def test_gpus_are_used_if_all_nodes_have_them() -> None:
    for devices, used in ((("cuda", "cuda"), "cuda"), (("cuda", "cpu"), "cpu")):
        agents = {f"n{i}": FakeAgent(device) for i, device in enumerate(devices)}
        found = health_of(agents)
        assert not [finding for finding in found.findings if finding.status == FAIL]
        assert {order["device"] for agent in agents.values() for order in agent.orders if "device" in order} == {used}


def test_the_all_reduce_uses_the_rendezvous_of_the_launch() -> None:
    agents = {f"n{i}": FakeAgent() for i in range(3)}
    health_of(agents)
    last = [agent.orders[-1] for agent in agents.values()]
    assert [(order["do"], order["rank"], order["address"], order["port"]) for order in last] == [
        ("reduce", rank, "10.0.0.0", 29500) for rank in range(3)
    ]
