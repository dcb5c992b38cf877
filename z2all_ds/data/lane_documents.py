"""The documents of one domain in the order in which one lane reads them."""

from typing import NamedTuple

from z2all_ds.base.errors import DataError
from z2all_ds.data.documents import Block, Domain, Run, TokenArray
from z2all_ds.data.order import BlockPlace, DomainOrder


class DocumentSpan(NamedTuple):
    """Which tokens of which document went into a sample."""

    epoch: int
    document_index: int
    start: int
    end: int


class LaneDocuments:
    """The documents of one domain in the order in which one lane reads them."""

    def __init__(self, domain: Domain, order: DomainOrder, lane: int, num_lanes: int, block: int, place: int) -> None:
        self._domain, self._order, self._lane, self._num_lanes = domain, order, lane, num_lanes
        self._opened: Block | None = None
        self.block, self.place = block, place
        self._seek_block(block)
        if not 0 <= place < len(self._within):
            raise DataError(
                f"data state: place {place} in a block of domain {domain.name!r}",
                f"that block has {len(self._within)} documents",
                "The state does not belong to this corpus: restore the one it was made with.",
            )

    @property
    def document_index(self) -> int:
        return self._place_of_block.first + self._within[self.place]

    def tokens(self) -> TokenArray:
        """Of the document the row stands at."""
        return self._open_block().tokens(self._within[self.place])

    def run(self, wanted_tokens: int) -> Run:
        """The document the row stands at, and perhaps some that follow it, all of one block."""
        return self._open_block().run(self._within[self.place :], wanted_tokens)

    def advance(self, documents: int = 1) -> None:
        """Goes on by so many, not beyond the beginning of the next block."""
        self.place += documents
        if self.place == len(self._within):
            self._seek_block(self.block + 1)
            self.place = 0

    def piece(self, ahead: int, start: int, end: int) -> DocumentSpan:
        """Tokens of the document so many places ahead in the block."""
        return DocumentSpan(self.epoch, self._place_of_block.first + self._within[self.place + ahead], start, end)

    def _open_block(self) -> Block:
        if self._opened is None:
            self._opened = self._domain.open_block(self._place_of_block.first, self._place_of_block.end)
        return self._opened

    def _seek_block(self, block: int) -> None:
        self.block, self._opened = block, None
        self._place_of_block: BlockPlace = self._order.block_at(self._lane + block * self._num_lanes)
        self.epoch = self._place_of_block.epoch
        self._within = self._order.within(self._place_of_block)
