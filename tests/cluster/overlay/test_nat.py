"""Tests with containers behind NAT: the doctor names the pairs that cannot connect, and an overlay connects them."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import nat_lab
from tests.helpers.command import ROOT
from tests.helpers.node_lab import SSH_PORT, Node
from tests.helpers.training import losses, run_arguments, train
from z2all_ds.base.machine import private_temp_dir

TUNNEL = "ssh -F none -N"


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    if nat_lab.why_no_nat_lab():
        pytest.skip(nat_lab.why_no_nat_lab())
    with nat_lab.nat_lab(tmp_path_factory.mktemp("nat"), 3) as boxes:
        yield boxes


def write_hostfile(path: Path, number: int) -> Path:
    """Write a hostfile for use on box1, which reaches itself by its private address: there is no hairpin NAT."""
    nodes: dict[str, Any] = {}
    for i in range(number):
        address = nat_lab.machine_address(i)
        ssh = {"address": address, "port": nat_lab.PUBLISHED_SSH}
        nodes[f"box{i + 1}"] = {
            "ssh": {"address": nat_lab.PRIVATE_ADDRESS, "port": SSH_PORT} if i == 0 else ssh,
            "inside": {"address": nat_lab.PRIVATE_ADDRESS},
            "outside": {"address": address, "ssh_port": nat_lab.PUBLISHED_SSH},
        }
    nodes["box1"]["inside"]["port"] = nat_lab.MASTER_PORT
    nodes["box1"]["outside"]["port"] = nat_lab.PUBLISHED_MASTER
    path.write_text(yaml.safe_dump({"all": {"slots": 1}, "nodes": nodes}, sort_keys=False))
    return path


def z2all(box: Node, *words: object, environment: Mapping[str, str] | None = None) -> Any:
    ours = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    return box.run(sys.executable, "-m", "z2all_ds", *map(str, words), environment=ours)


def overlay(box: Node, verb: str, hostfile: Path, *words: object) -> Any:
    return z2all(box, "cluster", "overlay", verb, "--hostfile", hostfile, *words)


def states(box: Node, hostfile: Path) -> list[str]:
    return [one["status"] for one in json.loads(overlay(box, "status", hostfile, "--json").stdout)]


def devices(box: Node) -> set[str]:
    return {link["ifname"] for link in json.loads(box.run("ip", "-json", "link").stdout)}


def tunnels(boxes: list[Node]) -> list[int]:
    return [pid for box in boxes for pid in box.processes(TUNNEL)]


def keys(box: Node) -> str:
    return (box.folder / "ssh" / "authorized_keys").read_text()


def assert_nothing_left(boxes: list[Node], keys_before: str) -> None:
    assert tunnels(boxes) == []
    assert keys(boxes[0]) == keys_before
    assert all(devices(box) == {"lo", "eth0"} for box in boxes)
    assert not any((box.outside(private_temp_dir()) / "overlay").exists() for box in boxes)


def findings(answer: Any) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(answer.stdout)["findings"]}


def test_the_doctor_names_the_pairs_that_cannot_connect(boxes: list[Node], tmp_path: Path) -> None:
    hostfile = write_hostfile(tmp_path / "hosts.yaml", 2)
    answer = z2all(boxes[0], "doctor", tmp_path, "--hostfile", hostfile, "--json")
    assert answer.returncode == 5, answer.stderr
    found = findings(answer)
    assert found["box2 -> master"]["status"] == "ok"
    assert found["box2 -> master"]["value"] == "10.88.0.1:30846"
    for pair in ("box1 -> box2", "box2 -> box1"):
        assert found[pair]["status"] == "fail"
        assert "172.17.0.2" in found[pair]["value"] and "its own address, too" in found[pair]["value"]
        assert "z2all cluster overlay up" in found[pair]["fix"]
    assert [name for name, finding in found.items() if finding["status"] == "fail"] == ["box1 -> box2", "box2 -> box1"]


@pytest.mark.extended
def test_training_through_an_overlay_has_the_losses_of_one_machine(
    boxes: list[Node], tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    hostfile, inside, pair = write_hostfile(tmp_path / "hosts.yaml", 2), tmp_path / "inside.yaml", boxes[:2]
    settings = ("train.steps=6", "deepspeed=zero1")
    keys_before = keys(boxes[0])
    up = overlay(boxes[0], "up", hostfile, "--out", inside)
    assert up.returncode == 0, up.stderr
    try:
        looked = z2all(boxes[0], "doctor", tmp_path, "--hostfile", inside, "--json")
        assert looked.returncode == 0, looked.stdout
        assert len(json.loads(looked.stdout)["pairs"]) == 2
        words = run_arguments(tmp_path / "far", small_corpus, small_tokenizer, *settings)
        trained = z2all(boxes[0], "launch", "--hostfile", inside, "--", *words)
        assert trained.returncode == 0, trained.stderr
    finally:
        down = overlay(boxes[0], "down", hostfile)
    assert down.returncode == 0, down.stderr
    assert_nothing_left(pair, keys_before)
    near = train(tmp_path / "near", small_corpus, small_tokenizer, *settings)
    assert near.returncode == 0, near.stderr
    assert len(losses(tmp_path / "far")) == 6
    assert losses(tmp_path / "far") == losses(tmp_path / "near")


@pytest.mark.extended
def test_up_restores_the_broken_links_of_an_overlay(boxes: list[Node], tmp_path: Path) -> None:
    """`status` shows box2's killed tunnel, and `up` restores only that one; `up` also restores box3 after a cut."""
    hostfile, inside = write_hostfile(tmp_path / "hosts.yaml", 3), tmp_path / "inside.yaml"
    keys_before = keys(boxes[0])
    try:
        assert overlay(boxes[0], "up", hostfile, "--out", inside).returncode == 0
        assert inside.stat().st_mode & 0o077 == 0
        assert z2all(boxes[0], "doctor", tmp_path, "--hostfile", inside).returncode == 0  # also from box2 to box3
        first = tunnels(boxes)
        assert len(first) == 2
        assert "already" in overlay(boxes[0], "up", hostfile).stderr
        assert tunnels(boxes) == first

        (killed,) = tunnels(boxes[1:2])
        os.kill(killed, signal.SIGKILL)
        assert states(boxes[0], hostfile) == ["up", "broken", "up"]
        looked = findings(z2all(boxes[0], "doctor", tmp_path, "--hostfile", inside, "--json"))
        assert "z2all cluster overlay up" in looked["box2: interface"]["fix"]
        assert overlay(boxes[0], "up", hostfile).returncode == 0
        assert states(boxes[0], hostfile) == ["up", "up", "up"]
        assert tunnels(boxes[2:]) == first[1:]

        boxes[2].cut()
        deadline = time.monotonic() + 60
        while tunnels(boxes[2:]) and time.monotonic() < deadline:
            time.sleep(0.2)
        boxes[2].heal()
        assert tunnels(boxes[2:]) == []
        restored = overlay(boxes[0], "up", hostfile)
        assert restored.returncode == 0, restored.stderr
        assert states(boxes[0], hostfile) == ["up", "up", "up"]
        assert keys(boxes[0]).count("z2all-overlay-") == 2
        other = overlay(boxes[0], "up", hostfile, "--network", "10.214.0.0/24")
        assert other.returncode == 5 and "already 10.213.0.1" in other.stderr
    finally:
        down = overlay(boxes[0], "down", hostfile)
    assert down.returncode == 0, down.stderr
    assert_nothing_left(boxes, keys_before)
    assert states(boxes[0], hostfile) == ["none", "none", "none"]


