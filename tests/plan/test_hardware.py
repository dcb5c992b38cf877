"""Links and speeds by name, and measured values from files that `z2all doctor` writes."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import to_json
from z2all_ds.cluster.agents.connections import Listener, Speed, measure
from z2all_ds.cluster.doctor import OK, Finding, resources
from z2all_ds.cluster.nodes import DataAddress
from z2all_ds.cluster.preflight.checks import Preflight
from z2all_ds.cluster.preflight.command import content_of
from z2all_ds.cluster.preflight.health_rules import Turn
from z2all_ds.cluster.preflight.health_run import Health
from z2all_ds.plan.hardware import GPUS, LINKS, Link, Measured, link_named, parse_speed, read_measured

NAMES = ("n1", "n2", "n3")
TURNS = (
    Turn(1, "n1", "n2", matmul_ms=2.0, gather_gbps=40.0),
    Turn(1, "n2", "n1", matmul_ms=9.0, gather_gbps=38.0),
    Turn(2, "n1", "n3", matmul_ms=2.1, gather_gbps=12.0),
    Turn(2, "n3", "n1", matmul_ms=3.0, gather_gbps=13.0),
    Turn(3, "n2", "n3", matmul_ms=2.5, gather_gbps=39.0),
    Turn(3, "n3", "n2", matmul_ms=3.2, gather_gbps=41.0),
)


def health_of(*turns: Turn) -> Health:
    return Health(list(turns), reduce_ms=4.0, device="cuda")


def preflight_of(**changes: Speed) -> Preflight:
    """Return a result for three nodes and every ordered pair; `n1_n2=...` is the speed that n1 measured."""
    result = Preflight(addresses={name: DataAddress(f"10.0.0.{name[1:]}", "eth0") for name in NAMES})
    for who in NAMES:
        for whom in NAMES:
            if who != whom:
                result.speeds[who, whom] = changes.get(f"{who}_{whom}", Speed(50.0, 80.0, 90.0))
    return result


def written(folder: Path, result: Preflight) -> Path:
    file = folder / "nodes.json"
    file.write_text(to_json(content_of(result)), encoding="utf-8")
    return file


def test_the_slowest_pair_determines_the_link(tmp_path: Path) -> None:
    found = read_measured(written(tmp_path, preflight_of(n2_n3=Speed(120.0, 24.0, 30.0))))
    assert found.link == Link("measured", 3e9, 60e-6)  # 24 Gbit/s; half of the 120 µs round trip
    assert (found.all_gather, found.disk) == (None, None)


def test_the_slower_direction_of_a_pair_determines_the_link(tmp_path: Path) -> None:
    found = read_measured(written(tmp_path, preflight_of(n2_n3=Speed(120.0, 30.0, 16.0))))
    assert found.link is not None and found.link.speed == 2e9


def test_the_slowest_all_gather_counts(tmp_path: Path) -> None:
    result = preflight_of()
    result.health = health_of(*TURNS)
    assert read_measured(written(tmp_path, result)).all_gather == 12e9


def test_a_node_that_failed_does_not_count(tmp_path: Path) -> None:
    result = preflight_of()
    broken = replace(TURNS[1], matmul_ms=None, gather_gbps=None, problem="two equal matmuls differ", alone=True)
    result.health = Health(turns=[TURNS[0], broken])
    assert read_measured(written(tmp_path, result)).all_gather == 40e9


def test_the_measured_speed_of_a_real_connection_is_read(tmp_path: Path) -> None:
    listener = Listener("127.0.0.1", 0, "token")
    try:
        speed = measure("127.0.0.1", listener.port, "token", seconds=0.05)
    finally:
        listener.close()
    result = Preflight(addresses={"a": DataAddress("127.0.0.1", "lo")}, speeds={("a", "b"): speed})
    found = read_measured(written(tmp_path, result))
    assert found.link is not None
    slower = min(speed.gigabits_out, speed.gigabits_in)
    assert math.isclose(found.link.speed * 8 / 1e9, slower) and math.isclose(found.link.latency * 2e6, speed.latency_us)


def test_the_measured_disk_speed_of_one_machine_is_read(tmp_path: Path) -> None:
    findings = [Finding("python", OK, "3.11.7"), *resources.disk_speed(tmp_path)]
    file = tmp_path / "here.json"
    file.write_text(to_json(findings), encoding="utf-8")
    assert read_measured(file) == Measured(str(file), disk=findings[1].measured["bytes_per_second"])


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        read_measured(file)
    message = str(raised.value)
    assert "\n" not in message and str(file) in message
    return message


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"{ no", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"", "is not JSON"),
        (b'{"parameters": 5}', "is JSON of something else than `z2all doctor`"),
        (b'"text"', "is JSON of something else than `z2all doctor`"),
        (b"[1, 2]", "is not as `z2all doctor` writes it"),
        (b"[]", "has no measured figure"),
        (to_json([Finding("disk speed", "fail", "cannot write", "Give another.")]).encode(), "has no measured figure"),
        (b'{"findings": [], "places": {}, "pairs": [{"from": "a"}]}', "is not as `z2all doctor` writes it"),
    ],
)
def test_a_file_with_other_content_is_refused(content: bytes, rule: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    message = refusal(file)
    assert rule in message and "z2all doctor FOLDER --hostfile H --json > FILE" in message


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in refusal(tmp_path / "none.json")
    assert "cannot be read (Is a directory)" in refusal(tmp_path)


def test_a_result_without_pairs_of_nodes_is_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, Preflight(addresses={"n1": DataAddress("10.0.0.1", "eth0")})))
    assert "no pair of nodes" in message and "two nodes or more" in message


@pytest.mark.parametrize("speed", [Speed(50.0, 0.0, 8.0), Speed(50.0, 8.0, math.nan), Speed(-1.0, 8.0, 8.0)])
def test_an_impossible_measurement_is_refused(speed: Speed, tmp_path: Path) -> None:
    message = refusal(written(tmp_path, preflight_of(n1_n3=speed)))
    assert "must be a number above 0. Measure again." in message and "n1" in message and "n3" in message


def test_a_preflight_result_is_plain_json_with_and_without_health(tmp_path: Path) -> None:
    result = preflight_of()
    assert json.loads(to_json(content_of(result)))["health"] is None
    result.health = health_of(*TURNS)
    assert json.loads(to_json(content_of(result)))["health"]["device"] == "cuda"


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("100GB/s", 100e9),
        ("100Gbit/s", 12.5e9),
        ("100Gb/s", 12.5e9),
        ("100Gbps", 12.5e9),
        ("1.5GB/s", 1.5e9),
        (" 200 MB/s ", 200e6),
        ("1GiB/s", 2**30),
        (".5TB/s", 0.5e12),
    ],
)
def test_speeds_with_units_are_parsed(text: str, speed: float) -> None:
    assert parse_speed(text) == speed
    link = link_named(text)
    assert (link.speed, link.name, link.is_reached) == (speed, text.strip(), False)


@pytest.mark.parametrize(
    "text", ["", "100", "100GB", "fast", "-1GB/s", "0GB/s", "1 GX/s", "9" * 400 + "GB/s", "1e3GB/s"]
)
def test_invalid_speeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Write it like 20GB/s or 100Gbit/s") as raised:
        parse_speed(text)
    assert "\n" not in str(raised.value)


def test_links_are_found_by_name_and_unknown_ones_are_refused() -> None:
    assert link_named(" IB400 ") is LINKS["ib400"]
    assert {gpu.link for gpu in GPUS.values()} <= LINKS.keys()
    with pytest.raises(
        ConfigError, match=r"link 'warp': is not known; known are: nvlink4.*eth1. Give one of these, or a"
    ):
        link_named("warp")
