"""Encodes text with the tokenizer of a loaded model. Control tokens come from chat templates, never from text.

A message may spell out a control token, also in forms that a normalizer turns into one. Before a conversation is
rendered, such places are replaced by random marks; after it, the text around a mark is encoded as plain text.
"""

import secrets
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from z2all_ds.base.errors import ConfigError
from z2all_ds.tokenizer.declared_tokens import declared_tokens
from z2all_ds.tokenizer.tokenization_z2all import text_only, without_bytes


def control_ids(tokenizer: Any) -> set[int]:
    """Return the ids of all control tokens, without those of unknown text and of bytes."""
    added = tokenizer.added_tokens_decoder.items()
    ids = {number for number, token in added if token.special} | set(tokenizer.all_special_ids)
    ids |= set(tokenizer.convert_tokens_to_ids(_declared(str(tokenizer.name_or_path))))
    ids -= {tokenizer.unk_token_id, None}
    if not tokenizer.is_fast:
        return ids
    names = tokenizer.convert_ids_to_tokens(sorted(ids))
    return set(tokenizer.convert_tokens_to_ids(without_bytes(tokenizer.backend_tokenizer, names)))


@lru_cache
def _declared(folder: str) -> list[str]:
    """Return what a tokenizer's folder declares as control tokens, since transformers overlooks some declarations."""
    return sorted(declared_tokens(Path(folder))) if folder and Path(folder).is_dir() else []


def text_ids(tokenizer: Any, text: str, control_tokens: bool = False) -> list[int]:
    """Return the ids of a text, without additions; control tokens in it are plain text unless `control_tokens`."""
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=not control_tokens, verbose=False)
    ids: list[int] = encoded["input_ids"]
    control = control_ids(tokenizer)
    if control_tokens or not tokenizer.is_fast or control.isdisjoint(ids):
        return ids
    names = tokenizer.convert_ids_to_tokens(sorted(control))
    plain: list[int] = text_only(tokenizer.backend_tokenizer, names).encode(text, add_special_tokens=False).ids
    return plain


def additions(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer by default puts before and after every text."""
    whole: list[int] = tokenizer("x")["input_ids"]
    bare: list[int] = tokenizer("x", add_special_tokens=False)["input_ids"]
    last = len(whole) - len(bare)
    start = next((start for start in range(last, -1, -1) if whole[start : start + len(bare)] == bare), last)
    return whole[:start], whole[start + len(bare) :]


def hide_control_tokens(tokenizer: Any, text: str, hidden: dict[str, str]) -> str:
    """Return the text with a mark for every control token that it spells out; add mark -> spelling to `hidden`."""
    if not tokenizer.is_fast:
        if found := next((name for name in tokenizer.all_special_tokens if name in text), None):
            raise ConfigError("a message", f"contains the control token {found}", "Remove it.")
        return text
    how = {"add_special_tokens": False, "split_special_tokens": False, "verbose": False}
    encoded = tokenizer(text, return_offsets_mapping=True, **how)
    for start, end in reversed([(start, end) for _, start, end in _control_tokens(tokenizer, encoded, text)]):
        mark = secrets.token_hex(8)
        hidden[mark] = text[start:end]
        text = text[:start] + mark + text[end:]
    return text


def _control_tokens(tokenizer: Any, encoded: Any, text: str) -> Iterator[tuple[int, int, int]]:
    """Yield the place of each control token among the ids, and the span of the text from which it was made.

    A control token may be that for unknown text as well: then the text tells which it is.
    """
    control, normalizer = control_ids(tokenizer), tokenizer.backend_tokenizer.normalizer
    for place, (number, (start, end)) in enumerate(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)):
        is_control = number in control
        if number == tokenizer.unk_token_id:
            forms = (text[start:end], normalizer.normalize_str(text[start:end]) if normalizer else "")
            is_control = tokenizer.unk_token in [form.strip() for form in forms]
        if is_control:
            yield place, start, end


def hidden_messages(tokenizer: Any, messages: list[dict[str, Any]], hidden: dict[str, str]) -> list[dict[str, Any]]:
    """Return the messages of a conversation with such marks in all of their texts."""
    return [
        {
            key: hide_control_tokens(tokenizer, value, hidden) if isinstance(value, str) else value
            for key, value in message.items()
        }
        for message in messages
    ]


def rendered_ids(tokenizer: Any, text: str, hidden: Mapping[str, str]) -> list[int]:
    """Return the ids of a rendered conversation: its control tokens by id, what the marks stand for as plain text."""
    how = {"add_special_tokens": False, "split_special_tokens": False, "verbose": False}
    if not any(mark in text for mark in hidden):
        plain: list[int] = tokenizer(text, **how)["input_ids"]
        return plain
    encoded = tokenizer(text, return_offsets_mapping=True, **how)
    made = encoded["input_ids"]
    ids: list[int] = []
    first, start = 0, 0  # after the control token before
    for place, begin, end in [*_control_tokens(tokenizer, encoded, text), (len(made), len(text), len(text))]:
        part = text[start:begin]
        for mark, spelling in hidden.items():
            part = part.replace(mark, spelling)
        ids += made[first:place] if part == text[start:begin] else text_ids(tokenizer, part)
        ids += made[place : place + 1]
        first, start = place + 1, end
    return ids
