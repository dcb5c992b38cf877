"""A lane: one endless, deterministic row of samples, with a cursor of a few integers for each domain.

The number of lanes is fixed for the life of a run and has nothing to do with the number of ranks. Lane l of L owns
the blocks l, l + L, l + 2L, ... of every domain's endless sequence (`order`), so the lanes share out each epoch with no
document twice and none left. Lanes do not wait for each other: one may be in the next epoch of a domain while another
still reads the last blocks of this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from z2all_ds.base.errors import DataError
from z2all_ds.data.documents import Block, Domain, Run, TokenArray
from z2all_ds.data.order import BlockPlace, DomainOrder
from z2all_ds.data.packing import BestFitPacker, Cursor, CutPacker, DocumentSpan, Sample
from z2all_ds.data.stages import Stage

LaneState = list[Cursor]
"""The cursors of a lane, in the order of the stream's domains."""


@dataclass(frozen=True)
class Sources:
    """What all lanes of a stream share."""

    domains: Sequence[Domain]
    orders: Sequence[DomainOrder]
    num_lanes: int
    packing: str


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


class Lane:
    """Makes the samples of one lane from `state` on."""

    def __init__(self, sources: Sources, lane: int, state: LaneState) -> None:
        self._sources, self.number = sources, lane
        self._cursors = [list(cursor) for cursor in state]
        self._packers: dict[int, CutPacker | BestFitPacker] = {}

    def next_sample(self, sample: int, stage: Stage, pieces: list[DocumentSpan] | None = None) -> Sample:
        """Returns global sample `sample`; samples are asked for in order. Adds the spans it is made of to `pieces`."""
        domain_index = stage.mixture.domain_of(sample)
        packer = self._packers.get(domain_index)
        if packer is None:
            sources, cursor = self._sources, self._cursors[domain_index]
            domain, order = sources.domains[domain_index], sources.orders[domain_index]
            row = LaneDocuments(domain, order, self.number, sources.num_lanes, cursor[0], cursor[1])
            kind = CutPacker if sources.packing == "cut" else BestFitPacker
            packer = self._packers[domain_index] = kind(row, domain_index, cursor)
        made = packer.next_sample(stage.sequence_length, pieces)
        self._cursors[domain_index] = packer.cursor()
        return made

    def cursor(self, domain_index: int) -> Cursor:
        return self._cursors[domain_index]
