"""Probes as rows of tokens to be read by a model, and the values made of the log-probabilities that come back.

As in a training document, nothing stands before the first token (a document of a run has no begin-of-text; its
<|endoftext|> is its last token, and predicts nothing). So the first token of a text without a prompt is not counted.
Models from elsewhere whose tokenizer puts a begin-of-text before every text get it here too, and then it is.

A prompt and what follows are tokenized together, as the model has seen such text, unless the border between them falls
into a token: then apart, the second still as text in the middle of a document. The probability of a text is that of its
tokens in this order, the other ways to cut the same text are left out; `{` and `{"` are different answers where the
latter is a token of its own, and both can be listed.

Plain numbers: no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from z2all_ds.base.errors import DataError
from z2all_ds.evaluate.probes import CompareProbe, CompletionProbe, FormatProbe, Probe, SentenceProbe
from z2all_ds.evaluate.windows import bytes_after_first

LARGEST_EXPONENT = 700.0
"""Beyond exp(700) a float has no room."""
MARKS = ("\n", "|", "。")
"""One of them is put before a text that is to be tokenized as in the middle of another: one that makes no token with
its first character."""


class Tokenizer(Protocol):
    """What is asked of one here; nothing is added at either end."""

    def encode(self, text: str, /) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True)
class ProbeRow:
    """Tokens of which those from `first_scored` on are asked for."""

    ids: tuple[int, ...]
    first_scored: int
    num_bytes: int
    """Of the text that the scored tokens stand for."""


@dataclass(frozen=True)
class Asked:
    """A probe and its rows."""

    probe: Probe
    rows: tuple[ProbeRow, ...]


@dataclass(frozen=True)
class Reading:
    """What a model answered."""

    value: float
    details: dict[str, float] = field(default_factory=dict)


def ask(probes: Sequence[Probe], tokenizer: Tokenizer, before: Sequence[int], max_tokens: int) -> list[Asked]:
    """`before`: ids that begin every text, usually none. A row longer than `max_tokens` is an error."""
    asked = [Asked(probe, _rows(probe, tokenizer, tuple(before))) for probe in probes]
    for one in asked:
        longest = max(len(row.ids) for row in one.rows)
        if longest > max_tokens:
            rule = f"has {longest} tokens, and a sequence holds {max_tokens}"
            raise DataError(f"probe {one.probe.name}", rule, "Shorten its text.")
        if any(row.first_scored >= len(row.ids) for row in one.rows):
            rule = "has a text of a single token with nothing before it, which nothing predicts"
            raise DataError(f"probe {one.probe.name}", rule, "Give it a longer text, or a prompt.")
    return asked


def read(one: Asked, log_probabilities: Sequence[Sequence[float]]) -> Reading:
    """From the scored tokens' log-probabilities, row by row."""
    sums = [math.fsum(of_row) for of_row in log_probabilities]
    tokens = [len(of_row) for of_row in log_probabilities]
    if isinstance(one.probe, SentenceProbe):
        nats = -sums[0]
        perplexity = math.exp(min(nats / tokens[0], LARGEST_EXPONENT))
        return Reading(perplexity, {"tokens": tokens[0], "bits_per_byte": nats / math.log(2) / one.rows[0].num_bytes})
    if isinstance(one.probe, CompareProbe):
        sizes = {"token": tokens, "byte": [row.num_bytes for row in one.rows], "sum": [1, 1]}[one.probe.per]
        better, worse = (total / size for total, size in zip(sums, sizes, strict=True))
        return Reading(better - worse, {"better": better, "worse": worse})
    # Of rows none of which begins another: what they stand for cannot happen together, so they add up.
    value = math.fsum(math.exp(total) for total in sums)
    per_token = max(total / number for total, number in zip(sums, tokens, strict=True))
    return Reading(min(value, 1.0), {"log_probability_per_token": per_token})


def as_expected(readings: dict[str, float], probes: Sequence[Probe], step: int | None) -> dict[str, bool]:
    """Of the probes that are judged at this step, whether each is met; one without a reading is not."""
    judged = [probe for probe in probes if probe.is_judged(step)]
    return {probe.name: probe.name in readings and probe.is_met(readings[probe.name]) for probe in judged}


def verdict_line(passed: dict[str, bool], num_probes: int) -> str:
    """For the person watching."""
    failed = [name for name, is_met in passed.items() if not is_met]
    if not passed:
        return f"{num_probes} read, none judged"
    named = f" (not: {', '.join(failed[:5])}{' ...' if len(failed) > 5 else ''})" if failed else ""
    return f"{len(passed) - len(failed)} of {len(passed)} as expected{named}"


def _rows(probe: Probe, tokenizer: Tokenizer, before: tuple[int, ...]) -> tuple[ProbeRow, ...]:
    if isinstance(probe, SentenceProbe):
        return (_row("", probe.text, tokenizer, before),)
    if isinstance(probe, CompareProbe):
        return tuple(_row(probe.prompt, text, tokenizer, before) for text in (probe.better, probe.worse))
    assert isinstance(probe, (CompletionProbe, FormatProbe))
    texts = probe.completion if isinstance(probe, CompletionProbe) else probe.starts_with
    rows = [_row(probe.prompt, text, tokenizer, before) for text in ((texts,) if isinstance(texts, str) else texts)]
    different = {row.ids: row for row in rows}
    # Whoever says one that goes on from another has said that other already.
    return tuple(row for ids, row in different.items() if not any(ids[:end] in different for end in range(len(ids))))


def _row(prompt: str, text: str, tokenizer: Tokenizer, before: tuple[int, ...]) -> ProbeRow:
    prompt_ids = tuple(tokenizer.encode(prompt)) if prompt else ()
    ids = tuple(tokenizer.encode(prompt + text))
    if ids[: len(prompt_ids)] != prompt_ids or len(ids) == len(prompt_ids):
        ids = prompt_ids + _apart(text, tokenizer)
    first, num_bytes = len(before) + len(prompt_ids), len(text.encode())
    if first == 0:
        # The first token's bytes do not count where it does not, or the figures per byte would flatter.
        first, num_bytes = 1, max(1, bytes_after_first(text, ids, tokenizer.decode))
    return ProbeRow(before + ids, first, num_bytes)


def _apart(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens of a text in the middle of another: at a beginning, tokenizers of SentencePiece's kind put a space."""
    for mark in MARKS:
        mark_ids, ids = tokenizer.encode(mark), tokenizer.encode(mark + text)
        is_kept = mark in tokenizer.decode(mark_ids)  # some make a space of a line break, or nothing
        if is_kept and ids[: len(mark_ids)] == mark_ids and len(ids) > len(mark_ids):
            return tuple(ids[len(mark_ids) :])
    return tuple(tokenizer.encode(text))
