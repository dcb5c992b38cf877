"""Perplexity of models on texts, per domain and over all: by token, byte and character.

`windows.py` defines which tokens count. Tokens of different tokenizers are not comparable: models that do not share one
are compared by bits per byte.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError
from z2all_ds.evaluate.loading import load_model
from z2all_ds.evaluate.perplexity_ranks import in_ranks
from z2all_ds.evaluate.perplexity_share import Question, Sums, measure_share
from z2all_ds.evaluate.texts import open_texts


@dataclass(frozen=True)
class PerplexityRow:
    """Figures of one domain, or of all. None if there is nothing to divide by, or no finite value."""

    domain: str
    documents: int
    tokens: int
    """Predicted tokens."""
    bytes: int
    """UTF-8 bytes of the predicted text."""
    characters: int
    loss: float | None
    """Nats per token."""
    perplexity: float | None
    perplexity_per_byte: float | None
    perplexity_per_character: float | None
    bits_per_byte: float | None
    bits_per_character: float | None

    @classmethod
    def of(cls, domain: str, sums: Sums) -> "PerplexityRow":
        loss, per_byte, per_character = (
            _ratio(sums.nats, count) for count in (sums.tokens, sums.bytes, sums.characters)
        )
        return cls(
            domain,
            sums.documents,
            sums.tokens,
            sums.bytes,
            sums.characters,
            loss,
            _exp(loss),
            _exp(per_byte),
            _exp(per_character),
            None if per_byte is None else per_byte / math.log(2),
            None if per_character is None else per_character / math.log(2),
        )


@dataclass(frozen=True)
class ModelPerplexity:
    """Figures of one model."""

    model: str
    step: int | None
    window: int
    stride: int | None
    """None for packed windows."""
    bos: bool
    domains: list[PerplexityRow]
    all: PerplexityRow


def measure_perplexity(models: Iterable[str | Path], question: Question, ranks: int = 1) -> list[ModelPerplexity]:
    """Measure the models one after the other."""
    for name, value in (("batch", question.batch), ("ranks", ranks)):
        if value < 1:
            raise ConfigError(f"{name}={value}", "must be at least 1", "Use a larger number.")
    return [_of_model(str(model), question, ranks) for model in models]


def _of_model(model: str, question: Question, ranks: int) -> ModelPerplexity:
    domains = open_texts(question.data, question.documents)
    counts = [domain.num_documents for domain in domains]
    total = None if None in counts else sum(count or 0 for count in counts)
    if ranks == 1:
        loaded = load_model(model, question.dtype)
        with progress("perplexity", total, "documents") as advance:
            answers = [measure_share(loaded, domains, question, 0, 1, advance)]
        del loaded
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for the next model
    else:
        with progress("perplexity", total, "documents") as advance:
            answers = in_ranks(model, question, ranks, advance)
    sums = {domain.name: sum((one.sums[domain.name] for one in answers), Sums()) for domain in domains}
    first = answers[0]
    return ModelPerplexity(
        first.label,
        first.step,
        first.way.window,
        None if first.way.packed else first.way.stride,
        first.way.bos_id is not None,
        [PerplexityRow.of(name, of_domain) for name, of_domain in sums.items()],
        PerplexityRow.of("all", sum(sums.values(), Sums())),
    )


def _ratio(nats: float, count: int) -> float | None:
    return nats / count if count and math.isfinite(nats) else None


def _exp(nats: float | None) -> float | None:
    """Return exp(nats); None if a float cannot represent it."""
    return None if nats is None or nats > math.log(1e300) else math.exp(nats)
