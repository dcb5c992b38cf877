"""Everything that decides which sample comes when: the spec, the opened corpus, the schedule, and the lanes.

A lane is an endless, deterministic sequence of samples, with a cursor of a few integers per domain. The number of lanes
is fixed for the whole run and independent of the number of ranks. Lane l of L owns the blocks l, l + L, l + 2L, ... of
every domain's endless sequence (`order`), so each document belongs to exactly one lane per epoch. Lanes do not wait for
each other: one may be in the next epoch of a domain while another still reads the last blocks of this one.

Needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.corpus.reading.readers import open_domains
from z2all_ds.data.documents import Documents, DocumentSpan, Domain, LaneDocuments, RawDomain, Tokenizer
from z2all_ds.data.order import DomainOrder, documents_per_block
from z2all_ds.data.packing import PACKING_MODES, BestFitPacker, Cursor, CutPacker, LaneState, Sample, fresh_cursor
from z2all_ds.data.stages import Schedule, SkipRange, Stage, StageSpec
from z2all_ds.data.state import STATE_VERSION, StreamState, divisors, resumed_lanes
from z2all_ds.data.tokens.reading import is_token_corpus, open_token_corpus


@dataclass(frozen=True)
class StreamSpec:
    """The settings that decide the order of the data, together with the corpus and the tokenizer."""

    corpus_dir: str | Path
    """Folder or URL with raw shards and their manifest, or with token shards."""
    stages: Sequence[StageSpec]
    """At least one."""
    seed: int = 0
    """Seed of all shuffling."""
    num_lanes: int = 256
    """Fixed for the whole run; the world size must divide it."""
    packing: str = "cut"
    """cut: no padding. best_fit: documents that fit into a sample are not cut."""
    skip: Sequence[SkipRange] = ()
    """Global samples [first, end) to leave out."""

    def check_shape(self, rank: int, world_size: int) -> None:
        for name, value in (("num_lanes", self.num_lanes), ("world_size", world_size)):
            if value < 1:
                raise ConfigError(f"{name}={value}", "it must be at least 1", f"Set {name} to 1 or more.")
        if self.num_lanes % world_size:
            raise ConfigError(
                f"world_size={world_size}",
                f"it must divide num_lanes={self.num_lanes}",
                f"Allowed world sizes: {', '.join(map(str, divisors(self.num_lanes)))}.",
            )
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}", f"ranks are 0 to {world_size - 1}", "Check RANK and WORLD_SIZE.")
        if self.packing not in PACKING_MODES:
            rule = f"must be one of {', '.join(PACKING_MODES)}"
            raise ConfigError(f"packing={self.packing!r}", rule, "Use one of these.")


def open_documents(corpus_dir: str | Path, tokenizer: Tokenizer) -> Documents:
    """Open a corpus of either kind; token shards must be made with this tokenizer."""
    if not is_token_corpus(corpus_dir):
        readers = open_domains(corpus_dir, load_manifest(corpus_dir))
        domains = {name: RawDomain(reader, tokenizer) for name, reader in readers.items()}
        return Documents(domains, tokenizer.fingerprint)
    documents = open_token_corpus(corpus_dir)
    if documents.tokenizer_fingerprint != tokenizer.fingerprint:
        rule = "its tokens were made with a different tokenizer"
        raise DataError(str(corpus_dir), rule, "Use that tokenizer, or run `z2all corpus tokenize` again.")
    return documents


@dataclass(frozen=True)
class DataPlan:
    """A spec with its corpus opened; the same in every rank, worker and tool."""

    spec: StreamSpec
    schedule: Schedule
    domains: Sequence[Domain]
    orders: Sequence[DomainOrder]
    tokenizer_fingerprint: str

    @classmethod
    def open(cls, spec: StreamSpec, tokenizer: Tokenizer, documents: Documents | None = None) -> "DataPlan":
        """Open the corpus, unless its `documents` are given."""
        documents = documents or open_documents(spec.corpus_dir, tokenizer)
        sizes = {name: domain.num_bytes for name, domain in documents.domains.items()}
        schedule = Schedule(spec.stages, spec.skip, sizes, spec.num_lanes, spec.seed)
        domains = [documents.domains[name] for name in schedule.domain_names]
        orders = []
        for domain in domains:
            block_size = documents_per_block(domain.num_documents, domain.num_bytes, spec.num_lanes)
            orders.append(DomainOrder(domain.name, domain.num_documents, block_size, spec.seed))
        return cls(spec, schedule, domains, orders, documents.tokenizer_fingerprint)

    def fresh_lanes(self, lanes: Sequence[int]) -> dict[int, LaneState]:
        return {lane: [fresh_cursor(self.spec.packing) for _ in self.domains] for lane in lanes}

    def state_at(self, position: int, lanes: dict[int, LaneState]) -> StreamState:
        """Return the state of these lanes before global sample `position`."""
        stage = self.schedule.stage_of(max(position - 1, 0))
        return {
            "version": STATE_VERSION,
            "position": position,
            "num_lanes": self.spec.num_lanes,
            "seed": self.spec.seed,
            "packing": self.spec.packing,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "domains": {domain.name: [domain.num_documents, domain.fingerprint[:16]] for domain in self.domains},
            "stage": {"name": stage.name, "sequence_length": stage.sequence_length, "shares": dict(stage.shares)},
            "skip": [[first, end] for first, end in self.schedule.skip],
            "lanes": {str(lane): [list(cursor) for cursor in state] for lane, state in lanes.items()},
        }

    def resumed(
        self, state: StreamState, lanes: Sequence[int], allow_data_change: bool = False
    ) -> tuple["DataPlan", dict[int, LaneState]]:
        """Return the plan and the cursors of these lanes to continue from a saved state.

        Ranges skipped in the state stay skipped. Those of the spec apply from here on, as earlier samples are consumed.
        """
        position = state.get("position", 0)
        ahead = [(max(first, position), end) for first, end in self.spec.skip if end > position]
        skip = [*ahead, *((first, end) for first, end in state.get("skip", ()))]
        sizes = {domain.name: domain.num_bytes for domain in self.domains}
        plan = replace(self, schedule=Schedule(self.spec.stages, skip, sizes, self.spec.num_lanes, self.spec.seed))
        here = plan.state_at(position, {lane: [] for lane in lanes})
        return plan, resumed_lanes(state, here, allow_data_change)


class Lane:
    """Makes the samples of one lane, starting from `state`."""

    def __init__(self, plan: DataPlan, lane: int, state: LaneState) -> None:
        self._plan, self.number = plan, lane
        self._cursors = [list(cursor) for cursor in state]
        self._packers: dict[int, CutPacker | BestFitPacker] = {}

    def next_sample(self, sample: int, stage: Stage, spans: list[DocumentSpan] | None = None) -> Sample:
        """Return global sample `sample`; must be called in order. Add the sample's document spans to `spans`."""
        domain_index = stage.mixture.domain_of(sample)
        packer = self._packers.get(domain_index)
        if packer is None:
            plan, cursor = self._plan, self._cursors[domain_index]
            domain, order = plan.domains[domain_index], plan.orders[domain_index]
            documents = LaneDocuments(domain, order, self.number, plan.spec.num_lanes, cursor[0], cursor[1])
            kind = CutPacker if plan.spec.packing == "cut" else BestFitPacker
            packer = self._packers[domain_index] = kind(documents, domain_index, cursor)
        made = packer.next_sample(stage.sequence_length, spans)
        self._cursors[domain_index] = packer.cursor()
        return made

    def cursor(self, domain_index: int) -> Cursor:
        return self._cursors[domain_index]
