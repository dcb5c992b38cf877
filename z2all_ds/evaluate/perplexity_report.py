"""Perplexities as a table, models side by side, or as JSON."""

import json
from dataclasses import asdict
from typing import TextIO

from z2all_ds.evaluate.perplexity import ModelPerplexity, PerplexityRow
from z2all_ds.evaluate.perplexity_share import Question


def to_json(measured: list[ModelPerplexity], question: Question) -> str:
    content = {"question": asdict(question), "models": [asdict(one) for one in measured]}
    return json.dumps(content, indent=2, ensure_ascii=False)


def render(measured: list[ModelPerplexity], file: TextIO | None = None) -> None:
    """A row per domain and model, the domain's models one below the other; all domains together come last."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in ("domain", *(["model"] if len(measured) > 1 else [])):
        table.add_column(heading, overflow="fold")
    for heading in ("documents", "tokens", "loss", "ppl/token", "ppl/byte", "ppl/char", "bits/byte", "bits/char"):
        table.add_column(heading, justify="right")
    by_domain: dict[str, list[tuple[str, PerplexityRow]]] = {}
    for one in measured:
        for row in one.domains:
            by_domain.setdefault(row.domain, []).append((one.model, row))
    groups = list(by_domain.values())
    if len(groups) > 1:
        groups.append([(one.model, one.all) for one in measured])
    for number, group in enumerate(groups):
        for model, row in group:
            names = [row.domain, model] if len(measured) > 1 else [row.domain]
            # Text, as names may hold what rich reads as markup.
            table.add_row(*map(Text, names), *_figures(row))
        if len(measured) > 1 or number == len(groups) - 2:
            table.add_section()
    # As wide as it needs to be: a figure that is cut off says nothing.
    wide = Console(file=file, highlight=False, width=Console(width=1 << 15).measure(table).maximum)
    wide.print(table)
    for one in measured:
        wide.print(Text(_how(one)), soft_wrap=True)


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
