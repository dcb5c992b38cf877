"""Tests of the health test at launch, which runs once and whose failures are remembered at restarts."""

from pathlib import Path

import pytest

from z2all_ds.cluster.doctor import FAIL
from z2all_ds.cluster.launch import multi_node
from z2all_ds.cluster.launch.multi_node import Launch, LaunchOptions
from z2all_ds.cluster.nodes import DataAddress
from z2all_ds.cluster.preflight.checks import Preflight, Subject
from z2all_ds.cluster.preflight.compare import NodeFinding
from z2all_ds.cluster.preflight.health_run import Health


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Replace the preflight by one that finds n1 slow, and return the (health, exclude_slow) of all calls."""
    asked: list[tuple[bool, bool]] = []

    def preflight(subject: Subject, health: bool, exclude_slow: bool) -> Preflight:
        asked.append((health, exclude_slow))
        addresses = {node.name: DataAddress("10.0.0.1", "eth0") for node in subject.nodes}
        slow = [NodeFinding("n1: slow", FAIL, "3 ms", "", ("n1",))] if health and exclude_slow else []
        return Preflight(list(slow), addresses=addresses, health=Health(findings=slow) if health else None)

    monkeypatch.setattr(multi_node, "preflight", preflight)
    return asked


def launch(tmp_path: Path, *, health: bool = True, exclude_slow: bool = False, dry_run: bool = False) -> Launch:
    (tmp_path / "hosts").write_text("n0 slots=1\nn1 slots=1\nn2 slots=1\n")
    options = LaunchOptions(str(tmp_path / "hosts"), health=health, exclude_slow=exclude_slow, dry_run=dry_run)
    return Launch(options, [f"run_dir={tmp_path / 'run'}"])


def test_health_is_tested_only_at_the_first_start(tmp_path: Path, asked: list[tuple[bool, bool]]) -> None:
    job = launch(tmp_path)
    assert [job.check_nodes().unfit() for _ in range(3)] == [[], [], []]
    assert asked == [(True, False), (False, False), (False, False)]


@pytest.mark.parametrize("options", [{"health": False}, {"dry_run": True}])
def test_health_is_not_tested_if_disabled_or_in_a_dry_run(
    tmp_path: Path, asked: list[tuple[bool, bool]], options: dict[str, bool]
) -> None:
    job = launch(tmp_path, **options)
    job.check_nodes()
    assert asked == [(False, False)]


def test_slow_nodes_stay_excluded_at_restarts(tmp_path: Path, asked: list[tuple[bool, bool]]) -> None:
    job = launch(tmp_path, exclude_slow=True)
    assert [job.check_nodes().unfit() for _ in range(3)] == [["n1"], ["n1"], ["n1"]]
    assert len(job.check_nodes().failures) == 1