@pytest.mark.extended
def test_the_key_permits_only_the_tunnel(boxes: list[Node], tmp_path: Path) -> None:
    hostfile, keys_before = write_hostfile(tmp_path / "hosts.yaml", 2), keys(boxes[0])
    try:
        assert overlay(boxes[0], "up", hostfile).returncode == 0
        key = private_temp_dir() / "overlay" / "box2" / "key"
        assert (boxes[1].outside(private_temp_dir()) / "overlay" / "box2" / "key").stat().st_mode & 0o077 == 0
        hosts = f"UserKnownHostsFile={key.with_name('known_hosts')}"
        ssh = ("ssh", "-F", "none", "-i", str(key), "-o", "IdentitiesOnly=yes", "-o", hosts, "-p", "30022", "10.88.0.1")
        command = boxes[1].run(*ssh, "hostname")
        assert command.returncode == 1 and command.stdout == ""  # the key is accepted, but the command is not run
        through = boxes[1].run(*ssh, "-W", f"127.0.0.1:{SSH_PORT}")
        assert through.returncode != 0 and "prohibited" in through.stderr
        other = boxes[1].run(*ssh, "-N", "-o", "ExitOnForwardFailure=yes", "-o", "Tunnel=ethernet", "-w", "2199:2199")
        assert other.returncode != 0 and "Tunnel forwarding failed" in other.stderr
    finally:
        overlay(boxes[0], "down", hostfile)
    assert_nothing_left(boxes, keys_before)


