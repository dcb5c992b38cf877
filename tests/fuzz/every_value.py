"""Each value of each JSON and YAML file that a command line reads, replaced by a value of every other type.

Of values whose keys are equal except for numbers (items of a list, layers, lines of a file), only the first is taken,
and of long dictionaries only the first few.
"""

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.fuzz.cases import Failure, copy_inputs, judge
from tests.fuzz.inputs import reseal
from tests.fuzz.verbs import Line

ODD_VALUES: list[Any] = [None, True, -1, 0.5, 10**30, "x", [], [1], {}, {"a": 1}]
LONG, MOST_KEYS = 60, 3
KINDS = (".json", ".jsonl", ".yaml")


class ValueCase(NamedTuple):
    line: Line
    file: str
    keys: tuple[Any, ...]
    """From the outside in; the first one is the line of the file in JSON Lines."""
    value: Any


def value_cases(line: Line, inputs: Path) -> Iterator[ValueCase]:
    roots = [inputs / name for name in line.inputs.split()]
    files = [path for root in roots for path in (root, *sorted(root.rglob("*"))) if path.suffix in KINDS]
    for path in files:
        seen = set()
        for keys in _key_paths(_read(path)):
            shape = tuple("N" if isinstance(key, int) else re.sub(r"\d+", "N", str(key)) for key in keys)
            if shape in seen:
                continue
            seen.add(shape)
            for value in ODD_VALUES:
                yield ValueCase(line, str(path.relative_to(inputs)), keys, value)


def run_value_case(case: ValueCase, inputs: Path, work: Path) -> Failure | None:
    """Run the case in the new folder `work`."""
    copy_inputs(case.line, inputs, work)
    path = work / case.file
    content = place = _read(path)
    for key in case.keys[:-1]:
        place = place[key]
    place[case.keys[-1]] = case.value
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in content))
    else:
        path.write_text(json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content))
    reseal(work)
    name = f"{case.line.command!r}: {case.file} {case.keys} = {case.value!r}"
    return judge(case.line, case.line.arguments, work, name)


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def _key_paths(content: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = content.keys() if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in islice(keys, MOST_KEYS if len(keys) > LONG else None):
        yield (*before, key)
        yield from _key_paths(content[key], (*before, key))
