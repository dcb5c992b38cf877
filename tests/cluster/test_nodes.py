"""Tests of reading the nodes of a launch from both hostfile formats, and of errors with their line numbers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.errors import ClusterError
from z2all_ds.cluster.nodes import Endpoint, Node, SshAccess, parse_nodes_text, read_nodes

EXAMPLES = Path(__file__).resolve().parents[2] / "hostfiles"
TEXT = """\
all:
  slots: 8
  ssh: {port: 2222, user: trainer}
  environment: {NCCL_DEBUG: WARN, SHARED: all}
nodes:
  node1: {inside: {address: 172.17.0.2, port: 9527}, outside: {address: 192.0.2.11, port: 30846}}
  node2:
    slots: 2
    ssh: {address: 192.0.2.12, port: 30022}
    environment: {NCCL_IB_DISABLE: 1, SHARED: mine}
  node3:
"""


def test_the_settings_of_a_node_override_the_defaults() -> None:
    node1, node2, node3 = parse_nodes_text(TEXT, "f.yaml")
    assert [node.name for node in (node1, node2, node3)] == ["node1", "node2", "node3"]
    assert [node.slots for node in (node1, node2, node3)] == [8, 2, 8]
    assert node1.inside == Endpoint(address="172.17.0.2", port=9527)
    assert node2.ssh == SshAccess(address="192.0.2.12", port=30022, user="trainer")
    assert node2.environment == {"NCCL_DEBUG": "WARN", "SHARED": "mine", "NCCL_IB_DISABLE": "1"}
    assert node3.environment == {"NCCL_DEBUG": "WARN", "SHARED": "all"}
    assert [node.ssh_address for node in (node1, node2, node3)] == ["node1", "192.0.2.12", "node3"]
    assert [node.address_for_others for node in (node1, node2, node3)] == ["192.0.2.11", "192.0.2.12", "node3"]


def test_a_plain_hostfile_is_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1 slots=2\nnode2 slots=4\n")
    assert read_nodes(file) == [Node(name="node1", slots=2), Node(name="node2", slots=4)]


def test_every_example_of_both_formats_is_valid_and_starts_with_a_comment() -> None:
    files = [file for file in sorted(EXAMPLES.iterdir()) if file.suffix in (".txt", ".yaml")]
    assert len([file for file in files if file.suffix == ".yaml"]) >= 3
    for file in files:
        assert read_nodes(file), file
        assert file.read_text().startswith("# "), file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes:\n  n1: {slots: 1}\n  n1: {slots: 2}", "line 3: not valid YAML (n1 is already given in line 2)."),
        ("nodes:\n  n1: {slots: 1, slots: 2}", "line 2: not valid YAML (slots is already given in line 2)."),
        ("nodes:\n  n1:\n    slots: 0", "line 3: nodes.n1.slots=0: Input should be greater than or equal to 1."),
        ("nodes:\n  n1:\n    slots: x", "line 3: nodes.n1.slots='x': Input should be a valid integer"),
        ("nodes:\n  n1: {}", "line 2: 'n1': the number of slots is missing. Add `slots: N`, here or under `all`."),
        (
            "nodes:\n  n1:\n    slots: 1\n    ssh:\n      prot: 3",
            "line 5: nodes.n1.ssh.prot: no such setting. Did you mean nodes.n1.ssh.port?",
        ),
        ("all:\n  slot: 1\nnodes:\n  n1:", "line 2: all.slot: no such setting. Did you mean all.slots?"),
        ("hosts:\n  n1:", "line 1: nodes"),
        ("nodes:\n  n1: {slots: 1, ssh: {port: 70000}}", "line 2: nodes.n1.ssh.port=70000: Input should be less"),
        ("nodes:\n  n1: {slots: 1, name: x}", "line 2: nodes.n1.name: no such setting."),
        ("nodes:\n  -x: {slots: 1}", "line 2: '-x': is not a host name or address."),
        ("nodes: [n1, n2]", "line 1: nodes="),
        ("nodes: {}", "lists no node."),
        ("just text", "must have a section `nodes`."),
        ("nodes:\n  n1: {slots: 1", "line 2: not valid YAML"),
        (
            "nodes:\n  n1:\n    slots: 1\n    environment:\n      A: yes",
            "line 5: nodes.n1.environment.A: must be text: put it in quotes.",
        ),
        (
            "nodes:\n  n1:\n    slots: 1\n    environment: {RANK: 1}",
            "line 4: nodes.n1.environment: RANK is set by the launcher.",
        ),
        (
            "all:\n  environment: {'A B': 1}\nnodes:\n  n1: {slots: 1}",
            "line 2: all.environment: 'A B' is not a valid variable name",
        ),
    ],
)
def test_an_error_is_one_line_with_its_line_number(text: str, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_nodes_text(text, "f.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("f.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{}:", "nodes: {[a]: {}}", "? [a, b]\n: 1"])
def test_keys_must_be_plain_values(text: str) -> None:
    with pytest.raises(ClusterError, match=r"f.yaml, line 1: not valid YAML .a key must be a plain value"):
        parse_nodes_text(text, "f.yaml")


@given(st.text(alphabet="nodes: {}1-[]\n\t#a&*!|", max_size=60))
def test_any_text_is_read_or_refused_cleanly(text: str) -> None:
    try:
        found = parse_nodes_text(text, "f.yaml")
    except ClusterError:
        return
    assert all(node.slots >= 1 for node in found)


@pytest.mark.parametrize(
    "setting",
    [
        r'ssh: {user: "bob\n    ProxyCommand touch X"}',
        r'ssh: {user: "bob\n"}',
        "ssh: {user: -oProxyCommand=x}",
        r'ssh: {address: "a\n    ProxyCommand touch X"}',
        "ssh: {address: -x}",
        "outside: {address: a b}",
        "inside: {address: $(x)}",
        r'ssh: {key: "id\n    ProxyCommand touch X"}',
        r'ssh: {key: "a\" b"}',
        r'ssh: {key: "a\\"}',
        "python: -c",
        r'python: "a\nb"',
        "interface: eth0;x",
        r'environment: {A: "\0"}',
    ],
)
def test_no_value_can_begin_another_setting_or_option(setting: str) -> None:
    """Values go into ssh configs and command lines."""
    with pytest.raises(ClusterError, match=r"f.yaml, line 1: nodes\.n1\."):
        parse_nodes_text(f"nodes: {{n1: {{slots: 1, {setting}}}}}", "f.yaml")
