"""Converts probes to rows of tokens for a model, and the resulting log-probabilities to values.

As in a training document, nothing precedes the first token (a document of a run has no begin-of-text; its
<|endoftext|> is its last token, and predicts nothing). So the first token of a text without a prompt is not counted.
For other models whose tokenizer puts a begin-of-text before every text, it is added here too, and the token is counted.

A prompt and its continuation are tokenized together, as the model has seen such text, unless the boundary falls inside
a token: then separately, the second still as text in the middle of a document. The probability of a text is that of
these tokens; other tokenizations of the same text are left out; `{` and `{"` are different answers if the latter is a
single token, and both can be listed.

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
"""exp(700) is near the largest float."""
MARKS = ("\n", "|", "。")
"""One of these is put before a text that is to be tokenized as in the middle of another: one that does not merge with
the text's first character."""


class Tokenizer(Protocol):
    """The required interface; nothing is added at either end."""

    def encode(self, text: str, /) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True)
class ProbeRow:
    """Tokens, scored from `first_scored` on."""

    ids: tuple[int, ...]
    first_scored: int
    num_bytes: int
    """Bytes of the text of the scored tokens."""


@dataclass(frozen=True)
class EncodedProbe:
    """A probe and its rows of tokens."""

    probe: Probe
    rows: tuple[ProbeRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of its longest row."""
        return max(len(row.ids) for row in self.rows)


@dataclass(frozen=True)
class Reading:
    """The value of a probe for one model."""

    value: float
    details: dict[str, float] = field(default_factory=dict)


def encode_probes(
    probes: Sequence[Probe], tokenizer: Tokenizer, before: Sequence[int], max_tokens: int
) -> list[EncodedProbe]:
    """Return the rows of probes. `before`: ids that begin every text, usually none. Rows over `max_tokens` raise."""
    encoded = [EncodedProbe(probe, _rows(probe, tokenizer, tuple(before))) for probe in probes]
    for one in encoded:
        if one.num_tokens > max_tokens:
            rule = f"has {one.num_tokens} tokens, but a sequence holds {max_tokens}"
            raise DataError(f"probe {one.probe.name}", rule, "Shorten its text.")
        if any(row.first_scored >= len(row.ids) for row in one.rows):
            rule = "has a text of a single token with nothing before it, which cannot be predicted"
            raise DataError(f"probe {one.probe.name}", rule, "Use a longer text, or add a prompt.")
    return encoded


def read_value(one: EncodedProbe, log_probabilities: Sequence[Sequence[float]]) -> Reading:
    """Compute the value from the scored tokens' log-probabilities, row by row."""
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
    # No row is a prefix of another, so the events are disjoint and their probabilities add up.
    value = math.fsum(math.exp(total) for total in sums)
    per_token = max(total / number for total, number in zip(sums, tokens, strict=True))
    return Reading(min(value, 1.0), {"log_probability_per_token": per_token})


def expectations_met(values: dict[str, float], probes: Sequence[Probe], step: int | None) -> dict[str, bool]:
    """Return, for the probes judged at this step, whether each is met; one without a value is not."""
    judged = [probe for probe in probes if probe.is_judged(step)]
    return {probe.name: probe.name in values and probe.is_met(values[probe.name]) for probe in judged}


def summary_line(passed: dict[str, bool], num_probes: int) -> str:
    """Return the summary for the log."""
    failed = [name for name, is_met in passed.items() if not is_met]
    if not passed:
        return f"{num_probes} measured, none judged"
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
    # A text that extends another is already covered by it.
    return tuple(row for ids, row in different.items() if not any(ids[:end] in different for end in range(len(ids))))


def _row(prompt: str, text: str, tokenizer: Tokenizer, before: tuple[int, ...]) -> ProbeRow:
    prompt_ids = tuple(tokenizer.encode(prompt)) if prompt else ()
    ids = tuple(tokenizer.encode(prompt + text))
    if ids[: len(prompt_ids)] != prompt_ids or len(ids) == len(prompt_ids):
        ids = prompt_ids + _encode_inside(text, tokenizer)
    first, num_bytes = len(before) + len(prompt_ids), len(text.encode())
    if first == 0:
        # If the first token is not scored, its bytes do not count, or the figures per byte would be too low.
        first, num_bytes = 1, max(1, bytes_after_first(text, ids, tokenizer.decode))
    return ProbeRow(before + ids, first, num_bytes)


def _encode_inside(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return tokens of a text in the middle of another: at a beginning, SentencePiece-like tokenizers add a space."""
    for mark in MARKS:
        mark_ids, ids = tokenizer.encode(mark), tokenizer.encode(mark + text)
        is_kept = mark in tokenizer.decode(mark_ids)  # some replace or drop a line break
        if is_kept and ids[: len(mark_ids)] == mark_ids and len(ids) > len(mark_ids):
            return tuple(ids[len(mark_ids) :])
    return tuple(tokenizer.encode(text))
