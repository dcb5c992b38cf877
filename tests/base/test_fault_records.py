"""Fault records of the ranks, and the choice of the first failure among them."""

from itertools import permutations
from pathlib import Path

from z2all_ds.base.errors import ClusterError, DataError, NotSaved, PortTaken, TrainingError
from z2all_ds.base.fault_records import (
    BUG,
    HANG,
    KILLED,
    LOST_PEER,
    NODE_LOST,
    Fault,
    family_of,
    first_fault,
    forget_fault,
    forget_faults,
    has_fault,
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


def test_a_record_that_cannot_be_written_raises_no_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    write_fault(RunFolder(tmp_path), fault("data"))
    assert read_faults(RunFolder(tmp_path)) == []


def test_family_of_an_error() -> None:
    words = ("a", "b", "c")
    assert family_of(DataError(*words)) == "data"
    assert family_of(TrainingError(*words)) == "training"
    assert family_of(PortTaken(*words)) == "cluster"
    assert family_of(ClusterError(*words)) == "cluster"
    assert family_of(NotSaved(*words)) == "machine"
