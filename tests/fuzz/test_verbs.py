"""Runs the fuzzer: a few cases per command line every day, many with the mark `extended`.

`python -m tests.fuzz --cases 20000` runs more, and names each fault once.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.cases import COMMAND, run_case
from tests.fuzz.verbs import LINES, NOT_FUZZED, Line

EVERYDAY_SEEDS = range(2)
EXTENDED_SEEDS = range(1000, 1020)


def verbs_of(command: Any, *words: str) -> Iterator[str]:
    """Yield the verbs below a command, without groups."""
    below = getattr(command, "commands", {})
    for name, one in below.items():
        yield from verbs_of(one, *words, name)
    if not below:
        yield " ".join(words)


def test_every_verb_has_a_line_or_a_reason() -> None:
    without = {verb for verb in verbs_of(COMMAND) if not any(line.command.startswith(f"{verb} ") for line in LINES)}
    assert without == NOT_FUZZED.keys()


def run_cases(line: Line, seeds: range, inputs: Path) -> None:
    for seed in seeds:
        work = inputs.parent / f"case_{LINES.index(line)}_{seed}"
        failure = run_case(line, seed, inputs, work)
        shutil.rmtree(work)
        assert failure is None, f"{failure.case}\n{failure.problem}"


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.verb} {LINES.index(line)}")
def test_some_damage_gives_a_result_or_one_line(line: Line, inputs: Path) -> None:
    run_cases(line, EVERYDAY_SEEDS, inputs)


@pytest.mark.extended
@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.verb} {LINES.index(line)}")
def test_much_damage_gives_a_result_or_one_line(line: Line, inputs: Path) -> None:
    run_cases(line, EXTENDED_SEEDS, inputs)
