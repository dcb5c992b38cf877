"""A spec with its corpus opened: everything that decides which sample comes when. Pure, and without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from z2all_ds.data.documents import Documents, Tokenizer
from z2all_ds.data.lanes import LaneState, Sources
from z2all_ds.data.order import DomainOrder, documents_per_block
from z2all_ds.data.packing import fresh_cursor
from z2all_ds.data.spec import StreamSpec, open_documents
from z2all_ds.data.stages import Schedule, SkipRange
from z2all_ds.data.state import STATE_VERSION, StreamState, adopt_lanes


@dataclass(frozen=True)
class DataPlan:
    """The same in every rank, worker and tool."""

    spec: StreamSpec
    schedule: Schedule
    sources: Sources
    tokenizer_fingerprint: str

    @classmethod
    def open(cls, spec: StreamSpec, tokenizer: Tokenizer, documents: Documents | None = None) -> "DataPlan":
        """`documents` spares opening the corpus again."""
        documents = documents or open_documents(spec.corpus_dir, tokenizer)
        sizes = {name: domain.num_bytes for name, domain in documents.domains.items()}
        schedule = Schedule(spec.stages, spec.skip, sizes, spec.num_lanes, spec.seed)
        domains = [documents.domains[name] for name in schedule.domain_names]
        orders = [
            DomainOrder(
                domain.name,
                domain.num_documents,
                documents_per_block(domain.num_documents, domain.num_bytes, spec.num_lanes),
                spec.seed,
            )
            for domain in domains
        ]
        sources = Sources(domains, orders, spec.num_lanes, spec.packing)
        return cls(spec, schedule, sources, documents.tokenizer_fingerprint)

    def fresh_lanes(self, lanes: Sequence[int]) -> dict[int, LaneState]:
        return {lane: [fresh_cursor(self.spec.packing) for _ in self.sources.domains] for lane in lanes}

    def state_at(self, position: int, lanes: dict[int, LaneState]) -> StreamState:
        """The state of these lanes before global sample `position`."""
        stage = self.schedule.stage_of(max(position - 1, 0))
        return {
            "version": STATE_VERSION,
            "position": position,
            "num_lanes": self.spec.num_lanes,
            "seed": self.spec.seed,
            "packing": self.spec.packing,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "domains": {
                domain.name: [domain.num_documents, domain.fingerprint[:16]] for domain in self.sources.domains
            },
            "stage": {
                "name": stage.name,
                "sequence_length": stage.sequence_length,
                "shares": dict(stage.shares),
            },
            "skip": [[first, end] for first, end in self.schedule.skip],
            "lanes": {str(lane): [list(cursor) for cursor in state] for lane, state in lanes.items()},
        }

    def going_on(
        self, state: StreamState, lanes: Sequence[int], allow_data_change: bool = False
    ) -> tuple["DataPlan", dict[int, LaneState]]:
        """The plan and the lanes' cursors for going on from a saved state.

        Ranges of the state stay skipped. Those of the spec count from here on: what was given cannot be taken back.
        """
        position = state.get("position", 0)
        ahead = [(max(first, position), end) for first, end in self.spec.skip if end > position]
        plan = self._skipping([*ahead, *((first, end) for first, end in state.get("skip", ()))])
        here = plan.state_at(position, {lane: [] for lane in lanes})
        return plan, adopt_lanes(state, here, allow_data_change)

    def _skipping(self, skip: Sequence[SkipRange]) -> "DataPlan":
        sizes = {domain.name: domain.num_bytes for domain in self.sources.domains}
        schedule = Schedule(self.spec.stages, skip, sizes, self.spec.num_lanes, self.spec.seed)
        return replace(self, schedule=schedule)
