"""`python -m tests.fuzz [--cases N] [--seed S] [--only TEXT]`: run N cases over all lines; name each fault once.

With --every-value the cases are those of `every_value.py`, in an order given by the seed.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random

from tests.fuzz.cases import Failure, run_case, warm_up
from tests.fuzz.every_value import run_value_case, value_cases
from tests.fuzz.inputs import make_inputs
from tests.fuzz.stand_ins import stand_ins
from tests.fuzz.verbs import LINES, Line

Run = Callable[[Path], Failure | None]


def damages(lines: list[Line], seed: int, inputs: Path) -> Iterator[Run]:
    """Yield cases of `run_case`, without end."""
    for number in count(seed):
        yield from (partial(run_case, line, number, inputs) for line in lines)


def every_value(lines: list[Line], seed: int, inputs: Path) -> Iterator[Run]:
    cases = [case for line in lines for case in value_cases(line, inputs)]
    Random(seed).shuffle(cases)
    print(f"{len(cases)} cases with a changed value", flush=True)
    yield from (partial(run_value_case, case, inputs) for case in cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only lines that contain this text")
    parser.add_argument("--inputs", type=Path, help="folder to keep the inputs in")
    parser.add_argument("--every-value", action="store_true")
    options = parser.parse_args()
    lines = [line for line in LINES if options.only in line.command]
    found: dict[str, list[Failure]] = {}
    with tempfile.TemporaryDirectory() as scratch, stand_ins():
        root = Path(scratch)
        root.chmod(0o755)
        inputs = options.inputs or root / "inputs"
        if not inputs.exists():
            inputs.mkdir()
            make_inputs(inputs)
        warm_up(lines, inputs, root)
        started = time.monotonic()
        runs = every_value(lines, options.seed, inputs) if options.every_value else damages(lines, options.seed, inputs)
        done = 0
        for run in islice(runs, options.cases):
            failure = run(root / f"case_{done}")
            if failure:
                if failure.place not in found:
                    print(f"=== {failure.place}\n{failure.case}\n{failure.problem}", flush=True)
                found.setdefault(failure.place, []).append(failure)
            shutil.rmtree(root / f"case_{done}")
            done += 1
    seconds = time.monotonic() - started
    print(f"{done} cases in {seconds:.0f} s, {sum(map(len, found.values()))} failures, {len(found)} places")
    for place, failures in found.items():
        print(f"{len(failures):5} {place}")


if __name__ == "__main__":
    main()
