"""Which documents a global sample was made of: after a loss spike, the first question.

A sample is reached from the nearest saved state before it (or from the beginning) by going through the samples that its
own lane took of its own domain; no other lane and no other domain is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from z2all_ds.base.errors import ConfigError
from z2all_ds.data.data_plan import DataPlan
from z2all_ds.data.documents import DocumentLocation
from z2all_ds.data.lanes import Lane
from z2all_ds.data.packing import DocumentSpan
from z2all_ds.data.state import StreamState


@dataclass(frozen=True)
class TracedPiece:
    """Tokens `start` to `end` of one document."""

    place: DocumentLocation
    document_index: int
    """Within its domain."""
    epoch: int
    start: int
    end: int


@dataclass(frozen=True)
class SampleTrace:
    """Where a sample came from."""

    sample: int
    lane: int
    stage: str
    domain: str
    skipped: bool
    """It is made, but not given out."""
    from_sample: int
    """Number of the sample that the nearest state stood at."""
    pieces: list[TracedPiece]
    token_ids: list[int]


def trace_sample(
    plan: DataPlan,
    sample: int,
    states: Sequence[StreamState] = (),
    advance: Callable[[int], None] = lambda samples: None,
) -> SampleTrace:
    """Traces global sample `sample`; `advance` is told of the samples gone through (see `samples_to_go`)."""
    if sample < 0:
        raise ConfigError(f"sample {sample}", "samples are numbered from 0", "Give a number from 0 on.")
    lane_number = sample % plan.spec.num_lanes
    begin, plan, state = _nearest(plan, sample, lane_number, states)
    domain_index = plan.schedule.stage_of(sample).mixture.domain_of(sample)
    lane = Lane(plan.sources, lane_number, state)
    first = begin + (lane_number - begin) % plan.spec.num_lanes  # the lane's first sample from there on
    for number in range(first, sample, plan.spec.num_lanes):
        stage = plan.schedule.stage_of(number)
        if stage.mixture.domain_of(number) == domain_index:
            lane.next_sample(number, stage)
        advance(plan.spec.num_lanes)
    stage = plan.schedule.stage_of(sample)
    pieces: list[DocumentSpan] = []
    made = lane.next_sample(sample, stage, pieces)
    domain = plan.sources.domains[domain_index]
    return SampleTrace(
        sample,
        lane_number,
        stage.name,
        domain.name,
        plan.schedule.is_skipped(sample),
        begin,
        [
            TracedPiece(domain.place(piece.document_index), piece.document_index, piece.epoch, piece.start, piece.end)
            for piece in pieces
        ],
        made.tokens[: stage.sequence_length - made.num_padding].tolist(),
    )


def _nearest(
    plan: DataPlan, sample: int, lane: int, states: Sequence[StreamState]
) -> tuple[int, DataPlan, list[list[int]]]:
    """Position, plan and cursors of the lane at the last state that is not after the sample."""
    before = [state for state in states if state["position"] <= sample]
    if not before:
        return 0, plan, plan.fresh_lanes([lane])[lane]
    nearest = max(before, key=lambda state: state["position"])
    resumed, lanes = plan.going_on(nearest, [lane])
    return nearest["position"], resumed, lanes[lane]
