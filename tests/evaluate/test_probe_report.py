"""The table of probe results."""

import pytest

from z2all_ds.evaluate.probe_report import MISSED, ModelAnswers, ProbeAnswer, ProbeResults, describe
from z2all_ds.evaluate.probes import SentenceProbe


@pytest.mark.parametrize(("passed", "explains"), [(True, False), (None, False), (False, True)])
def test_missed_expectations_are_explained(passed: bool | None, explains: bool) -> None:
    probe = SentenceProbe(name="a", text="some text", at_most=20)
    answers = ModelAnswers("model", 300, {"a": ProbeAnswer(10.0, passed, {})})
    lines = list(describe(ProbeResults("zh_en", [probe], [[answers]])))
    assert (MISSED in lines) == explains
    assert isinstance(lines[-1], str) and lines[-1].startswith("model: probes ")


def test_progress_of_missed_probes_is_counted() -> None:
    """One sentence has come closer to its limit, one has not, and one passes."""
    probes = [SentenceProbe(name=name, text="some text", at_most=20) for name in ("closer", "further", "passed")]
    values = {150: (900.0, 30.0, 10.0), 300: (100.0, 40.0, 10.0)}
    series = [
        ModelAnswers("run", step, {p.name: ProbeAnswer(v, v <= 20, {}) for p, v in zip(probes, row, strict=True)})
        for step, row in values.items()
    ]
    line = "1 of the 2 missed probes have come closer to what is expected since step 150"
    assert line in list(describe(ProbeResults("zh_en", probes, [series])))
    assert line not in list(describe(ProbeResults("zh_en", probes, [series[-1:]])))
