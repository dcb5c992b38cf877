"""Tests of the strict hostfile parser, which agrees with DeepSpeed on valid files and names the line of an error."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base.errors import ClusterError
from z2all_ds.cluster.hostfile import parse_hostfile_text
from z2all_ds.cluster.nodes import Node, read_nodes

EXAMPLES = Path(__file__).resolve().parents[2] / "hostfiles"


def test_hosts_keep_their_order_and_comments_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    lines = ["\ufeff# two nodes", "", "  node-2.lan\tslots=4  ", "192.0.2.1 slots=1", "fd00::2 slots=02"]
    file.write_bytes("\r\n".join(lines).encode())
    expected = [Node(name="node-2.lan", slots=4), Node(name="192.0.2.1", slots=1), Node(name="fd00::2", slots=2)]
    assert read_nodes(file) == expected


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        ("node1 slots=2\n\nnode1 slots=4", 3, "already listed in line 1"),
        ("# x\nnode1", 2, "the number of slots is missing"),
        ("node1 slots=", 1, "whole number"),
        ("node1 slots=0", 1, "at least 1"),
        ("node1 slots=-1", 1, "whole number"),
        ("node1 slots=two", 1, "whole number"),
        ("node1 slots=8x", 1, "whole number"),
        ("node1 slots=٣", 1, "whole number"),
        ("node1 8", 1, "whole number"),
        ("node1 slots = 8", 1, "two words"),
        ("node1 slots=2 slots=4", 1, "two words"),
        ("node1 slots=2 # old", 1, "a line of its own"),
        ("slots=2", 1, "not a host name"),
        ("me@node1 slots=2", 1, "no user@"),
        ("node1:2222 slots=2", 1, "no port"),
        ("-oProxyCommand=x slots=2", 1, "not a host name"),
    ],
)
def test_an_error_names_the_file_the_line_and_the_rule(tmp_path: Path, text: str, line: int, rule: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ClusterError) as caught:
        read_nodes(file)
    message = str(caught.value)
    assert f"{file}, line {line}" in message
    assert rule in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_a_file_without_hosts_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="lists no host"):
        parse_hostfile_text(text, "hosts")


def test_an_unreadable_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="No such file"):
        read_nodes(tmp_path / "missing")
    with pytest.raises(ClusterError, match="directory"):
        read_nodes(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="not UTF-8"):
        read_nodes(tmp_path / "binary")


def test_every_shipped_example_is_valid_and_starts_with_a_comment() -> None:
    files = sorted(EXAMPLES.glob("*.txt"))
    assert {file.stem for file in files} >= {"one_box", "two_boxes", "docker_host_network", "cpu_test_nodes"}
    for file in files:
        assert read_nodes(file)
        assert file.read_text().startswith("# ")


names = st.from_regex(r"[a-z0-9][a-z0-9.\-]{0,8}[a-z0-9]", fullmatch=True)
hosts = st.dictionaries(names, st.integers(1, 64), min_size=1, max_size=5)


@settings(deadline=None)  # the first example imports deepspeed
@given(hosts, st.lists(st.sampled_from(["", "  ", "# note", "#node9 slots=9"]), max_size=3))
def test_deepspeed_reads_valid_files_in_the_same_way_as_we_do(wanted: dict[str, int], extra_lines: list[str]) -> None:
    from deepspeed.launcher.runner import _parse_hostfile

    text = "\n".join([*extra_lines, *(f"{name} slots={slots}" for name, slots in wanted.items()), *extra_lines])
    assert parse_hostfile_text(text, "hosts") == wanted
    assert dict(_parse_hostfile(text.splitlines())) == wanted


@given(st.text(alphabet="ab1 =#\n\tslot.-:@", max_size=40))
def test_any_text_is_parsed_or_refused_cleanly(text: str) -> None:
    try:
        found = parse_hostfile_text(text, "hosts")
    except ClusterError:
        return
    assert found
    assert all(slots >= 1 for slots in found.values())


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(ClusterError, match="cannot be read \\(not a regular file"):
        read_nodes(tmp_path / "hosts")
