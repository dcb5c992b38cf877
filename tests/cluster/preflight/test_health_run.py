"""How the health test leads its nodes, with agents that only pretend: what real ones cannot be made to do in time."""

from concurrent.futures import Future
from typing import Any

from z2all_ds.cluster.doctor import FAIL
from z2all_ds.cluster.nodes import DataAddress, Node
from z2all_ds.cluster.preflight.health_run import Health, HealthTest, load_torch


class Pretender:
    """An agent whose worker does as told; `late_once`: its first meeting never ends."""

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


def health_of(agents: dict[str, Pretender]) -> Health:
    nodes = [Node(name=name, slots=1) for name in agents]
    data = {name: DataAddress(f"10.0.0.{number}", "eth0") for number, name in enumerate(agents)}
    test = HealthTest(nodes, data, agents, 29500)  # type: ignore[arg-type]
    return test.run(load_torch(nodes, agents))  # type: ignore[arg-type]


def test_one_that_is_stuck_with_a_partner_begins_anew_with_the_next() -> None:
    agents = {f"n{i}": Pretender(late_once=i == 1) for i in range(4)}
    found = health_of(agents)
    assert {name: agent.starts for name, agent in agents.items()} == {"n0": 1, "n1": 2, "n2": 1, "n3": 1}
    (failure,) = found.failures
    assert failure.pair == ("n0", "n1") and failure.nodes == ()  # one of the two, and nobody knows which
    assert found.reduce_ms is None


def test_gpus_are_used_where_all_have_them() -> None:
    for devices, used in ((("cuda", "cuda"), "cuda"), (("cuda", "cpu"), "cpu")):
        agents = {f"n{i}": Pretender(device) for i, device in enumerate(devices)}
        found = health_of(agents)
        assert not [finding for finding in found.findings if finding.status == FAIL]
        assert {order["device"] for agent in agents.values() for order in agent.orders if "device" in order} == {used}


def test_ranks_of_the_sum_meet_where_those_of_the_launch_will() -> None:
    agents = {f"n{i}": Pretender() for i in range(3)}
    health_of(agents)
    last = [agent.orders[-1] for agent in agents.values()]
    assert [(order["do"], order["rank"], order["address"], order["port"]) for order in last] == [
        ("reduce", rank, "10.0.0.0", 29500) for rank in range(3)
    ]
