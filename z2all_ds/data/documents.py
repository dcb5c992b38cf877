"""What lanes read: a domain as one row of documents, opened in blocks of neighbours, each document as tokens.

Two kinds of corpus give this: raw shards, whose text is tokenized as it is read (`RawDomain`), and token shards
(`tokens/`). Lanes cannot tell them apart, so neither can a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from z2all_ds.corpus.reading.readers import DomainReader, TextBlock

CHARACTERS_PER_TOKEN = 2
"""At the least, for guessing how many short texts to tokenize together: a call of the tokenizer has a price of its own,
and no more should be read ahead than a sample takes."""

TokenArray = npt.NDArray[np.integer[Any]]
"""Tokens of one document, of any width of integer, <|endoftext|> last. Not to be written to."""


class Tokenizer(Protocol):
    """What this subpackage needs of a tokenizer."""

    @property
    def eot_id(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: list[str], /) -> list[list[int]]: ...


class DocumentLocation(NamedTuple):
    """Where a document lies."""

    shard: str
    """As the manifest names it."""
    record: int
    """Number within the shard, from 0."""


class Run(NamedTuple):
    """Some documents end to end."""

    tokens: TokenArray
    ends: list[int]
    """Where each document ends in it."""


class Block(Protocol):
    """Some neighbouring documents of a domain, numbered from 0. Opening one may read ahead what all of them need."""

    def tokens(self, number: int) -> TokenArray: ...
    def run(self, numbers: list[int], wanted_tokens: int) -> Run:
        """The first of these documents, in this order: at least one, and about as many as make so many tokens, or
        those that come at little cost."""
        ...


class Domain(Protocol):
    """All documents of a domain, numbered through its shards in the order of the manifest."""

    @property
    def name(self) -> str: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def num_bytes(self) -> int:
        """Of the raw shards, also where their tokens are read: shares by size must not depend on it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of the documents and their order."""
        ...

    def open_block(self, first: int, end: int) -> Block:
        """The documents `first` to `end` - 1."""
        ...

    def place(self, document_index: int) -> DocumentLocation: ...


@dataclass(frozen=True)
class Documents:
    """An opened corpus: its domains that have documents, by sorted name."""

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

    def place(self, document_index: int) -> DocumentLocation:
        return DocumentLocation(*self._reader.locate(document_index))


class RawBlock:
    """Documents of a raw domain. The text stays where it is until it is asked for."""

    def __init__(self, texts: TextBlock, tokenizer: Tokenizer) -> None:
        self._texts, self._tokenizer = texts, tokenizer

    def tokens(self, number: int) -> TokenArray:
        # One document at a time: a lane holds what it is in the middle of, and no more.
        return as_document(self._tokenizer.encode_batch([self._texts.text(number)])[0], self._tokenizer.eot_id)

    def run(self, numbers: list[int], wanted_tokens: int) -> Run:
        texts, size = [], 0
        for number in numbers:
            texts.append(self._texts.text(number))
            size += len(texts[-1])
            if size >= wanted_tokens * CHARACTERS_PER_TOKEN:
                break
        documents = [as_document(ids, self._tokenizer.eot_id) for ids in self._tokenizer.encode_batch(texts)]
        ends = list(accumulate(len(document) for document in documents))
        return Run(documents[0] if len(documents) == 1 else np.concatenate(documents), ends)


def as_document(token_ids: list[int], eot_id: int) -> TokenArray:
    """A tokenized text and its <|endoftext|>. An empty text is that one token: it was read, and it is counted."""
    document = np.empty(len(token_ids) + 1, dtype=np.int32)
    document[:-1] = token_ids
    document[-1] = eot_id
    return document
