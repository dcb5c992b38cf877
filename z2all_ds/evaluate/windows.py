"""Documents as windows of tokens for a model to predict, each token exactly once.

Two ways. *Documents*: each document alone, in windows that overlap by `window - stride` tokens, so that every token has
at least as many before it (or all that there are). *Packed*: the documents of a domain in a row with the end-of-text
token after each, cut every `window` tokens as in training; the model sees what came before in the same window, and the
end-of-text tokens count as tokens too.

A token with nothing before it cannot be predicted. With a begin-of-text token in front every token has something;
without one the first token of a document (packed: of the row) does not count, and neither do its bytes and characters:
counted, they would make bits per byte look better than they are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from z2all_ds.base.errors import ConfigError

AUTO, YES, NO = "auto", "yes", "no"
BROKEN = "\ufffd"
"""What bytes decode to that are no whole character."""


@dataclass(frozen=True)
class Window:
    """A stretch of tokens; the model is given all but the last."""

    ids: list[int]
    counted: list[bool]
    """Whether the prediction of each token counts; never that of the first."""


@dataclass(frozen=True)
class Way:
    """How windows are cut."""

    window: int
    """Tokens the model sees at most."""
    stride: int
    """Of the ways of documents: how far the next window begins after this one."""
    packed: bool
    bos_id: int | None
    """Put before every document."""
    eos_id: int | None
    """Packed: put behind every document."""


@dataclass(frozen=True)
class Document:
    """One text and what of it can be predicted."""

    ids: list[int]
    bytes: int
    characters: int


def choose_way(
    tokenizer: Any, max_tokens: int | None, window: int | None, stride: int | None, packed: bool, bos: str
) -> Way:
    """Checks what was asked for and fills in the rest. `max_tokens`: None where the model's config does not say."""
    if window is not None and max_tokens is not None and not 2 <= window <= max_tokens:
        rule = f"must be from 2 to what the model is made for, {max_tokens}"
        raise ConfigError(f"window={window}", rule, "Change it, or leave it out.")
    if window is not None and window < 2:
        raise ConfigError(f"window={window}", "must be at least 2", "Change it.")
    window = window or max_tokens
    if window is None:
        rule = "the model's config.json does not say how many tokens it is made for"
        raise ConfigError("window", rule, "Give --window.")
    if packed and stride is not None:
        raise ConfigError(f"stride={stride}", "packed windows do not overlap", "Leave out --stride or --packed.")
    if stride is not None and not 1 <= stride < window:
        rule = f"must be from 1 to window - 1 = {window - 1}, or tokens would have nothing before them"
        raise ConfigError(f"stride={stride}", rule, "Change it, or leave it out: windows then share one token.")
    if packed and tokenizer.eos_token_id is None:
        raise ConfigError("--packed", "the tokenizer has no end-of-text token", "Leave it out.")
    bos_id = bos_id_of(tokenizer, bos)
    return Way(window, stride or window - 1, packed, bos_id, tokenizer.eos_token_id if packed else None)


def bos_id_of(tokenizer: Any, bos: str) -> int | None:
    """`auto`: where the tokenizer adds it by itself, as models that were trained with one come with."""
    if bos not in (AUTO, YES, NO):
        raise ConfigError(f"bos={bos}", "no such choice", f"Known: {AUTO}, {YES}, {NO}.")
    bos_id: int | None = tokenizer.bos_token_id
    if bos == YES and bos_id is None:
        raise ConfigError("bos=yes", "the tokenizer has no begin-of-text token", "Leave it out.")
    is_added = bos_id is not None and tokenizer("x")["input_ids"][:1] == [bos_id]
    return bos_id if bos == YES or (bos == AUTO and is_added) else None


def read_document(tokenizer: Any, text: str, first_counts: bool) -> Document:
    """Control tokens that are spelled out in the text are text. `first_counts`: something is before the document."""
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=tokenizer.is_fast,
        verbose=False,  # transformers would warn of texts longer than the model
    )
    ids: list[int] = encoded["input_ids"]
    if not ids or first_counts:
        return Document(ids, len(text.encode()), len(text))
    # A character that the first token has only begun does not count as one, but its bytes that follow do.
    characters = encoded["offset_mapping"][0][1] if tokenizer.is_fast else len(tokenizer.decode(ids[:1]))
    return Document(ids, bytes_after_first(text, ids, tokenizer.decode), len(text) - characters)


def bytes_after_first(text: str, ids: Sequence[int], decode: Callable[[list[int]], str]) -> int:
    """Bytes of the text behind its first token, which may end inside a character."""
    num_bytes = len(text.encode())
    first = decode(list(ids[:1]))
    if BROKEN not in first and text.startswith(first):
        return num_bytes - len(first.encode())
    rest = decode(list(ids[1:]))
    whole = rest.lstrip(BROKEN)  # each stands for a byte of a character that the first token has begun
    return min(len(whole.encode()) + len(rest) - len(whole), num_bytes)


def document_windows(ids: list[int], way: Way) -> Iterator[Window]:
    """Of one document."""
    ids = ids if way.bos_id is None else [way.bos_id, *ids]
    done = 1
    for begin in range(0, len(ids), way.stride):
        end = min(begin + way.window, len(ids))
        if end > done:
            yield Window(ids[begin:end], [place >= done for place in range(begin, end)])
            done = end
        if end == len(ids):
            return


def packed_windows(documents: Iterable[list[int]], way: Way) -> Iterator[Window]:
    """Of all documents of a domain. Neighbours share the token that one predicts last and the other sees first."""
    row: list[int] = []
    is_text: list[bool] = []
    assert way.eos_id is not None

    def cut() -> Window:
        return Window(row[: way.window + 1], [False, *is_text[1 : way.window + 1]])

    for ids in documents:
        if way.bos_id is not None:
            row.append(way.bos_id)
            is_text.append(False)
        row += [*ids, way.eos_id]
        is_text += [True] * (len(ids) + 1)
        while len(row) > way.window:
            yield cut()
            del row[: way.window], is_text[: way.window]
    if len(row) > 1:
        yield cut()
