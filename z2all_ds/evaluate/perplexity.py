"""Perplexity of models on texts, per domain and over all: by token, byte and character.

What counts and what does not is said in `windows.py`. Tokens of different tokenizers are different things: models that
do not share one are compared by bits per byte.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from z2all_ds.console import progress
from z2all_ds.errors import ConfigError
from z2all_ds.evaluate.loading import AUTO, LoadedModel, load_model
from z2all_ds.evaluate.scoring import score
from z2all_ds.evaluate.texts import Domain, open_texts
from z2all_ds.evaluate.windows import Way, Window, choose_way, document_windows, packed_windows, read_document

DEFAULT_BATCH = 8


@dataclass(frozen=True)
class Question:
    """What to measure; the same for every model and every rank."""

    data: str
    documents: int | None = None
    """Per domain, 0 for all; None: 50 of a corpus, all of plain files."""
    window: int | None = None
    """None: as long as the model allows."""
    stride: int | None = None
    """None: window - 1."""
    packed: bool = False
    bos: str = AUTO
    batch: int = DEFAULT_BATCH
    dtype: str = AUTO


@dataclass
class Sums:
    """What is added up, over documents and over ranks."""

    documents: int = 0
    tokens: int = 0
    nats: float = 0.0
    bytes: int = 0
    characters: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.nats + other.nats,
            self.bytes + other.bytes,
            self.characters + other.characters,
        )


@dataclass(frozen=True)
class PerplexityRow:
    """One domain's figures, or those of all. None where there is nothing to divide by, or no finite figure."""

    domain: str
    documents: int
    tokens: int
    """Predicted ones."""
    bytes: int
    """Of the predicted text, in UTF-8."""
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
    """One model's figures."""

    model: str
    step: int | None
    window: int
    stride: int | None
    """None where windows are packed."""
    bos: bool
    domains: list[PerplexityRow]
    all: PerplexityRow


@dataclass
class RankAnswer:
    """What one rank has found."""

    label: str
    step: int | None
    way: Way
    sums: dict[str, Sums] = field(default_factory=dict)


def measure_perplexity(models: Iterable[str | Path], question: Question, ranks: int = 1) -> list[ModelPerplexity]:
    """One model after the other."""
    for name, value in (("batch", question.batch), ("ranks", ranks)):
        if value < 1:
            raise ConfigError(f"{name}={value}", "must be at least 1", "Give a larger number.")
    return [_of_model(str(model), question, ranks) for model in models]


def _of_model(model: str, question: Question, ranks: int) -> ModelPerplexity:
    from z2all_ds.evaluate.perplexity_ranks import in_ranks

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


def measure_share(
    loaded: LoadedModel,
    domains: list[Domain],
    question: Question,
    rank: int,
    ranks: int,
    advance: Callable[[float], None],
) -> RankAnswer:
    """What belongs to one rank: its documents, or, where they are packed, its windows of the whole row."""
    way = choose_way(
        loaded.tokenizer, loaded.known_max_tokens, question.window, question.stride, question.packed, question.bos
    )
    answer = RankAnswer(loaded.label, loaded.step, way)
    for domain in domains:
        sums = answer.sums[domain.name] = Sums()
        windows = (_packed if way.packed else _alone)(loaded, domain, way, sums, rank, ranks)
        told = 0
        for tokens, nats in score(loaded, windows, question.batch):
            sums.tokens += tokens
            sums.nats += nats
            advance(sums.documents - told)
            told = sums.documents
        advance(sums.documents - told)
    return answer


def _alone(loaded: LoadedModel, domain: Domain, way: Way, sums: Sums, rank: int, ranks: int) -> Iterator[Window]:
    for text in domain.read(rank, ranks):
        document = read_document(loaded.tokenizer, text, first_counts=way.bos_id is not None)
        sums.documents += 1
        sums.bytes += document.bytes
        sums.characters += document.characters
        yield from document_windows(document.ids, way)


def _packed(loaded: LoadedModel, domain: Domain, way: Way, sums: Sums, rank: int, ranks: int) -> Iterator[Window]:
    """Every rank reads all documents, as a window begins where the one before ends, and counts only its own."""

    def documents() -> Iterator[list[int]]:
        for number, text in enumerate(domain.read(0, 1)):
            document = read_document(loaded.tokenizer, text, first_counts=number > 0 or way.bos_id is not None)
            if number % ranks == rank:
                sums.documents += 1
                sums.bytes += document.bytes
                sums.characters += document.characters
            yield document.ids

    for number, window in enumerate(packed_windows(documents(), way)):
        if number % ranks == rank:
            yield window


def _ratio(nats: float, count: int) -> float | None:
    return nats / count if count and math.isfinite(nats) else None


def _exp(nats: float | None) -> float | None:
    """None where it is beyond what a float can say."""
    return None if nats is None or nats > math.log(1e300) else math.exp(nats)