@pytest.mark.extended
def test_a_vxlan_overlay_connects_all_nodes_without_ssh_tunnels(boxes: list[Node], tmp_path: Path) -> None:
    hostfile, inside = write_hostfile(tmp_path / "hosts.yaml", 3), tmp_path / "inside.yaml"
    keys_before = keys(boxes[0])
    try:
        up = overlay(boxes[0], "up", hostfile, "--out", inside, "--kind", "vxlan")
        assert up.returncode == 0, up.stderr
        assert tunnels(boxes) == []
        assert z2all(boxes[0], "doctor", tmp_path, "--hostfile", inside).returncode == 0
        assert states(boxes[0], hostfile) == ["up", "up", "up"]
    finally:
        down = overlay(boxes[0], "down", hostfile)
    assert down.returncode == 0, down.stderr
    assert_nothing_left(boxes, keys_before)


@pytest.mark.extended
def test_down_cleans_up_the_other_nodes_if_one_is_lost(boxes: list[Node], tmp_path: Path) -> None:
    hostfile, keys_before = write_hostfile(tmp_path / "hosts.yaml", 3), keys(boxes[0])
    assert overlay(boxes[0], "up", hostfile).returncode == 0
    boxes[2].kill()
    try:
        down = overlay(boxes[0], "down", hostfile)
        assert down.returncode == 5
        (line,) = down.stderr.splitlines()
        assert line.startswith("ClusterError: box3: ssh: not reachable: ")
        assert tunnels(boxes[:2]) == []
        assert keys(boxes[0]) == keys_before
        assert all(devices(box) == {"lo", "eth0"} for box in boxes[:2])
    finally:
        boxes[2].start()
    # box3 still has the saved state of a tunnel whose process is gone.
    assert states(boxes[0], hostfile) == ["none", "none", "broken"]
    assert overlay(boxes[0], "down", hostfile).returncode == 0
    assert_nothing_left(boxes, keys_before)


@pytest.mark.extended
def test_two_nodes_that_share_a_network_stack_are_refused(boxes: list[Node], tmp_path: Path) -> None:
    hostfile, keys_before = write_hostfile(tmp_path / "hosts.yaml", 2), keys(boxes[0])
    content = yaml.safe_load(hostfile.read_text())
    content["nodes"]["box2"]["ssh"] = dict(content["nodes"]["box1"]["ssh"])  # a copy: without an alias
    hostfile.write_text(yaml.safe_dump(content))
    answer = overlay(boxes[0], "up", hostfile)
    assert answer.returncode == 5
    assert "box1 and box2: share one network stack" in answer.stderr
    assert_nothing_left(boxes, keys_before)


@pytest.mark.extended
def test_an_unreachable_hub_is_a_one_line_error(boxes: list[Node], tmp_path: Path) -> None:
    hostfile = write_hostfile(tmp_path / "hosts.yaml", 2)
    hostfile.write_text(hostfile.read_text().replace("ssh_port: 30022", "ssh_port: 30099"))
    keys_before = keys(boxes[0])
    answer = overlay(boxes[0], "up", hostfile)
    assert answer.returncode == 5
    (line,) = answer.stderr.splitlines()
    assert line.startswith("ClusterError: box2 -> 10.88.0.1:30099: cannot reach box1 (")
    assert "outside: {address: ..., ssh_port: ...}" in line
    assert_nothing_left(boxes, keys_before)


@pytest.mark.extended
def test_a_hub_that_permits_no_tunnel_is_a_one_line_error(boxes: list[Node], tmp_path: Path) -> None:
    hostfile = write_hostfile(tmp_path / "hosts.yaml", 2)
    config = boxes[0].folder / "sshd_config"
    before, keys_before = config.read_text(), keys(boxes[0])
    try:
        boxes[0].kill()
        config.write_text(before.replace("PermitTunnel yes", "PermitTunnel no"))
        boxes[0].start()
        answer = overlay(boxes[0], "up", hostfile)
        assert answer.returncode == 5
        (line,) = answer.stderr.splitlines()
        assert line.startswith("ClusterError: box1: its sshd opens no tunnel for box2. Set `PermitTunnel yes` in ")
        assert_nothing_left(boxes, keys_before)
    finally:
        boxes[0].kill()
        config.write_text(before)
        boxes[0].start()
