"""Prompts from a file and answers into one."""

import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import explain_disk_errors, make_folder, temporary_name, write_whole
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.evaluate.chat import require_characters
from z2all_ds.evaluate.generate import Answer

Record = dict[str, Any]
STDIN = "-"
ANSWER_FIELDS = tuple(field.name for field in fields(Answer) if field.name != "prompt")
"""Of an answer's line; a prompt's cannot have them too."""


def read_prompts(file: str) -> list[Record]:
    """One prompt a line, or, from a .jsonl file, one object with a `prompt` a line; `-`: lines of stdin. Lines without
    anything are left out."""
    path = Path(file).expanduser()
    text = read_stdin() if file == STDIN else _read(path)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"file {file}", "holds no prompt", "Write one prompt a line.")
    if path.suffix != ".jsonl":
        return [{"prompt": line.removesuffix("\r")} for _, line in lines]
    return [_record(line, f"{file}:{number}") for number, line in lines]


def read_stdin() -> str:
    """Whole."""
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        raise DataError("stdin", "not readable (no UTF-8)", "Give valid Unicode.") from None
    require_characters(text, "stdin")  # where the locale is C, what is no UTF-8 comes through
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"not readable ({getattr(error, 'strerror', None) or 'no UTF-8'})"
        raise DataError(f"file {path}", rule, "Give a file of prompts in UTF-8.") from None


def _record(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(where, f"not JSON ({error})", "Repair or remove that line.") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
        raise DataError(where, "each line is an object with a text under prompt", "Repair or remove that line.")
    require_characters(json.dumps(record, ensure_ascii=False), where)
    taken = [name for name in ANSWER_FIELDS if name in record]
    if taken:
        raise DataError(f"{where}, field {taken[0]}", "the answer's own field is called so", "Call yours otherwise.")
    return record


def with_answers(records: list[Record], answers: list[Answer], num: int) -> list[Record]:
    """What stood beside a prompt stays beside it."""
    return [{**records[place // num], **asdict(answer)} for place, answer in enumerate(answers)]


def require_place(out: Path) -> None:
    """That a file can be written there is tried before the first answer, or all would be lost after the last."""
    if out.is_dir():
        raise ConfigError(f"--out {out}", "is a folder", "Give a file in it.")
    make_folder(out.parent)
    with explain_disk_errors(out.parent):
        temporary_name(out).touch()
        temporary_name(out).unlink()


def write_answers(out: Path, found: list[Record]) -> None:
    """Whole or not at all."""
    with explain_disk_errors(out.parent):
        write_whole(out, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found))
