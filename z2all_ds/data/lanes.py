"""A lane: one endless, deterministic row of samples, with a cursor of a few integers for each domain.

The number of lanes is fixed for the life of a run and has nothing to do with the number of ranks. Lane l of L owns
the blocks l, l + L, l + 2L, ... of every domain's endless sequence (`order`), so the lanes share out each epoch with no
document twice and none left. Lanes do not wait for each other: one may be in the next epoch of a domain while another
still reads the last blocks of this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from z2all_ds.data.documents import Domain
from z2all_ds.data.lane_documents import LaneDocuments
from z2all_ds.data.order import DomainOrder
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
