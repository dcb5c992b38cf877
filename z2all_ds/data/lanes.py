"""A lane: one endless, deterministic row of documents cut into samples, with a cursor of a few integers.

The number of lanes is fixed for the life of a run and has nothing to do with the number of ranks. What a lane gives
is a pure function of (corpus, tokenizer, shares, seed, lane, number of lanes); its state says only how far it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

from z2all_ds.data.mixture import lane_head_starts, mean_tokens_guess, next_domain
from z2all_ds.data.order import document_at, lane_position
from z2all_ds.data.packing import Int64Array, Piece, Sample, as_document, pack_sample
from z2all_ds.data.readers import DomainReader
from z2all_ds.errors import DataError


class Tokenizer(Protocol):
    """What the data room asks of a tokenizer."""

    @property
    def eot_id(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: list[str], /) -> list[list[int]]: ...


class LaneState(TypedDict):
    """How far a lane is. Lists run over the domains in the order of the stream."""

    drawn: list[int]
    """Documents begun, of each domain."""
    taken: list[int]
    """Tokens given out, of each domain, since the mixture last changed."""
    current: list[int] | None
    """The document that goes on in the next sample: [domain index, global position, tokens given out]."""


@dataclass(frozen=True)
class Sources:
    """What all lanes of a stream share."""

    domains: Sequence[DomainReader]
    shares: Sequence[float]
    tokenizer: Tokenizer
    seed: int
    num_lanes: int


@dataclass
class _OpenDocument:
    domain_index: int
    global_position: int
    tokens: Int64Array
    offset: int


def fresh_lane_state(num_domains: int) -> LaneState:
    return {"drawn": [0] * num_domains, "taken": [0] * num_domains, "current": None}


class Lane:
    """Gives the samples of one lane from `state` on."""

    def __init__(self, sources: Sources, lane: int, state: LaneState) -> None:
        self._sources = sources
        self._lane = lane
        self._drawn = list(state["drawn"])
        self._taken = list(state["taken"])
        self._resume_at = state["current"]
        self._document: _OpenDocument | None = None
        self._head_start = lane_head_starts(
            lane,
            sources.num_lanes,
            sources.seed,
            [domain.name for domain in sources.domains],
            [mean_tokens_guess(domain.num_bytes, domain.num_documents) for domain in sources.domains],
        )

    def state(self) -> LaneState:
        """The cursor after the last sample given; a copy."""
        current = list(self._resume_at) if self._resume_at is not None else None
        if self._document is not None:
            current = [self._document.domain_index, self._document.global_position, self._document.offset]
        return {"drawn": list(self._drawn), "taken": list(self._taken), "current": current}

    def next_sample(self, sequence_length: int) -> Sample:
        pieces: list[Piece] = []
        missing = sequence_length
        while missing:
            document = self._document or self._open_document()
            end = min(document.offset + missing, len(document.tokens))
            pieces.append(Piece(document.tokens, document.offset, end, document.domain_index))
            self._taken[document.domain_index] += end - document.offset
            missing -= end - document.offset
            document.offset = end
            self._document = document if end < len(document.tokens) else None
        return pack_sample(pieces, sequence_length)

    def _open_document(self) -> _OpenDocument:
        """The rest of the document the state stopped in, else the first of the domain most behind its share."""
        if self._resume_at is not None:
            domain_index, global_position, offset = self._resume_at
            tokens = self._tokenize(domain_index, global_position)
            if offset >= len(tokens):
                raise DataError(
                    f"domain {self._sources.domains[domain_index].name!r}, document at position {global_position}",
                    f"the state stopped after {offset} of its tokens and it has {len(tokens)}",
                    "The text or the tokenizer changed under an old fingerprint: restore them.",
                )
            self._resume_at = None
            return _OpenDocument(domain_index, global_position, tokens, offset)
        domain_index = next_domain(self._sources.shares, self._taken, self._head_start)
        global_position = lane_position(self._lane, self._sources.num_lanes, self._drawn[domain_index])
        tokens = self._tokenize(domain_index, global_position)
        self._drawn[domain_index] += 1
        return _OpenDocument(domain_index, global_position, tokens, 0)

    def _tokenize(self, domain_index: int, global_position: int) -> Int64Array:
        # One document at a time: the next domain is known only when this document's length is.
        domain = self._sources.domains[domain_index]
        place = document_at(global_position, domain.num_documents, self._sources.seed, domain.name)
        tokenizer = self._sources.tokenizer
        return as_document(tokenizer.encode_batch([domain.read(place.document_index)])[0], tokenizer.eot_id)


def carry_over(
    state: LaneState, old_domains: Sequence[str], new_domains: Sequence[str], corpus_changed: bool
) -> LaneState:
    """A lane's state for another mixture or corpus.

    Each domain goes on after the documents already drawn. Token counts start again, or the lane would read nothing
    but a new or lifted domain until that had caught up with all tokens of the past. In a changed corpus another
    document may stand where the last one was, so its rest is given up.
    """
    drawn: Mapping[str, int] = dict(zip(old_domains, state["drawn"], strict=True))
    current = state["current"]
    if current is not None:
        name = old_domains[current[0]]
        current = [new_domains.index(name), *current[1:]] if name in new_domains and not corpus_changed else None
    return {"drawn": [drawn.get(name, 0) for name in new_domains], "taken": [0] * len(new_domains), "current": current}
