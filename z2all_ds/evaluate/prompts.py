"""Prompts and answers: reads prompts from files, encodes them for a model, and writes answers.

A prompt is plain text to continue, or a message in the tokenizer's chat template. Every tokenizer trained by this
package has a template, long before its model has learned to chat. So that template is used only on request; the
template of any other model is used unless disabled.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.paths import expanded
from z2all_ds.base.storage.open_files import open_regular
from z2all_ds.corpus.schema import has_lone_surrogate
from z2all_ds.evaluate.encoding import hidden_messages, rendered_ids, text_ids
from z2all_ds.evaluate.windows import AUTO, bos_id_of
from z2all_ds.tokenizer.special_tokens import CHAT_TEMPLATE

Message = dict[str, str]
Record = dict[str, Any]
STDIN = "-"
_PROBE_ANSWER = "an answer that no template knows"


@dataclass(frozen=True)
class Answer:
    """The model's answer to one prompt."""

    prompt: str
    text: str
    """New text, without the prompt."""
    finish: str
    """Why it ended: `end`, `stop` or `length`."""
    new_tokens: int
    sample: int = 0
    """Index among the answers to the same prompt."""


ANSWER_FIELDS = tuple(field.name for field in fields(Answer) if field.name != "prompt")
"""Fields of an answer's line; a prompt's record must not have them."""


def require_unicode(text: str, where: str) -> None:
    """Refuse lone surrogates. They come from invalid UTF-8 on a command line or terminal, or from JSON escapes; no
    tokenizer accepts them, and no file can be written with them."""
    if has_lone_surrogate(text):
        raise DataError(where, "not UTF-8, or half a surrogate pair", "Use valid Unicode.")


# Encoding


def is_chat(tokenizer: Any, asked: bool | None) -> bool:
    """Return whether prompts are messages. `asked`: None lets the tokenizer decide."""
    template = getattr(tokenizer, "chat_template", None)
    if asked and not template:
        raise ConfigError("--chat", "the tokenizer has no chat template", "Omit it.")
    return bool(template) and template != CHAT_TEMPLATE if asked is None else asked


def plain_ids(tokenizer: Any, prompt: str, control_tokens: bool = False) -> list[int]:
    """Encode a text with a begin-of-text token if the tokenizer adds one by default; never with an end token."""
    if not prompt:
        raise ConfigError("an empty prompt", "must have at least one character", "Enter text to continue.")
    require_unicode(prompt, "a prompt")
    ids = text_ids(tokenizer, prompt, control_tokens)
    bos_id = bos_id_of(tokenizer, AUTO)
    return ids if bos_id is None else [bos_id, *ids]


def chat_ids(tokenizer: Any, messages: list[Message], control_tokens: bool = False) -> list[int]:
    """Return the ids of the conversation so far and the beginning of the answer.

    Control tokens in a message are plain text unless `control_tokens`.
    """
    for message in messages:
        require_unicode("".join(message.values()), "a message")
    hidden: dict[str, str] = {}
    if not control_tokens:
        messages = hidden_messages(tokenizer, messages, hidden)
    return rendered_ids(tokenizer, _render(tokenizer, messages, add_generation_prompt=True), hidden)


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the control token that the template puts after an answer; it ends an answer whatever the config says."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE_ANSWER}]
    try:
        _, found, after = _render(tokenizer, messages, add_generation_prompt=False).rpartition(_PROBE_ANSWER)
    except ConfigError:
        return None
    ids = tokenizer(after, add_special_tokens=False, split_special_tokens=False)["input_ids"] if found else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def _render(tokenizer: Any, messages: list[Message], add_generation_prompt: bool) -> str:
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise ConfigError("the chat template", f"rejects this conversation ({error})", "Change it.") from error
    return text


# Files


def read_prompts(file: str) -> list[Record]:
    """Read one prompt per line or, from a .jsonl file, one object with a `prompt` per line; `-`: lines of stdin. Empty
    lines are skipped."""
    path = expanded(file)
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
    require_unicode(text, "stdin")  # in the C locale, invalid UTF-8 is not rejected
    return text


def _read(path: Path) -> str:
    try:
        with os.fdopen(open_regular(path), encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        rule = f"not readable ({getattr(error, 'strerror', None) or 'not UTF-8'})"
        raise DataError(f"file {path}", rule, "Use a file of prompts in UTF-8.") from None


def _record(line: str, where: str) -> Record:
    try:
        record = load_json(line)
    except ValueError as error:
        raise DataError(where, f"not JSON ({error})", "Fix or remove that line.") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
        raise DataError(where, "each line must be an object with a string `prompt`", "Fix or remove that line.")
    require_unicode(json.dumps(record, ensure_ascii=False), where)
    taken = [name for name in ANSWER_FIELDS if name in record]
    if taken:
        raise DataError(f"{where}, field {taken[0]}", "the name is used by the answer", "Rename your field.")
    return record


def with_answers(records: list[Record], answers: list[Answer], num: int) -> list[Record]:
    """Return the answers, each with the other fields of its prompt's record."""
    return [{**records[index // num], **asdict(answer)} for index, answer in enumerate(answers)]


def explain_blanks(answers: Sequence[Answer]) -> None:
    """Say on stderr why there is nothing to see."""
    blank = sum(not answer.text.strip() for answer in answers)
    if blank:
        say(f"{blank} of {len(answers)} answers are blank: common after little training; try --temperature 0.8")
