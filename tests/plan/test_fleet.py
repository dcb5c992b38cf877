"""Fleets made from the user's options: mistakes are refused in one line, and assumptions are listed."""

from pathlib import Path
from typing import Any

import pytest

from tests.plan.test_hardware import TURNS, health_of, preflight_of, written
from z2all_ds.base.errors import ConfigError
from z2all_ds.cluster.agents.connections import Speed
from z2all_ds.plan import Fleet, Wishes, make_fleet
from z2all_ds.plan.hardware import GPUS, LINKS, REACHED


def refused(**wishes: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        make_fleet(Wishes(**wishes))
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("wishes", "start"),
    [
        ({"gpus": 0}, "--gpus 0: must be at least 1"),
        ({"gpus": -4}, "--gpus -4: must be at least 1"),
        ({"gpus": 12}, "--gpus 12: must be whole machines of 8"),
        ({"gpus": 8, "gpus_per_node": 3}, "--gpus 8: must be whole machines of 3"),
        ({"gpus": 8, "gpus_per_node": 0}, "--gpus-per-node 0: must be at least 1"),
        ({"gpu": "b9000"}, "GPU 'b9000': is not known; known are: h200, h100"),
        ({"gpu": ""}, "GPU '': is not known"),
        ({"gpu_memory": ""}, "memory size '': must be a number with a unit"),
        ({"gpu_memory": "-1GB"}, "memory size '-1GB': must be more than zero"),
        ({"peak_tflops": 0.0}, "--peak-tflops 0.0: must be above 0 and below a million"),
        ({"peak_tflops": float("nan")}, "--peak-tflops nan: must be above 0"),
        ({"adapters": 0}, "--adapters 0: must be at least 1"),
        ({"reached": 0.0}, "--reached 0.0: must be above 0 and at most 1"),
        ({"reached": 1.01}, "--reached 1.01: must be above 0 and at most 1"),
        ({"network": ""}, "link '': is not known"),
        ({"host_bus": "isa"}, "link 'isa': is not known"),
        ({"host_memory_speed": "-1GB/s"}, "speed '-1GB/s': must be a positive number"),
        ({"disk_speed": "3GB"}, "speed '3GB': must be a positive number with a unit"),
    ],
)
def test_invalid_options_are_refused_in_one_line(wishes: dict[str, Any], start: str) -> None:
    assert refused(**wishes).startswith(start)


def test_an_error_in_a_sweep_names_the_sweep_option() -> None:
    with pytest.raises(ConfigError, match=r"^--sweep gpus=12: must be whole machines of 8"):
        make_fleet(Wishes(gpus=12), "--sweep gpus=")


def test_assumptions_for_missing_options_are_listed() -> None:
    fleet = make_fleet(Wishes(gpus=64, gpu="H100"))
    assumptions = " ".join(fleet.assumptions)
    assert (fleet.memory, fleet.peak, fleet.nodes) == (81_559 * 2**20, GPUS["h100"].peak, 8)
    for words in ("GPU h100: 85.5 GB, 989 TFLOP/s", "8 GPUs per machine, connected by nvlink4 (450 GB/s", "80%"):
        assert words in assumptions
    assert "Machines connected by 1 x eth100 (12.5 GB/s each way, 20 us)" in assumptions
    assert "pcie4 to the host, 100 GB/s of host memory and 3.0 GB/s of disk" in assumptions


def test_irrelevant_assumptions_are_not_listed() -> None:
    alone, one_machine = make_fleet(Wishes()), make_fleet(Wishes(gpus=4))
    assert not any("connected" in line or "Messages" in line for line in alone.assumptions)
    assert one_machine.network.gpus_per_node == 4 and one_machine.nodes == 1
    assert not any("Machines connected" in line for line in one_machine.assumptions)


def test_options_override_the_defaults_of_the_gpu() -> None:
    fleet = make_fleet(
        Wishes(
            gpus=16,
            gpu="h100",
            gpu_memory="80GiB",
            peak_tflops=500,
            gpus_per_node=4,
            link="pcie5",
            network="ib400",
            adapters=4,
            host_bus="pcie3",
            host_memory_speed="90GB/s",
            disk_speed="800MB/s",
            reached=0.4,
        )
    )
    assert (fleet.memory, fleet.peak, fleet.reached, fleet.nodes) == (80 * 2**30, 500e12, 0.4, 4)
    network, host = fleet.network, fleet.host
    assert (network.inside, network.between, network.adapters) == (LINKS["pcie5"], LINKS["ib400"], 4)
    assert (host.bus, host.memory, host.disk) == (LINKS["pcie3"], 90e9, 800e6)
    assert any("4 x ib400" in line for line in fleet.assumptions)


def test_decimal_and_binary_units_of_memory_are_distinguished() -> None:
    sizes = [make_fleet(Wishes(gpu_memory=text)).memory for text in ("80", "80GB", "80GiB")]
    assert sizes == [80 * 10**9, 80 * 10**9, 80 * 2**30]


def test_a_fleet_of_another_size_has_the_same_network() -> None:
    fleet = make_fleet(Wishes(gpus=8, gpu="h100"))
    larger = fleet.of_size(4096)
    assert isinstance(larger, Fleet) and (larger.gpus, larger.nodes) == (4096, 512)
    assert larger.network == fleet.network


def test_measured_speeds_are_not_reduced_further(tmp_path: Path) -> None:
    file = written(tmp_path, preflight_of(n2_n3=Speed(120.0, 24.0, 30.0)))
    between = make_fleet(Wishes(gpus=16, measured=file)).network.between
    assert (between.speed, between.usable, between.latency) == (3e9, 3e9, 60e-6)
    named = make_fleet(Wishes(gpus=16, network="3GB/s")).network.between
    assert named.usable == REACHED * named.speed == REACHED * 3e9
    assumptions = make_fleet(Wishes(gpus=16, measured=file)).assumptions
    assert any(str(file) in line and "3.0 GB/s" in line for line in assumptions)


def test_measured_nccl_speed_overrides_connections_and_options_override_both(tmp_path: Path) -> None:
    result = preflight_of()
    result.health = health_of(*TURNS)
    file = written(tmp_path, result)
    assert make_fleet(Wishes(gpus=16, measured=file)).network.between.usable == 12e9
    assert make_fleet(Wishes(gpus=16, measured=file, network="ib400")).network.between == LINKS["ib400"]


def test_a_measured_disk_speed_is_used_unless_an_option_overrides_it(tmp_path: Path) -> None:
    from z2all_ds.base.reports import to_json
    from z2all_ds.cluster.doctor import OK, Finding

    file = tmp_path / "here.json"
    disk = Finding("disk speed", OK, "7 GB/s", measured={"bytes_per_second": 7e9})
    file.write_text(to_json([disk]), encoding="utf-8")
    assert make_fleet(Wishes(measured=file)).host.disk == 7e9
    assert make_fleet(Wishes(measured=file, disk_speed="1GB/s")).host.disk == 1e9
