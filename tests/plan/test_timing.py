"""Laws that hold for the time of a step, whatever the figures are."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from z2all_ds.plan.timing import Host, Network, StepTime, sending, step_time

from z2all_ds.base.errors import ConfigError
from z2all_ds.plan.hardware import LINKS, REACHED, Link
from z2all_ds.plan.traffic import Collective, HostTraffic

PEAK = 1e15
NODE = Network(gpus_per_node=8, inside=LINKS["nvlink4"], between=LINKS["ib400"], adapters=4)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "reduce")

messages = st.builds(
    Collective,
    what=st.just("weights"),
    kind=st.sampled_from(KINDS),
    size=st.integers(0, 10**11),
    times=st.integers(1, 64),
    calls=st.integers(1, 1000),
    beside_compute=st.booleans(),
    among=st.sampled_from((1, 2, 8, 16, 64)),
)
links = st.builds(Link, name=st.just("own"), speed=st.floats(1e8, 1e12), latency=st.floats(0, 1e-3))
networks = st.builds(
    Network, gpus_per_node=st.sampled_from((1, 4, 8)), inside=links, between=links, adapters=st.integers(1, 8)
)
moved = st.builds(HostTraffic, *[st.integers(0, 10**11)] * 5)
operations = st.floats(0, 1e18)


def gathered(among: int, size: int = 10**9) -> Collective:
    return Collective("weights", "all_gather", size, 1, 1, beside_compute=False, among=among)


@given(operations, st.lists(messages, max_size=4), networks, moved)
def test_at_best_is_never_longer_than_at_worst(
    work: float, sent: list[Collective], network: Network, offload: HostTraffic
) -> None:
    time = step_time(work, PEAK, sent, 64, network, offload=offload)
    assert 0 <= time.least <= time.most
    assert time.least >= time.compute and time.least >= time.exposed
    assert time.most == time.compute + time.hidden + time.exposed


@given(messages, networks, st.floats(1, 100))
def test_more_bandwidth_is_never_slower(message: Collective, network: Network, times: float) -> None:
    inside, between = (replace(link, speed=link.speed * times) for link in (network.inside, network.between))
    before = sending(message, network)
    for faster in (replace(network, inside=inside), replace(network, between=between)):
        assert sending(message, faster) <= before
    assert sending(message, replace(network, adapters=network.adapters + 1)) <= before


@given(operations, moved, st.floats(1, 100))
def test_a_faster_host_is_never_slower(work: float, offload: HostTraffic, times: float) -> None:
    host = Host()
    before = step_time(work, PEAK, [], 8, NODE, offload=offload, host=host).exposed
    for faster in (
        replace(host, bus=replace(host.bus, speed=host.bus.speed * times)),
        replace(host, memory=host.memory * times),
        replace(host, disk=host.disk * times),
    ):
        assert step_time(work, PEAK, [], 8, NODE, offload=offload, host=faster).exposed <= before


@given(messages)
def test_one_gpu_sends_nothing(message: Collective) -> None:
    alone = replace(message, among=1)
    assert alone.sent() == 0 and sending(alone, NODE) == 0


def test_two_machines_are_slower_than_one() -> None:
    assert sending(gathered(16), NODE) > sending(gathered(8), NODE)
    # nor does it help that the network is faster than the GPUs' own links
    faster = replace(NODE, between=Link("own", 1e13, 1e-6))
    assert sending(gathered(16), faster) > sending(gathered(8), faster)


def test_a_group_inside_a_machine_is_priced_by_its_own_links() -> None:
    inside = gathered(2)
    assert sending(inside, NODE) == pytest.approx(0.5e9 / (REACHED * 450e9), rel=1e-2)
    assert sending(inside, replace(NODE, between=LINKS["eth1"])) == sending(inside, NODE)
    # one that is larger than a machine is not
    assert sending(inside, replace(NODE, gpus_per_node=1)) > sending(inside, NODE)


def test_an_all_reduce_sends_twice_what_a_gather_does() -> None:
    assert replace(gathered(8), kind="all_reduce").sent() == 2 * gathered(8).sent() == 2 * 7 / 8 * 1e9


def test_sending_beside_compute_is_hidden_by_it() -> None:
    beside = replace(gathered(8), beside_compute=True)
    seconds = sending(beside, NODE)
    long = step_time(PEAK, PEAK, [beside], 8, NODE, reached=1.0)
    assert (long.compute, long.hidden, long.exposed) == (1.0, seconds, 0.0)
    assert (long.least, long.most) == (1.0, 1.0 + seconds)
    waited_for = step_time(PEAK, PEAK, [gathered(8)], 8, NODE, reached=1.0)
    assert waited_for.least == waited_for.most == 1.0 + seconds
    # the same message twice counts twice
    assert step_time(PEAK, PEAK, [beside, beside], 8, NODE).hidden == 2 * seconds


def test_gpus_of_a_machine_share_its_memory_and_disk_but_not_the_bus() -> None:
    host = Host(bus=Link("own", 1e9 / REACHED, 0.0), memory=1e9, disk=1e9)
    over_bus = HostTraffic(to_host=10**9, to_gpu=10**9)
    shared = HostTraffic(stepped=10**9, disk_read=10**9, disk_written=10**9)
    for gpus, sharing in ((1, 1), (8, 8), (64, 8)):
        assert step_time(0.0, PEAK, [], gpus, NODE, offload=over_bus, host=host).exposed == pytest.approx(2.0)
        assert step_time(0.0, PEAK, [], gpus, NODE, offload=shared, host=host).exposed == pytest.approx(3.0 * sharing)


def test_without_traffic_a_step_is_its_compute() -> None:
    assert step_time(0.55 * PEAK, PEAK, [], 1, NODE, reached=0.55) == StepTime(compute=1.0, hidden=0.0, exposed=0.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reached": 0.0}, "share of the peak = 0.0"),
        ({"reached": 1.1}, "share of the peak = 1.1"),
        ({"reached": float("nan")}, "share of the peak = nan"),
        ({"gpus": 0}, "number of GPUs = 0"),
        ({"peak": 0.0}, "peak = 0.0"),
        ({"peak": float("inf")}, "peak = inf"),
    ],
)
def test_bad_values_are_one_line(changed: dict[str, Any], message: str) -> None:
    values = {"operations": 1.0, "peak": PEAK, "collectives": [], "gpus": 8, "network": NODE} | changed
    with pytest.raises(ConfigError, match=message) as error:
        step_time(**values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"memory": 0.0}, "speed of the host memory = 0.0"),
        ({"disk": -1.0}, "speed of the disk = -1.0"),
        ({"disk": float("nan")}, "speed of the disk = nan"),
        ({"bus": Link("own", 0.0, 0.0)}, "speed of the host bus = 0.0"),
    ],
)
def test_a_host_without_speed_is_one_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Host(**changed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changed", [{"gpus_per_node": 0}, {"adapters": 0}])
def test_a_network_without_gpus_or_adapters_is_one_line(changed: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="= 0: must be at least 1") as error:
        replace(NODE, **changed)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
