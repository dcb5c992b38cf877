"""Documents as tokens: the interfaces of domains and blocks, raw text that is tokenized when read, the order per lane.

A corpus is either raw shards, tokenized as they are read (`RawDomain`), or token shards (`tokens/`). Both give the same
documents, so the batches are the same too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from z2all_ds.base.errors import DataError
from z2all_ds.corpus.reading.readers import DomainReader, TextBlock
from z2all_ds.data.order import BlockRange, DomainOrder

CHARACTERS_PER_TOKEN = 2
"""Lower estimate, to choose how many short texts to tokenize in one call: each call has a fixed cost, and no more text
should be read ahead than a sample needs."""

TokenArray = npt.NDArray[np.integer[Any]]
"""Tokens of one document with <|endoftext|> last; any integer width, read-only."""


class Tokenizer(Protocol):
    """The part of a tokenizer that this subpackage uses."""

    eot_id: int
    fingerprint: str

    def encode_batch(self, texts: list[str], /) -> list[list[int]]: ...


class DocumentSpan(NamedTuple):
    """Tokens `start` to `end` - 1 of a document, which are part of a sample."""

    epoch: int
    document_index: int
    start: int
    end: int


class TokenRun(NamedTuple):
    """The tokens of consecutive documents, and the end of each document in them."""

    tokens: TokenArray
    ends: list[int]


class Block(Protocol):
    """Adjacent documents of a domain, numbered from 0. Opening one may read all of them."""

    def tokens(self, number: int) -> TokenArray: ...
    def run(self, numbers: list[int], wanted_tokens: int) -> TokenRun:
        """Return the first of these documents, at least one, and about as many as have `wanted_tokens` tokens."""
        ...


class Domain(Protocol):
    """All documents of a domain, numbered across its shards in the order of the manifest."""

    name: str
    num_documents: int
    num_bytes: int
    """Size of the raw shards, also for token shards: shares by size must be the same for both."""
    fingerprint: str
    """Hash of the documents and their order."""

    def open_block(self, first: int, end: int) -> Block:
        """Return the documents `first` to `end` - 1."""
        ...

    def location(self, document_index: int) -> tuple[str, int]:
        """Return the shard of a document, as named in the manifest, and its record number in it, from 0."""
        ...


@dataclass(frozen=True)
class Documents:
    """An open corpus: its domains that have documents, by sorted name."""

    domains: Mapping[str, Domain]
    tokenizer_fingerprint: str


class RawDomain:
    """A domain of raw text, tokenized as it is read."""

    def __init__(self, reader: DomainReader, tokenizer: Tokenizer) -> None:
        self._reader, self._tokenizer = reader, tokenizer
        self.name, self.num_documents = reader.name, reader.num_documents
        self.num_bytes, self.fingerprint = reader.num_bytes, reader.fingerprint

    def open_block(self, first: int, end: int) -> "RawBlock":
        return RawBlock(self._reader.open_block(first, end), self._tokenizer)

    def location(self, document_index: int) -> tuple[str, int]:
        return self._reader.locate(document_index)


class RawBlock:
    """Documents of a raw domain, tokenized on request."""

    def __init__(self, texts: TextBlock, tokenizer: Tokenizer) -> None:
        self._texts, self._tokenizer = texts, tokenizer

    def tokens(self, number: int) -> TokenArray:
        return as_document(self._tokenizer.encode_batch([self._texts.text(number)])[0], self._tokenizer.eot_id)

    def run(self, numbers: list[int], wanted_tokens: int) -> TokenRun:
        texts, size = [], 0
        for number in numbers:
            texts.append(self._texts.text(number))
            size += len(texts[-1])
            if size >= wanted_tokens * CHARACTERS_PER_TOKEN:
                break
        documents = [as_document(ids, self._tokenizer.eot_id) for ids in self._tokenizer.encode_batch(texts)]
        ends = list(accumulate(len(document) for document in documents))
        return TokenRun(documents[0] if len(documents) == 1 else np.concatenate(documents), ends)


def as_document(token_ids: list[int], eot_id: int) -> TokenArray:
    """Return the tokens of a text followed by <|endoftext|>; an empty text is that one token."""
    document = np.empty(len(token_ids) + 1, dtype=np.int32)
    document[:-1] = token_ids
    document[-1] = eot_id
    return document


class LaneDocuments:
    """A cursor over the documents of one domain in the order in which one lane reads them.

    `block` counts the blocks of the lane, `position` the documents within the block.
    """

    def __init__(
        self, domain: Domain, order: DomainOrder, lane: int, num_lanes: int, block: int, position: int
    ) -> None:
        self._domain, self._order, self._lane, self._num_lanes = domain, order, lane, num_lanes
        self._opened: Block | None = None
        self._range: BlockRange
        self._shuffled: list[int]
        self._enter_block(block)
        self.position = position
        if not 0 <= position < len(self._shuffled):
            raise DataError(
                f"data state: position {position} in a block of domain {domain.name!r}",
                f"the block has {len(self._shuffled)} documents",
                "The state belongs to another corpus: restore the corpus it was saved with.",
            )

    @property
    def document_index(self) -> int:
        return self._range.first + self._shuffled[self.position]

    def tokens(self) -> TokenArray:
        """Return the tokens of the current document."""
        return self._open_block().tokens(self._shuffled[self.position])

    def run(self, wanted_tokens: int) -> TokenRun:
        """Return the current document and possibly some that follow it in the same block."""
        return self._open_block().run(self._shuffled[self.position :], wanted_tokens)

    def advance(self, documents: int = 1) -> None:
        """Move on by `documents`, at most to the start of the next block."""
        self.position += documents
        if self.position == len(self._shuffled):
            self._enter_block(self.block + 1)

    def span(self, ahead: int, start: int, end: int) -> DocumentSpan:
        """Return a span of the document that is `ahead` positions after the current one in the block."""
        document_index = self._range.first + self._shuffled[self.position + ahead]
        return DocumentSpan(self._range.epoch, document_index, start, end)

    def _open_block(self) -> Block:
        if self._opened is None:
            self._opened = self._domain.open_block(self._range.first, self._range.end)
        return self._opened

    def _enter_block(self, block: int) -> None:
        self.block, self.position, self._opened = block, 0, None
        self._range = self._order.block_at(self._lane + block * self._num_lanes)
        self._shuffled = self._order.within(self._range)
