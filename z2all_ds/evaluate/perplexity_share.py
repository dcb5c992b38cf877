"""One rank's share of a perplexity measurement: the settings, and the sums over its documents.

`windows.py` defines which tokens count.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from z2all_ds.evaluate.loading import AUTO, LoadedModel
from z2all_ds.evaluate.scoring import score
from z2all_ds.evaluate.texts import TextDomain
from z2all_ds.evaluate.windows import Way, Window, choose_way, document_windows, packed_windows, read_document

DEFAULT_BATCH = 8


@dataclass(frozen=True)
class Question:
    """What to measure; the same for every model and every rank."""

    data: str
    documents: int | None = None
    """Number per domain, 0 for all; None: 50 of a corpus, all of plain files."""
    window: int | None = None
    """None: as long as the model supports."""
    stride: int | None = None
    """Default: window - 1."""
    packed: bool = False
    bos: str = AUTO
    batch: int = DEFAULT_BATCH
    dtype: str = AUTO


@dataclass
class Sums:
    """Sums over documents and over ranks."""

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


@dataclass
class RankAnswer:
    """Results of one rank."""

    label: str
    step: int | None
    way: Way
    sums: dict[str, Sums] = field(default_factory=dict)


def measure_share(
    loaded: LoadedModel,
    domains: list[TextDomain],
    question: Question,
    rank: int,
    ranks: int,
    advance: Callable[[float], None],
) -> RankAnswer:
    """Measure the share of one rank: its documents or, if packed, its windows of the whole sequence."""
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


def _alone(loaded: LoadedModel, domain: TextDomain, way: Way, sums: Sums, rank: int, ranks: int) -> Iterator[Window]:
    for text in domain.read(rank, ranks):
        document = read_document(loaded.tokenizer, text, first_counts=way.bos_id is not None)
        sums.documents += 1
        sums.bytes += document.bytes
        sums.characters += document.characters
        yield from document_windows(document.ids, way)


def _packed(loaded: LoadedModel, domain: TextDomain, way: Way, sums: Sums, rank: int, ranks: int) -> Iterator[Window]:
    """Yield windows: every rank reads all documents, since a window begins where the previous one ends."""

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
