import pytest

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.faults import HARMLESS, KINDS, MIN_ROWS_TO_CHECK, SAMPLES_PER_KIND, Fault, FaultLog


def test_stop_mode_raises_on_the_first_fault_that_is_not_harmless() -> None:
    log = FaultLog()
    for kind in HARMLESS:
        log.add(Fault(kind, "x"), lambda: "f:1")
    assert log.bad == 0
    for kind in KINDS.keys() - HARMLESS:
        with pytest.raises(DataError, match=r"^f:2: .*--on-error skip\.$"):
            log.add(Fault(kind, "x"), lambda: "f:2")


def test_skip_mode_counts_all_faults_and_locates_only_the_first_ones() -> None:
    asked = 0

    def where() -> str:
        nonlocal asked
        asked += 1
        return f"f:{asked}"

    log = FaultLog("skip", 1.0)
    for _ in range(100):
        log.add(Fault("json", "x"), where)
    assert log.counts == {"json": 100}
    assert asked == SAMPLES_PER_KIND == len(log.samples["json"])
    assert log.samples["json"][:2] == ["f:1: x", "f:2: x"]


def test_too_many_invalid_rows_raise_before_the_end() -> None:
    log = FaultLog("skip", 0.01, rows=MIN_ROWS_TO_CHECK)
    for _ in range(10):
        log.add(Fault("utf8", "x"), lambda: "f:1")
    with pytest.raises(DataError, match=r"11 of 1000 rows so far: 11 x not UTF-8.*the first: f:1: x"):
        log.add(Fault("utf8", "x"), lambda: "f:1")


def test_with_few_rows_the_share_is_checked_only_at_the_end() -> None:
    log = FaultLog("skip", 0.01)
    log.add(Fault("json", "x"), lambda: "f:1")
    log.rows = 10
    with pytest.raises(DataError, match="1 of 10 rows of it"):
        log.check("of it")
    FaultLog("skip", 0.0, rows=5).check("of it")


def test_merging_adds_counts_and_keeps_the_order_of_samples() -> None:
    one, other = FaultLog("skip", 1.0), FaultLog("skip", 1.0)
    for number in range(SAMPLES_PER_KIND - 1):
        one.add(Fault("json", "x"), f"a:{number}".__str__)
    for number in range(3):
        other.add(Fault("json", "x"), f"b:{number}".__str__)
    other.add(Fault("bom", "x"), lambda: "b:1")
    one.rows, other.rows = 50, 7
    one.merge(other)
    assert (one.rows, one.bad, one.counts) == (57, SAMPLES_PER_KIND + 2, {"json": SAMPLES_PER_KIND + 2, "bom": 1})
    assert one.samples["json"][-1] == "b:0: x"
    assert len(one.samples["json"]) == SAMPLES_PER_KIND


@pytest.mark.parametrize("arguments", [("ignore", 0.1), ("skip", -0.1), ("skip", 1.1)])
def test_invalid_settings_are_refused(arguments: tuple[str, float]) -> None:
    with pytest.raises(ConfigError):
        FaultLog(*arguments)
