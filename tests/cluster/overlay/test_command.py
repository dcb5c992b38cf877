"""Tests of overlay plans, missing requirements and keys; no network device is changed."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import one_line, z2all
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.machine import process_start_time
from z2all_ds.cluster.nodes import Node, parse_nodes_text
from z2all_ds.cluster.overlay.command import tunnel_error
from z2all_ds.cluster.overlay.devices import hardware_address
from z2all_ds.cluster.overlay.node import SavedState, change_keys, end_tunnel, tunnel_command
from z2all_ds.cluster.overlay.plan import OverlayPlan, key_mark, make_overlay_plan

NODES = """
all: {slots: 4, ssh: {user: me, port: 30022}, environment: {NCCL_IB_DISABLE: 1}}
nodes:
  box1: {ssh: {address: 172.17.0.2, port: 22}, inside: {address: 172.17.0.2, port: 9527},
         outside: {address: 192.0.2.11, port: 30846, ssh_port: 30022}}
  box2: {ssh: {address: 192.0.2.12}, outside: {address: 192.0.2.12}, python: /opt/python}
"""
PUBLIC_KEY = "ssh-ed25519 AAAAC3Nz \n"


def plan(network: str = "10.213.0.0/24", kind: str = "ssh", text: str = NODES) -> OverlayPlan:
    return make_overlay_plan(parse_nodes_text(text, "hosts.yaml"), kind, network)


def test_a_plan_has_the_addresses_of_all_nodes_and_the_sshd_of_the_hub() -> None:
    assert [member.address for member in plan().members] == ["10.213.0.1", "10.213.0.2"]
    assert plan().hub_sshd == ("192.0.2.11", 30022)
    assert plan(text="nodes: {a: {slots: 1}, b: {slots: 1}}").hub_sshd == ("a", 22)
    assert hardware_address("10.213.0.2") == "02:00:0a:d5:00:02"


@pytest.mark.parametrize(
    ("network", "kind", "text", "line"),
    [
        ("10.213.0.1/24", "ssh", NODES, "--network 10.213.0.1/24: is not an IPv4 network"),
        ("10.213.0.0/31", "ssh", NODES, "--network 10.213.0.0/31: is too small for 2 nodes"),
        ("fd00::/64", "ssh", NODES, "--network fd00::/64: is not an IPv4 network"),
        ("10.213.0.0/24", "gre", NODES, "--kind gre: must be one of ssh, vxlan"),
        ("10.213.0.0/24", "ssh", "nodes: {a: {slots: 1}}", "1 node: an overlay needs two or more"),
    ],
)
def test_invalid_plans_are_refused(network: str, kind: str, text: str, line: str) -> None:
    with pytest.raises(ClusterError) as error:
        plan(network, kind, text)
    assert str(error.value).startswith(line)


def test_the_hostfile_of_the_overlay_changes_only_addresses_and_the_interface() -> None:
    nodes = parse_nodes_text(plan().hostfile_text(), "inside.yaml")
    before = parse_nodes_text(NODES, "hosts.yaml")
    for number, (node, old) in enumerate(zip(nodes, before, strict=True)):
        assert node.inside and node.inside.address == f"10.213.0.{number + 1}" and node.inside.port is None
        assert node.outside is None
        assert node.interface == "z2all0"
        same = ("name", "slots", "ssh", "environment", "python")
        assert [getattr(node, name) for name in same] == [getattr(old, name) for name in same]


def test_a_key_permits_one_tunnel_only() -> None:
    line = plan().key_line(plan().workers[0], PUBLIC_KEY)
    assert line == 'restrict,tunnel="2131",command="/bin/false" ssh-ed25519 AAAAC3Nz z2all-overlay-box1/box2'


def test_only_our_keys_are_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    file, mark = tmp_path / ".ssh" / "authorized_keys", key_mark(Node(name="box1", slots=1))
    change_keys(mark, [])
    assert not file.exists()
    line = plan().key_line(plan().workers[0], PUBLIC_KEY)
    change_keys(mark, [line])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    theirs = "# z2all-overlay-box1/ in a comment\nssh-rsa AAAA z2all-overlay-box10/box2\n\nssh-rsa BBBB me"
    file.write_text(theirs)  # without a final line break
    file.chmod(0o640)
    change_keys(mark, [])
    assert file.read_text() == theirs
    for _ in range(2):
        change_keys(mark, [line])
        assert file.read_text() == f"{theirs}\n{line}\n"
    change_keys(mark, [])
    assert file.read_text() == f"{theirs}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_the_tunnel_command_connects_to_the_hub_and_detects_a_dead_connection(tmp_path: Path) -> None:
    words = tunnel_command(tmp_path, {"address": "192.0.2.11", "port": 30022, "user": "me"}, 2131)
    assert words[-7:] == ["-w", "2131:2131", "-p", "30022", "-l", "me", "192.0.2.11"]
    assert "StrictHostKeyChecking=accept-new" in words
    assert "ServerAliveInterval=5" in words


def test_only_the_saved_tunnel_process_is_ended() -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        started = process_start_time(process.pid)
        assert started is not None
        end_tunnel({"pid": process.pid, "start_time": started - 1})  # another process with the same pid
        assert process.poll() is None
        end_tunnel({"pid": process.pid, "start_time": started})
        assert process.wait(5) == -15
    finally:
        process.kill()
        process.wait()


def test_the_saved_states_of_two_nodes_are_independent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("z2all_ds.cluster.overlay.node.private_temp_dir", lambda: tmp_path)
    one, other = SavedState("box1"), SavedState("box2")
    assert one.read() == {} and list(tmp_path.iterdir()) == []
    one.write(kind="ssh")
    other.write(kind="vxlan")
    assert stat.S_IMODE(one.folder.stat().st_mode) == 0o700
    one.remove()
    assert one.read() == {} and other.read() == {"kind": "vxlan"}
    other.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("me@192.0.2.11: Permission denied (publickey).", "box2: box1 does not accept its key"),
        ("Tunnel forwarding failed", "box1: its sshd opens no tunnel for box2"),
        ("ssh: connect to host h: Connection refused", "box2 -> 192.0.2.11:30022: cannot reach box1 (ssh: connect"),
        ("Host key verification failed.", "box2 -> 192.0.2.11:30022: Host key verification failed"),
        ("", "box2 -> 192.0.2.11:30022: ssh printed nothing"),
    ],
)
def test_ssh_errors_of_a_tunnel_are_explained(said: str, line: str) -> None:
    assert str(tunnel_error(plan(), plan().workers[0], said)).startswith(line)


LOOK = "import json; from z2all_ds.cluster.overlay.node import missing_for; print(json.dumps(missing_for('ssh')))"


def lacking(*around: str) -> list[str]:
    done = subprocess.run([*around, sys.executable, "-c", LOOK], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs root: {done.stderr.strip()}")
    return [f"{what}: {fix}" for what, fix in json.loads(done.stdout)]


def test_a_missing_cap_net_admin_is_reported_with_its_fix() -> None:
    (line,) = [line for line in lacking("setpriv", "--bounding-set=-net_admin") if "CAP_NET_ADMIN" in line]
    assert "docker run --cap-add NET_ADMIN --device /dev/net/tun" in line


def test_a_missing_tun_device_is_reported_with_its_fix() -> None:
    hide = ("unshare", "--mount", "bash", "-c", 'mkdir -p /dev/net && mount -t tmpfs tmpfs /dev/net && exec "$@"', "-")
    (line,) = [line for line in lacking(*hide) if "/dev/net/tun does not exist" in line]
    assert "docker run --device /dev/net/tun" in line


def test_invalid_options_give_a_one_line_error(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.yaml"
    hostfile.write_text(NODES)
    answer = z2all("cluster", "overlay", "up", "--hostfile", hostfile, "--out", "hosts.txt", cwd=tmp_path)
    assert "--out hosts.txt: must end in .yaml or .yml" in one_line(answer, 5)
    answer = z2all("cluster", "overlay", "up", "--hostfile", hostfile, "--network", "10", cwd=tmp_path)
    assert "--network 10: is not an IPv4 network" in one_line(answer, 5)
