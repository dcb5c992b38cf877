"""Reads prompts from a file and writes answers to one."""

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
"""Fields of an answer's line; a prompt's record must not have them."""


def read_prompts(file: str) -> list[Record]:
    """Read one prompt per line or, from a .jsonl file, one object with a `prompt` per line; `-`: lines of stdin. Empty
    lines are skipped."""
    path = Path(file).expanduser()
    text = read_stdin() if file == STDIN else _read(path)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"file {file}", "has no prompt", "Write one prompt per line.")
    if path.suffix != ".jsonl":
        return [{"prompt": line.removesuffix("\r")} for _, line in lines]
    return [_record(line, f"{file}:{number}") for number, line in lines]


def read_stdin() -> str:
    """Return all of stdin; refuse invalid UTF-8."""
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        raise DataError("stdin", "not readable (not UTF-8)", "Use valid Unicode.") from None
    require_characters(text, "stdin")  # in the C locale, invalid UTF-8 is not rejected
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"not readable ({getattr(error, 'strerror', None) or 'not UTF-8'})"
        raise DataError(f"file {path}", rule, "Use a file of prompts in UTF-8.") from None


def _record(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(where, f"not JSON ({error})", "Fix or remove that line.") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
        raise DataError(where, "each line must be an object with a string `prompt`", "Fix or remove that line.")
    require_characters(json.dumps(record, ensure_ascii=False), where)
    taken = [name for name in ANSWER_FIELDS if name in record]
    if taken:
        raise DataError(f"{where}, field {taken[0]}", "the name is used by the answer", "Rename your field.")
    return record


def with_answers(records: list[Record], answers: list[Answer], num: int) -> list[Record]:
    """Return the answers, each with the other fields of its prompt's record."""
    return [{**records[place // num], **asdict(answer)} for place, answer in enumerate(answers)]


def require_place(out: Path) -> None:
    """Check that the file can be written before the first answer is generated, so that none is lost at the end."""
    if out.is_dir():
        raise ConfigError(f"--out {out}", "is a folder", "Use a file in it.")
    make_folder(out.parent)
    with explain_disk_errors(out.parent):
        temporary_name(out).touch()
        temporary_name(out).unlink()


def write_answers(out: Path, found: list[Record]) -> None:
    """Write the file atomically."""
    with explain_disk_errors(out.parent):
        write_whole(out, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found))
