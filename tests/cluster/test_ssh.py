"""Tests of connections to nodes with a real sshd, and of the kinds of failures."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import node_lab
from tests.helpers.command import ROOT
from tests.helpers.own_sshd import own_sshd, why_no_sshd
from tests.helpers.ssh_server import make_key
from z2all_ds.cluster.nodes import Node, SshAccess
from z2all_ds.cluster.ssh import config_text, module_command, start_module

ASK = """
import os, sys
from pathlib import Path
from z2all_ds.cluster.agents.fleet import agents_on
from z2all_ds.cluster.nodes import Node, SshAccess
from z2all_ds.cluster.ssh import NoAnswer, write_config
name, address, port, key, config, own = sys.argv[1:]
node = Node(name=name, slots=1, ssh=SshAccess(address=address or None, port=int(port), key=key or None))
with agents_on([node], write_config([node], Path(config)), os.getcwd()) as agents:
    try:
        print(agents[name].ask("source_address", towards=own).result(30))
    except NoAnswer as failure:
        print(f"{failure.kind}|{failure.message}|{failure.fix}")
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[node_lab.Node]]:
    if node_lab.why_no_lab():
        pytest.skip(node_lab.why_no_lab())
    with node_lab.node_lab(tmp_path_factory.mktemp("lab"), 2) as nodes:
        yield nodes


@pytest.mark.skipif(bool(why_no_sshd()), reason=why_no_sshd())
def test_a_signal_to_every_process_does_not_end_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_sshd(tmp_path) as server:
        monkeypatch.setenv("PATH", server.path_variable)
        node = Node(name="far", slots=1)
        connection = start_module(node, tmp_path / "ssh_config", str(tmp_path), "z2all_ds.cluster.agents.agent")
        try:
            for number in ("connected", signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                if isinstance(number, signal.Signals):
                    connection.process.send_signal(number)
                connection.send({"id": 0, "do": "sees_marker", "with": {"folder": str(tmp_path), "name": "key"}})
                answer = connection.receive(30)
                assert answer == {"id": 0, "answer": True}, (number, list(connection.error_lines))
            assert Path(f"/proc/{connection.process.pid}/comm").read_text() == "ssh\n"  # it and no shell
        finally:
            connection.close(10)
        assert connection.process.returncode == 0, list(connection.error_lines)  # by the end of its stdin


def test_a_module_on_a_node_imports_nothing_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    *_, command = module_command(Node(name="n1", slots=1), tmp_path / "ssh_config", "/shared", "a.module")
    assert "PYTHONSAFEPATH=1 exec" in command
    assert f"PYTHONPATH={ROOT}${{PYTHONPATH:+:$PYTHONPATH}}" in command
    assert subprocess.run(["sh", "-n", "-c", command]).returncode == 0


def asked(
    nodes: list[node_lab.Node], tmp_path: Path, name: str, address: str = "", port: int = 2222, key: str = ""
) -> str:
    words = (sys.executable, "-c", ASK, name, address, str(port), key, str(tmp_path / "ssh_config"), nodes[0].address)
    done = nodes[0].run(*words, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_node_is_reached_by_name_or_address_and_the_config_is_private(
    nodes: list[node_lab.Node], tmp_path: Path
) -> None:
    assert asked(nodes, tmp_path, "n1") == nodes[1].address
    assert asked(nodes, tmp_path, "other-name", nodes[1].address) == nodes[1].address
    assert (tmp_path / "ssh_config").stat().st_mode & 0o077 == 0


def test_each_failure_to_connect_is_reported_as_its_kind(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    kinds = {
        "name": asked(nodes, tmp_path, "n9"),
        "port": asked(nodes, tmp_path, "n1", port=2299),
        "unreachable": asked(nodes, tmp_path, "n1", "10.77.0.99"),
    }
    assert {kind: line.split("|")[0] for kind, line in kinds.items()} == {kind: kind for kind in kinds}
    assert "no sshd answers on port 2299" in kinds["port"]


def test_a_wrong_key_is_reported_with_its_fix(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    kind, said, fix = asked(nodes, tmp_path, "n1", key=str(tmp_path / "other")).split("|")
    assert kind == "key"
    assert "Permission denied" in said
    assert "authorized_keys" in fix


def test_a_changed_host_key_is_reported_with_its_fix(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    known = nodes[0].folder / "ssh" / "known_hosts"
    assert asked(nodes, tmp_path, "n1") == nodes[1].address
    before = known.read_text()
    other = (nodes[0].folder / "host_key.pub").read_text().split()[:2]
    try:
        known.write_text(f"[n1]:2222 {' '.join(other)}\n")
        kind, _, fix = asked(nodes, tmp_path, "n1").split("|")
    finally:
        known.write_text(before)
    assert kind == "host_key"
    assert "ssh-keygen -R '[n1]:2222'" in fix


def test_a_node_behind_a_cut_link_is_reported_as_unreachable(nodes: list[node_lab.Node], tmp_path: Path) -> None:
    nodes[1].cut()
    try:
        kind, _, _ = asked(nodes, tmp_path, "n1").split("|")
    finally:
        nodes[1].heal()
    assert kind == "unreachable"
    assert asked(nodes, tmp_path, "n1") == nodes[1].address


def test_the_config_never_trusts_a_changed_key() -> None:
    text = config_text([Node(name="n1", slots=1, ssh=SshAccess(port=2222, user="me", key="~/my key"))])
    assert "StrictHostKeyChecking accept-new" in text
    assert f'IdentityFile "{Path.home()}/my key"' in text
    assert text.index("Port 2222") < text.index("Include ~/.ssh/config")
