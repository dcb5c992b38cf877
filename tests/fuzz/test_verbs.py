"""Runs the fuzzer: a few cases per command line every day, many with the mark `extended`.

`python -m tests.fuzz --cases 20000` runs more, and names each fault once.
"""

import shutil
from pathlib import Path

import pytest

from tests.fuzz.cases import run_case
from tests.fuzz.verbs import LINES, Line

EVERYDAY_SEEDS = range(2)
EXTENDED_SEEDS = range(1000, 1020)


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
