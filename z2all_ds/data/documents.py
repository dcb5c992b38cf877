"""Documents as tokens: the interfaces of domains and blocks, raw text that is tokenized when read, the order per lane.

A corpus is either raw shards, tokenized as they are read (`RawDomain`), or token shards (`tokens/`). Both give the same
documents; `data_plan` chooses their order.
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
from z2all_ds.data.token_counts import Beat, token_counts

CHARACTERS_PER_TOKEN = 2
"""Lower estimate, to choose how many short texts to tokenize in one call: each call has a fixed cost, and no more text
should be read ahead than a sample needs."""

TokenArray = npt.NDArray[np.integer[Any]]
"""Tokens of one document with <|endoftext|> last; any integer width, read-only."""


class Tokenizer(Protocol):
    """The part of a tokenizer that this subpackage uses."""

    eot_id: int
    fingerprint: str

    @property
    def model_token_ids(self) -> Mapping[str, int | None]: ...
    @property
    def begins_texts(self) -> bool: ...
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
    begin: int = 0
    """Tokens of the first document that are the part of another lane."""


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
    """Size of the raw shards, also for token shards: the order must be the same for both."""
    text_bytes: int | None
    """UTF-8 bytes of the texts, if known."""
    num_tokens: int | None
    """Known for token shards."""
    fingerprint: str
    """Hash of the documents and their order."""
    has_sizes: bool
    """Whether `document_sizes` can be called; False for token shards of earlier versions."""

    def open_block(self, first: int, end: int) -> Block:
        """Return the documents `first` to `end` - 1."""
        ...

    def location(self, document_index: int) -> tuple[str, int]:
        """Return the shard of a document, as named in the manifest, and its record number in it, from 0."""
        ...

    def document_sizes(self) -> npt.NDArray[np.integer[Any]]:
        """Return the size in bytes of each raw document, the same for text and for its tokens."""
        ...

    def token_counts(self, beat: Beat = ...) -> npt.NDArray[np.integer[Any]]:
        """Return the tokens of each document, with its <|endoftext|>; text is tokenized for it."""
        ...


@dataclass(frozen=True)
class Documents:
    """An open corpus: its domains that have documents, by sorted name."""

    domains: Mapping[str, Domain]
    tokenizer_fingerprint: str


def mixture_sizes(domains: Mapping[str, Domain]) -> dict[str, int]:
    """Return the sizes that decide shares by size: tokens if they are known, else bytes of text, else of the shards."""
    for unit in ("num_tokens", "text_bytes"):
        sizes = {name: getattr(domain, unit) for name, domain in domains.items()}
        if None not in sizes.values():
            return sizes
    return {name: domain.num_bytes for name, domain in domains.items()}


class RawDomain:
    """A domain of raw text, tokenized as it is read."""

    has_sizes = True

    def __init__(self, reader: DomainReader, tokenizer: Tokenizer) -> None:
        self._reader, self._tokenizer = reader, tokenizer
        self.name, self.num_documents = reader.name, reader.num_documents
        self.num_bytes, self.fingerprint = reader.num_bytes, reader.fingerprint
        self.text_bytes = reader.text_bytes
        self.num_tokens: int | None = None

    def open_block(self, first: int, end: int) -> "RawBlock":
        return RawBlock(self._reader.open_block(first, end), self._tokenizer)

    def location(self, document_index: int) -> tuple[str, int]:
        return self._reader.locate(document_index)

    def document_sizes(self) -> npt.NDArray[np.integer[Any]]:
        return self._reader.document_sizes()

    def token_counts(self, beat: Beat = lambda: None) -> npt.NDArray[np.integer[Any]]:
        return token_counts(self._reader, self._tokenizer.encode_batch, self._tokenizer.fingerprint, beat)


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


def with_begin(run: TokenRun, begin_id: int) -> TokenRun:
    """Return the run with `begin_id` before each document."""
    starts = [0, *run.ends[:-1]]
    tokens = np.insert(run.tokens.astype(np.int32, copy=False), starts, begin_id)
    return TokenRun(tokens, [end + number for number, end in enumerate(run.ends, 1)])


def changed_document(document_index: int, num_tokens: int) -> DataError:
    """Return the error for a document that has fewer tokens than it had."""
    return DataError(
        f"document {document_index}",
        f"it had more than {num_tokens} tokens and now has fewer",
        "The text or the tokenizer changed but kept its fingerprint: restore it.",
    )


class LaneDocuments:
    """A cursor over the documents of one domain in the order in which one lane reads them.

    `block` is the number of the block (`order`), `position` counts the documents within it. With `begin_id`, this token
    is put before every document.
    """

    def __init__(
        self, domain: Domain, order: DomainOrder, lane: int, block: int, position: int, begin_id: int | None = None
    ) -> None:
        self._domain, self._order, self._lane, self._begin_id = domain, order, lane, begin_id
        self._opened: Block | None = None
        self._range: BlockRange
        self._shuffled: list[int]
        self._begin, self._end, self._begins_part = 0, 0, False
        self._enter_block(block, position)
        if not 0 <= self.position < len(self._shuffled):
            raise DataError(
                f"data state: position {position} in a block of domain {domain.name!r}",
                f"the block has {len(self._shuffled)} documents",
                "The state belongs to another corpus: restore the corpus it was saved with.",
            )

    @property
    def document_index(self) -> int:
        return self._range.first + self._shuffled[self.position]

    @property
    def begins_part(self) -> bool:
        """Whether the current document is the first of the lane's part of an epoch."""
        return self._begins_part and self.position == self._first_position

    @property
    def left_in_part(self) -> int:
        """Size of the lane's part of an epoch from the current document on; 0 if unknown or at its beginning."""
        return 0 if self.begins_part else self._order.left_in_part(self._lane, self.block, self.position)

    def tokens(self) -> TokenArray:
        """Return the tokens of the current document."""
        tokens = self._open_block().tokens(self._shuffled[self.position])
        return tokens if self._begin_id is None else with_begin(TokenRun(tokens, [len(tokens)]), self._begin_id).tokens

    def part(self, num_tokens: int, ahead: int = 0) -> tuple[int, int]:
        """Return the tokens [first, end) that this lane reads of the document that is `ahead` positions after the
        current one in the block, and has `num_tokens`."""
        position = self.position + ahead
        document = self._range.first + self._shuffled[position]
        begin = self._begin if position == self._first_position else 0
        end = self._end if position == len(self._shuffled) - 1 else 0
        first, end = self._order.part(document, begin, end, num_tokens)
        if not first <= end <= num_tokens:
            raise changed_document(document, max(first, end - 1))
        return first, end

    def run(self, wanted_tokens: int) -> TokenRun:
        """Return the current document and possibly some that follow it in the same block."""
        run = self._open_block().run(self._shuffled[self.position :], wanted_tokens)
        if self._begin_id is not None:
            run = with_begin(run, self._begin_id)
        begin = self.part(run.ends[0])[0]
        before, last = len(run.ends) > 1 and run.ends[-2], len(run.ends) - 1
        end = before + self.part(run.ends[-1] - before, last)[1]
        return TokenRun(run.tokens[:end], [*run.ends[:-1], end], begin)

    def advance(self, documents: int = 1) -> None:
        """Move on by `documents`, at most to the start of the next block."""
        self.position += documents
        if self.position == len(self._shuffled):
            self._enter_block(self.block + 1, 0)

    def span(self, ahead: int, start: int, end: int) -> DocumentSpan:
        """Return a span of the document that is `ahead` positions after the current one in the block."""
        document_index = self._range.first + self._shuffled[self.position + ahead]
        return DocumentSpan(self._range.epoch, document_index, start, end)

    def _open_block(self) -> Block:
        if self._opened is None:
            self._opened = self._domain.open_block(self._range.first, self._range.end)
        return self._opened

    def _enter_block(self, block: int, position: int) -> None:
        self._opened = None
        found = self._order.lane_block(self._lane, block, position)
        self.block, self.position, self._range, self._shuffled, self._begin, self._end, self._begins_part = found
        self._first_position = self.position
