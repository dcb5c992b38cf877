"""Splits documents into windows of tokens for a model to predict, each token exactly once.

Two modes. *Documents*: each document separately, in windows that overlap by `window - stride` tokens, so that every
token has at least that much context (or all there is). *Packed*: the documents of a domain are concatenated with the
end-of-text token after each and cut every `window` tokens as in training; the model sees the preceding text in the same
window, and the end-of-text tokens count as tokens too.

A token without context cannot be predicted. With a begin-of-text token in front, every token has context; without one,
the first token of a document (packed: of the sequence) does not count, and neither do its bytes and characters, which
would make bits per byte look better than they are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from z2all_ds.base.errors import ConfigError
from z2all_ds.evaluate.encoding import control_ids, text_ids

AUTO, YES, NO = "auto", "yes", "no"
BROKEN = "\ufffd"
"""The decoded form of bytes that are not a complete character."""


@dataclass(frozen=True)
class Window:
    """A range of tokens; the model gets all but the last as input."""

    ids: Sequence[int]
    counted: list[bool]
    """Whether the prediction of each token counts; never that of the first."""


@dataclass(frozen=True)
class WindowSettings:
    """How windows are cut."""

    window: int
    """Maximum number of tokens the model sees."""
    stride: int
    """Distance between the starts of two windows; not used for packed windows."""
    packed: bool
    bos_id: int | None
    """Put before every document."""
    eos_id: int | None
    """Packed: put after every document."""


@dataclass(frozen=True)
class Document:
    """The ids of one text and the size of its predicted part."""

    ids: list[int]
    bytes: int
    characters: int


def window_settings(
    tokenizer: Any, max_tokens: int | None, window: int | None, stride: int | None, packed: bool, bos: str
) -> WindowSettings:
    """Check the options and fill in defaults. `max_tokens`: None if the model's config does not state it."""
    if window is not None and not 2 <= window <= (max_tokens or window):
        rule = f"must be from 2 to the model's maximum, {max_tokens}" if max_tokens else "must be at least 2"
        raise ConfigError(f"window={window}", rule, "Change it, or omit it.")
    window = window or max_tokens
    if window is None:
        rule = "the model's config.json does not state how many tokens it supports"
        raise ConfigError("window", rule, "Set --window.")
    if packed and stride is not None:
        raise ConfigError(f"stride={stride}", "packed windows do not overlap", "Omit --stride or --packed.")
    if stride is not None and not 1 <= stride < window:
        rule = f"must be from 1 to window - 1 = {window - 1}, or tokens would have no context"
        raise ConfigError(f"stride={stride}", rule, "Change it, or omit it: windows then share one token.")
    if packed and tokenizer.eos_token_id is None:
        raise ConfigError("--packed", "the tokenizer has no end-of-text token", "Omit it.")
    bos_id = bos_id_of(tokenizer, bos)
    return WindowSettings(window, stride or window - 1, packed, bos_id, tokenizer.eos_token_id if packed else None)


def bos_id_of(tokenizer: Any, bos: str) -> int | None:
    """Return the begin-of-text id or None. `auto`: if the tokenizer adds it by default, as trained with the model."""
    if bos not in (AUTO, YES, NO):
        raise ConfigError(f"bos={bos}", "no such choice", f"Known: {AUTO}, {YES}, {NO}.")
    bos_id: int | None = tokenizer.bos_token_id
    if bos == YES and bos_id is None:
        raise ConfigError("bos=yes", "the tokenizer has no begin-of-text token", "Omit it.")
    is_added = bos_id is not None and tokenizer("x")["input_ids"][:1] == [bos_id]
    return bos_id if bos == YES or (bos == AUTO and is_added) else None


def read_document(tokenizer: Any, text: str, first_counts: bool) -> Document:
    """Tokenize; control tokens spelled out in the text are plain text. `first_counts`: the first token has context."""
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=tokenizer.is_fast,
        verbose=False,  # transformers would warn about texts longer than the model supports
    )
    ids: list[int] = encoded["input_ids"]
    has_offsets = tokenizer.is_fast
    if not control_ids(tokenizer).isdisjoint(ids):
        ids, has_offsets = text_ids(tokenizer, text), False
    if not ids or first_counts:
        return Document(ids, len(text.encode()), len(text))
    # A character that the first token only begins does not count, but its remaining bytes do.
    characters = encoded["offset_mapping"][0][1] if has_offsets else len(tokenizer.decode(ids[:1]))
    return Document(ids, bytes_after_first(text, ids, tokenizer.decode), len(text) - characters)


def bytes_after_first(text: str, ids: Sequence[int], decode: Callable[[list[int]], str]) -> int:
    """Return the bytes of the text after its first token, which may end inside a character."""
    num_bytes = len(text.encode())
    first = decode(list(ids[:1]))
    if BROKEN not in first and text.startswith(first):
        return num_bytes - len(first.encode())
    rest = decode(list(ids[1:]))
    whole = rest.lstrip(BROKEN)  # each stands for a byte of a character that the first token began
    return min(len(whole.encode()) + len(rest) - len(whole), num_bytes)


def document_windows(ids: list[int], cut: WindowSettings) -> Iterator[Window]:
    """Yield the windows of one document."""
    ids = ids if cut.bos_id is None else [cut.bos_id, *ids]
    done = 1
    for begin in range(0, len(ids), cut.stride):
        end = min(begin + cut.window, len(ids))
        if end > done:
            yield Window(ids[begin:end], [position >= done for position in range(begin, end)])
            done = end
        if end == len(ids):
            return


def packed_windows(documents: Iterable[list[int]], cut: WindowSettings) -> Iterator[Window]:
    """Yield the windows of all documents of a domain. A window's last token is the first input of the next."""
    row: list[int] = []
    is_text: list[bool] = []
    assert cut.eos_id is not None

    def next_window() -> Window:
        return Window(row[: cut.window + 1], [False, *is_text[1 : cut.window + 1]])

    for ids in documents:
        if cut.bos_id is not None:
            row.append(cut.bos_id)
            is_text.append(False)
        row += [*ids, cut.eos_id]
        is_text += [True] * (len(ids) + 1)
        while len(row) > cut.window:
            yield next_window()
            del row[: cut.window], is_text[: cut.window]
    if len(row) > 1:
        yield next_window()
