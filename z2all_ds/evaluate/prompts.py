"""Prompts from a file and answers into one."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from z2all_ds.errors import DataError
from z2all_ds.evaluate.generate import Answer

Record = dict[str, Any]
STDIN = "-"


def read_prompts(file: str) -> list[Record]:
    """One prompt a line, or, from a .jsonl file, one object with a `prompt` a line; `-`: lines of stdin. Lines without
    anything are left out."""
    path = Path(file).expanduser()
    try:
        text = sys.stdin.read() if file == STDIN else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"not readable ({getattr(error, 'strerror', None) or 'no UTF-8'})"
        raise DataError(f"file {file}", rule, "Give a file of prompts in UTF-8.") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"file {file}", "holds no prompt", "Write one prompt a line.")
    if path.suffix != ".jsonl":
        return [{"prompt": line.removesuffix("\r")} for _, line in lines]
    return [_record(line, f"{file}:{number}") for number, line in lines]


def _record(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(where, f"not JSON ({error})", "Repair or remove that line.") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
        raise DataError(where, "each line is an object with a text under prompt", "Repair or remove that line.")
    return record


def with_answers(records: list[Record], answers: list[Answer], num: int) -> list[Record]:
    """What stood beside a prompt stays beside it."""
    return [{**records[place // num], **asdict(answer)} for place, answer in enumerate(answers)]


def write_answers(out: Path, found: list[Record]) -> None:
    """Whole or not at all."""
    from z2all_ds.atomic import write_whole

    write_whole(out, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found))
