"""Fault records of the ranks, and the choice of the first failure among them."""

import os
from itertools import permutations
from pathlib import Path

import pytest

from z2all_ds.base.errors import ClusterError, DataError, NotSaved, PortTaken, TrainingError
from z2all_ds.base.fault_records import (
    BUG,
    HANG,
    KILLED,
    LAUNCH_VARIABLE,
    LOST_PEER,
    NODE_LOST,
    Fault,
    cause_since,
    family_of,
    first_fault,
    forget_fault,
    forget_faults,
    has_fault,
    name_launch,
    read_faults,
    write_fault,
)
from z2all_ds.base.run_folder import RunFolder


def fault(kind: str, rank: int = 0, weight: int = 0, time_unix: float = 100.0) -> Fault:
    return Fault(kind, rank, "n0", f"{kind} of {rank}", 1, weight, time_unix)


def test_the_cause_of_a_failure_comes_before_its_consequences() -> None:
    ordered = [fault("data", 3), fault(NODE_LOST, 2), fault(KILLED, 1), fault(HANG, 0), fault(LOST_PEER, 4)]
    for left in range(len(ordered)):
        for shuffled in permutations(ordered[left:]):
            assert first_fault(shuffled) == ordered[left]
    assert first_fault([]) is None


def test_faults_of_the_same_kind_are_ordered_by_weight_then_time() -> None:
    stopped, waiting = fault(HANG, 1, weight=10, time_unix=200.0), fault(HANG, 0, weight=-5, time_unix=100.0)
    assert first_fault([waiting, stopped]) == stopped
    early, late = fault(KILLED, 1, time_unix=100.0), fault(KILLED, 0, time_unix=100.5)
    assert first_fault([late, early]) == early


def test_the_first_fault_of_a_rank_is_kept_until_it_is_forgotten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_fault(folder, fault("data", 2))
    write_fault(folder, fault(KILLED, 2))
    write_fault(folder, fault(BUG, 10))
    assert read_faults(folder) == [fault("data", 2), fault(BUG, 10)]
    forget_fault(folder, 2)
    forget_fault(folder, 2)
    assert not has_fault(folder, 2)
    assert has_fault(folder, 10)
    forget_faults(folder)
    assert read_faults(folder) == []


def test_ranks_of_another_start_in_the_folder_do_not_touch_the_records_of_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    monkeypatch.setenv(LAUNCH_VARIABLE, "")  # restored afterwards
    write_fault(folder, fault("config", 2))  # before the ranks of the launch fail
    ours = name_launch()
    assert read_faults(folder) == [] and not has_fault(folder, 2)
    write_fault(folder, fault(KILLED, 2))
    for intruder in ("", "0123"):
        monkeypatch.setenv(LAUNCH_VARIABLE, intruder)
        forget_fault(folder, 2)
        write_fault(folder, fault("data", 2))
        assert read_faults(folder) == [fault("data", 2)]
    monkeypatch.setenv(LAUNCH_VARIABLE, ours)
    assert read_faults(folder) == [fault(KILLED, 2)]
    assert name_launch() == os.environ[LAUNCH_VARIABLE] != ours
    forget_faults(folder)
    assert list(folder.faults.iterdir()) == []


def test_a_record_that_cannot_be_written_raises_no_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    write_fault(RunFolder(tmp_path), fault("data"))
    assert read_faults(RunFolder(tmp_path)) == []


@pytest.mark.parametrize("content", ["{}", "[1]", '{"kind": "data"', '{"kind": 1, "x": 2}'])
def test_a_damaged_record_does_not_hide_the_others(tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path)
    write_fault(folder, fault("data", 2))
    (folder.faults / "rank_0001.json").write_text(content)
    os.mkfifo(folder.faults / "rank_0003.json")
    assert read_faults(folder) == [fault("data", 2)]
    assert cause_since(folder, 110.0) == fault("data", 2)
    assert cause_since(folder, 170.0) is None  # of an earlier start


def test_a_link_to_another_file_is_replaced(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "target").write_text("kept")
    write_fault(folder, fault("data"))
    (record,) = folder.faults.iterdir()
    record.unlink()
    record.with_suffix(".part").symlink_to(tmp_path / "target")
    write_fault(folder, fault("data"))
    assert (tmp_path / "target").read_text() == "kept" and read_faults(folder) == [fault("data")]


def test_only_our_records_in_our_folders_are_deleted(tmp_path: Path) -> None:
    folder, others = RunFolder(tmp_path / "run"), tmp_path / "others"
    others.mkdir()
    folder.faults.mkdir(parents=True)
    names = ("rank_0000.json", "rank_0001.part", "rank_results.csv")
    for place in (others, folder.faults):
        for name in names:
            (place / name).touch()
    folder.flights.symlink_to(others)
    forget_faults(folder)
    assert [path.name for path in folder.faults.iterdir()] == ["rank_results.csv"]
    assert sorted(path.name for path in others.iterdir()) == sorted(names)


def test_family_of_an_error() -> None:
    words = ("a", "b", "c")
    assert family_of(DataError(*words)) == "data"
    assert family_of(TrainingError(*words)) == "training"
    assert family_of(PortTaken(*words)) == "cluster"
    assert family_of(ClusterError(*words)) == "cluster"
    assert family_of(NotSaved(*words)) == "machine"
