"""Tests for probe files: parsing, and a one-line error for every mistake."""

from pathlib import Path

import pytest

from tests.helpers.probe_files import write_probes
from z2all_ds.base.config import anchored, load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.evaluate.probes import KINDS, FormatProbe, load_probes


def test_the_shipped_file_has_all_kinds_in_both_languages() -> None:
    probes = load_probes("zh_en")
    assert len(probes) >= 25
    assert {probe.kind for probe in probes} == {kind.kind for kind in KINDS}
    assert {probe.name.partition("_")[0] for probe in probes} == {"zh", "en", "code"}
    assert all(probe.is_judged(step=10**6) for probe in probes)


def test_every_kind_of_probe_is_recognized_by_its_keys(tmp_path: Path) -> None:
    probes = load_probes(str(write_probes(tmp_path)))
    assert [probe.kind for probe in probes] == [
        *("completion", "completion", "sentence", "compare", "compare"),
        *("format", "format"),
    ]
    assert isinstance(probes[5], FormatProbe) and probes[5].asks_for_text
    assert isinstance(probes[6], FormatProbe) and not probes[6].asks_for_text


def test_expectations_are_judged_from_their_step_on(tmp_path: Path) -> None:
    capital, _, plain, order, _, _, silent = load_probes(str(write_probes(tmp_path)))
    assert capital.is_judged(0) and capital.is_met(0.5) and not capital.is_met(0.49)
    assert not capital.is_met(float("nan"))
    assert not plain.is_judged(7) and plain.is_judged(8) and plain.is_judged(None)
    assert plain.is_met(1e6) and not plain.is_met(1.1e6)
    assert order.is_met(0.1) and not order.is_met(-0.1)  # by default a value above 0 is expected
    assert not silent.is_judged(100)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "- {name: a, prompt: x, completion: y, at_leest: 0.5}",
            "a): at_leest: no such setting. Did you mean at_least?",
        ),
        ("- {name: a, prompt: x, starts_with: y, jsn: true}", "jsn: no such setting. Did you mean json?"),
        ("- {name: a, prompt: x, completions: y}", "is needed. Did you mean completion?"),
        ("- {name: a, prompt: x}", "one of completion, text, better, starts_with is needed"),
        ("- {name: a, text: xy, better: y, worse: z}", "has keys of several kinds (sentence and compare)"),
        ("- {prompt: x, completion: y}", "probe 1: name"),
        ("- {name: a b, prompt: x, completion: y}", "name 'a b' must be one word without spaces"),
        ("- {name: a, text: xy}\n- {name: a, text: xyz}", "probe 2: name 'a': used by an earlier probe"),
        ("- {name: a, prompt: x, completion: y, at_least: 1.5}", "at_least=1.5: the value is a probability"),
        ("- {name: a, text: xy, at_least: 3, at_most: 2}", "at_least=3 must not exceed at_most=2"),
        ("- {name: a, prompt: x, completion: []}", "at least one text must be given"),
        ("- {name: a, prompt: x, completion: [y, y]}", "a text must not be given twice"),
        ("- {name: a, prompt: x, starts_with: y, matches: '('}", "matches='(' is not a regular expression"),
        ("- {name: a, better: x}", "worse"),
        ("- {name: a, better: x, worse: y, per: word}", "per='word'"),
        ("- text", "must be key: value pairs"),
        ("[]", "must be a list of at least one probe"),
        ("", "must be a list of at least one probe"),
        ("name: a", "must be a list of at least one probe"),
        ("- {name: a", "not valid YAML"),
    ],
)
def test_invalid_probes_are_refused(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_probes(str(write_probes(tmp_path, content)))
    assert said in str(caught.value)
    assert "small.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_the_error_for_a_missing_file_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"neither a file nor one of the shipped ones \(zh_en\).*Did you mean zh_en"):
        load_probes("zh_an")


def test_a_run_config_stores_the_path_of_a_file_or_the_name_of_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_probes(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert anchored(load_run_config(None, ["probes.file=small.yaml"])).probes.file == str(path)
    assert anchored(load_run_config(None, ["probes.file=zh_en"])).probes.file == "zh_en"
