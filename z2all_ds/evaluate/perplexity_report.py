"""Perplexities as a table, models side by side, and for JSON."""

from typing import Any

from z2all_ds.base.reports import Shown, Table
from z2all_ds.evaluate.perplexity import ModelPerplexity, PerplexityRow
from z2all_ds.evaluate.perplexity_share import Question

FIGURES = ("documents", "tokens", "loss", "ppl/token", "ppl/byte", "ppl/char", "bits/byte", "bits/char")


def content_of(measured: list[ModelPerplexity], question: Question) -> dict[str, Any]:
    """Returns what was asked and what was measured, for JSON."""
    return {"question": question, "models": measured}


def describe(measured: list[ModelPerplexity]) -> Shown:
    """Yields a table, a row per domain and model, all domains together last, and a line about each model."""
    several = len(measured) > 1
    by_domain: dict[str, list[tuple[str, PerplexityRow]]] = {}
    for one in measured:
        for row in one.domains:
            by_domain.setdefault(row.domain, []).append((one.model, row))
    groups = list(by_domain.values())
    if len(groups) > 1:
        groups.append([(one.model, one.all) for one in measured])
    rows = []
    for group in groups:
        rows += [[row.domain, *([model] if several else []), *_figures(row)] for model, row in group]
    yield Table(("domain", *(["model"] if several else []), *FIGURES), rows, "llr" if several else "lr")
    yield from map(_how, measured)


def _figures(row: PerplexityRow) -> list[str]:
    shown = (
        (row.loss, 4),
        (row.perplexity, 2),
        (row.perplexity_per_byte, 3),
        (row.perplexity_per_character, 3),
        (row.bits_per_byte, 4),
        (row.bits_per_character, 4),
    )
    return [f"{row.documents:,}", f"{row.tokens:,}", *(_figure(value, digits) for value, digits in shown)]


def _figure(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.3g}"


def _how(one: ModelPerplexity) -> str:
    """What the figures stand on: two that were measured in different ways are not to be compared."""
    way = f"packed in windows of {one.window}" if one.stride is None else f"windows of {one.window}"
    if one.stride is not None:
        way += f", at least {_tokens(one.window - one.stride)} before each where the document has them"
    first = "begin-of-text before each document" if one.bos else "without the first token, which nothing precedes"
    return f"{one.model}: {way}; {first}"


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"
