"""Containers behind NAT: what cannot work is named before training, and the overlay makes it work."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import nat_lab
from tests.helpers.command import ROOT
from tests.helpers.node_lab import SSH_PORT, Node


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    if nat_lab.why_no_nat_lab():
        pytest.skip(nat_lab.why_no_nat_lab())
    with nat_lab.nat_lab(tmp_path_factory.mktemp("nat"), 3) as boxes:
        yield boxes


def write_hostfile(path: Path, number: int) -> Path:
    """As box1 sees the others. It has to reach itself on its own address, as there is no hairpin."""
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


def findings(answer: Any) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(answer.stdout)["findings"]}


def test_the_doctor_names_the_pairs_that_cannot_talk(boxes: list[Node], tmp_path: Path) -> None:
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
