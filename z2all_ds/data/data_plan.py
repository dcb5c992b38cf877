"""Everything that decides which sample comes when: the spec, the opened corpus, the schedule, and the lanes.

A lane is an endless, deterministic sequence of samples, with a cursor of a few integers per domain. The number of lanes
is fixed for the whole run and independent of the number of ranks. Every epoch of a domain is divided into L parts, one
per lane (`order`), so each token belongs to exactly one lane per epoch. Lanes do not wait for each other, but their
parts have the same size, so they reach the end of an epoch together.

Needs no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.corpus.reading.readers import open_domains
from z2all_ds.data.documents import Documents, DocumentSpan, Domain, LaneDocuments, RawDomain, Tokenizer, mixture_sizes
from z2all_ds.data.even_order import EvenOrder, TokenOrder
from z2all_ds.data.order import DomainOrder, documents_per_block
from z2all_ds.data.packing import (
    PACKING_MODES,
    SMALLEST_PART,
    BestFitPacker,
    CutPacker,
    LaneState,
    Sample,
    fresh_cursor,
    padding_of,
    tokens_used,
)
from z2all_ds.data.stages import Schedule, SkipRange, Stage, StageSpec
from z2all_ds.data.state import STATE_VERSION, StreamState, resumed_lanes, upgraded
from z2all_ds.data.token_counts import Beat
from z2all_ds.data.tokens.reading import is_token_corpus, open_token_corpus

COUNTED_BYTES = 1 << 30
"""Text above this size is divided by bytes instead of tokens: counting the tokens takes eight minutes on two cores."""
COUNTED_DOCUMENTS = 20_000_000
"""Token shards of more documents are read in strides: the counts, which each process holds, have 12 bytes each."""
PADDED_DOCUMENTS = 2_000_000
"""In larger domains, parts do not take account of padding: that takes some seconds per million documents and epoch, and
adds little, as it averages out over many samples."""
EVEN_ORDER_BYTES = 4 << 30
"""Larger text is read in strides: equal parts need the sizes of all documents, hence the index of every shard, or the
text column of every Parquet file. At this size strides differ by a few percent, and less in a larger domain."""
SMALLEST_PART_BYTES = 1024
"""Below, a sample would need the parts of many epochs, so lanes read whole documents in strides."""


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
    """Fixed for the whole run; the largest world size."""
    packing: str = "cut"
    """cut: no padding. best_fit: documents that fit into a sample are not cut."""
    skip: Sequence[SkipRange] = ()
    """Global samples [first, end) to leave out."""
    even_epochs: bool = True
    """Divide each epoch into equal parts, where possible. Not for validation, which repeats its first samples."""
    on_bad_record: str = "stop"
    """skip: a record without a valid text is read as an empty document."""
    begin_of_text: bool | None = False
    """Put the begin-of-text token before every document; None: if the tokenizer does so itself."""
    verify_shards: bool = False
    """Compare the checksums of opened shards in the background."""

    def check_shape(self, rank: int, world_size: int) -> None:
        for name, value in (("num_lanes", self.num_lanes), ("world_size", world_size)):
            if value < 1:
                raise ConfigError(f"{name}={value}", "it must be at least 1", f"Set {name} to 1 or more.")
        if world_size > self.num_lanes:
            rule = f"it must be at most num_lanes={self.num_lanes}"
            raise ConfigError(f"world_size={world_size}", rule, "Use fewer ranks, or start a new run with more lanes.")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}", f"ranks are 0 to {world_size - 1}", "Check RANK and WORLD_SIZE.")
        if self.packing not in PACKING_MODES:
            rule = f"must be one of {', '.join(PACKING_MODES)}"
            raise ConfigError(f"packing={self.packing!r}", rule, "Use one of these.")


def open_documents(
    corpus_dir: str | Path, tokenizer: Tokenizer, on_bad_record: str = "stop", verify: bool = False
) -> Documents:
    """Open a corpus of either kind; token shards must be made with this tokenizer."""
    if not is_token_corpus(corpus_dir):
        readers = open_domains(corpus_dir, load_manifest(corpus_dir), on_bad_record, verify)
        domains = {name: RawDomain(reader, tokenizer) for name, reader in readers.items()}
        return Documents(domains, tokenizer.fingerprint)
    documents = open_token_corpus(corpus_dir, verify)
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
    sizes: Mapping[str, int]
    """Sizes of all domains of the corpus, for shares by size."""
    longest_sample: int
    """Longer documents may be divided between lanes; "best_fit" never cuts the others."""
    begin_id: int | None = None
    """Token before every document."""

    @classmethod
    def open(cls, spec: StreamSpec, tokenizer: Tokenizer, documents: Documents | None = None) -> "DataPlan":
        """Open the corpus, unless its `documents` are given."""
        documents = documents or open_documents(spec.corpus_dir, tokenizer, spec.on_bad_record, spec.verify_shards)
        if spec.begin_of_text is None:
            spec = replace(spec, begin_of_text=tokenizer.begins_texts)
        sizes = mixture_sizes(documents.domains)
        schedule = Schedule(spec.stages, spec.skip, sizes, spec.num_lanes, spec.seed)
        domains = [documents.domains[name] for name in schedule.domain_names]
        longest = max(stage.sequence_length for stage in schedule.stages)
        orders = [domain_order(domain, spec, schedule, longest) for domain in domains]
        begin_id = tokenizer.model_token_ids["bos_token_id"] if spec.begin_of_text else None
        if spec.begin_of_text and begin_id is None:
            rule = "the tokenizer has no begin-of-text token (bos_token)"
            raise ConfigError("data.begin_of_text=true", rule, "Leave it out, or use another tokenizer.")
        return cls(spec, schedule, domains, orders, documents.tokenizer_fingerprint, sizes, longest, begin_id)

    def prepare(self, beat: Beat = lambda: None) -> None:
        """Do what the first sample would do, such as counting tokens."""
        for domain in self.counted():
            domain.token_counts(beat)
        for order in self.orders:
            order.prepare()

    def counted(self) -> list[Domain]:
        """Return the domains of text whose tokens `prepare` counts."""
        pairs = zip(self.domains, self.orders, strict=True)
        return [domain for domain, order in pairs if order.kind == TokenOrder.kind and domain.num_tokens is None]

    def describe_shares(self) -> list[str]:
        """Return a line per stage that reads several domains: their shares of the tokens."""
        return [
            f"shares of tokens{f' in stage {stage.name}' if len(self.schedule.stages) > 1 else ''}: "
            + ", ".join(f"{name} {share:.2%}" for name, share in stage.shares.items())
            for stage in self.schedule.stages
            if len(stage.shares) > 1
        ]

    def describe_orders(self) -> list[str]:
        """Return a line per domain of text that would be read more evenly in a new run on its tokens."""
        return [
            f"domain {domain.name}: its documents are read less evenly, as it has more than"
            f" {human_bytes(COUNTED_BYTES)} of text; to avoid that, tokenize it before the run (z2all corpus tokenize)"
            for domain, order in zip(self.domains, self.orders, strict=True)
            if domain.num_tokens is None
            and order.kind != TokenOrder.kind
            and _text_size(domain) > COUNTED_BYTES
            and domain.num_documents <= COUNTED_DOCUMENTS
        ]

    def fresh_lanes(self, lanes: Sequence[int]) -> dict[int, LaneState]:
        return {lane: [fresh_cursor(self.spec.packing) for _ in self.domains] for lane in lanes}

    def epochs_read(self, lanes: Mapping[int, LaneState]) -> dict[str, list[float]]:
        """Return for each domain how often each of these lanes has read its share of it."""
        return {
            domain.name: [
                order.epochs_read(lane, cursor[0], cursor[1], tokens_used(cursor, self.spec.packing))
                for lane, cursor in ((lane, cursors[number]) for lane, cursors in lanes.items())
            ]
            for number, (domain, order) in enumerate(zip(self.domains, self.orders, strict=True))
        }

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
            "domains": {
                domain.name: [domain.num_documents, domain.fingerprint[:16], order.kind]
                for domain, order in zip(self.domains, self.orders, strict=True)
            },
            "stage": {"name": stage.name, "sequence_length": stage.sequence_length, "shares": dict(stage.shares)},
            "skip": [[first, end] for first, end in self.schedule.skip],
            "sizes": dict(self.sizes),
            "longest_sample": self.longest_sample,
            "begin_of_text": self.begin_id is not None,
            "padding_lengths": self._padding_lengths(lanes),
            "lanes": {str(lane): [list(cursor) for cursor in state] for lane, state in lanes.items()},
        }

    def _padding_lengths(self, lanes: Mapping[int, LaneState]) -> dict[str, list[int]]:
        """Return for each domain with known padding the length of samples in the epochs that these lanes have begun."""
        found = {}
        for number, order in enumerate(self.orders):
            if isinstance(order, TokenOrder) and isinstance(order.padding, BestFitPadding):
                last = max((cursors[number][0] // order.num_blocks for cursors in lanes.values() if cursors), default=0)
                found[order.domain] = [
                    order.padding.length(epoch, epoch and epoch * order.tokens_per_epoch) for epoch in range(last + 1)
                ]
        return found

    def resumed(
        self, state: StreamState, lanes: Sequence[int], allow_data_change: bool = False
    ) -> tuple["DataPlan", dict[int, LaneState]]:
        """Return the plan and the cursors of these lanes to continue from a saved state.

        Ranges skipped in the state stay skipped. Those of the spec apply from here on, as earlier samples are consumed.
        An unchanged domain keeps the kind of order with which it was read so far. The longest sample stays that of the
        run's start, since later stages may have changed.
        """
        state = upgraded(state)
        position = state.get("position", 0)
        ahead = [(max(first, position), end) for first, end in self.spec.skip if end > position]
        skip = [*ahead, *((first, end) for first, end in state.get("skip", ()))]
        sizes, longest = self._sizes_of(state), max(1, int(state.get("longest_sample", self.longest_sample)))
        schedule = Schedule(self.spec.stages, skip, sizes, self.spec.num_lanes, self.spec.seed)
        lengths = state.get("padding_lengths", {})
        orders = []
        for domain in self.domains:
            kind = _saved_kind(state, domain)
            saved = lengths.get(domain.name, ()) if kind else ()
            orders.append(domain_order(domain, self.spec, schedule, longest, kind, saved))
        plan = replace(self, schedule=schedule, orders=orders, sizes=sizes, longest_sample=longest)
        here = plan.state_at(position, {lane: [] for lane in lanes})
        return plan, resumed_lanes(state, here, allow_data_change)

    def _sizes_of(self, state: StreamState) -> Mapping[str, int]:
        """Return the sizes that the run began with: it keeps its shares on text, on tokens and in later versions.

        States of earlier versions have none: shares were by the size of the shards. A changed corpus gets new shares.
        """
        identities = {domain.name: [domain.num_documents, domain.fingerprint[:16]] for domain in self.domains}
        saved = state.get("sizes", {domain.name: domain.num_bytes for domain in self.domains})
        before = {name: identity[:2] for name, identity in state.get("domains", {}).items()}
        is_same = identities == before and saved.keys() >= identities.keys()
        return saved if is_same else self.sizes


def _saved_kind(state: StreamState, domain: Domain) -> str | None:
    """Return the kind of order in which the domain was read so far; None if it is new or has changed."""
    *identity, kind = state.get("domains", {}).get(domain.name, [None])
    return kind if identity == [domain.num_documents, domain.fingerprint[:16]] else None


@dataclass(frozen=True)
class BestFitPadding:
    """The padding of a domain with the length of samples that was in use when each epoch began."""

    schedule: Schedule
    domain: str
    lengths: Sequence[int]
    """Of the epochs that had begun when the run was continued; the stages may have changed since."""

    def length(self, epoch: int, tokens_before: int) -> int:
        return (
            self.lengths[epoch] if epoch < len(self.lengths) else self.schedule.length_after(self.domain, tokens_before)
        )

    def of_parts(self, epoch: int, tokens_before: int, parts: list[npt.NDArray[np.int64]]) -> list[int]:
        length = self.length(epoch, tokens_before)
        if min(int(part.sum()) for part in parts) < SMALLEST_PART * length:
            return [0] * len(parts)  # they share groups with the next epoch, so their padding is not known
        return [padding_of(part, length) for part in parts]


def domain_order(
    domain: Domain,
    spec: StreamSpec,
    schedule: Schedule,
    longest_sample: int,
    kind: str | None = None,
    padding_lengths: Sequence[int] = (),
) -> DomainOrder:
    """Return the order of a domain: of the given kind if its documents allow that, otherwise of the best kind."""
    block_size = documents_per_block(domain.num_documents, domain.num_bytes, spec.num_lanes)
    values = (domain.name, domain.num_documents, block_size, spec.seed, spec.num_lanes)
    kind = kind or _best_kind(domain, spec)
    split_unit = 1 if spec.packing == "cut" else longest_sample
    if kind == TokenOrder.kind:
        has_padding = spec.packing == "best_fit" and domain.num_documents <= PADDED_DOCUMENTS
        padding = BestFitPadding(schedule, domain.name, padding_lengths) if has_padding else None
        return TokenOrder(*values, partial(_token_sizes, domain, bool(spec.begin_of_text)), split_unit, padding)
    if kind == EvenOrder.kind and domain.has_sizes:
        return EvenOrder(*values, domain.document_sizes, split_unit)
    return DomainOrder(*values)


def _token_sizes(domain: Domain, begin_of_text: bool) -> npt.NDArray[np.integer[Any]]:
    return domain.token_counts() + begin_of_text


def _best_kind(domain: Domain, spec: StreamSpec) -> str:
    enough_documents = domain.num_documents >= spec.num_lanes
    enough_text = domain.num_bytes >= SMALLEST_PART_BYTES * spec.num_lanes
    if not spec.even_epochs or not (enough_documents or enough_text):
        return DomainOrder.kind
    has_tokens = domain.num_tokens is not None and domain.num_documents <= COUNTED_DOCUMENTS
    if has_tokens or _text_size(domain) <= COUNTED_BYTES:
        return TokenOrder.kind
    return EvenOrder.kind if enough_documents and domain.num_bytes <= EVEN_ORDER_BYTES else DomainOrder.kind


def _text_size(domain: Domain) -> int:
    return domain.text_bytes or domain.num_bytes


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
            documents = LaneDocuments(domain, order, self.number, cursor[0], cursor[1], plan.begin_id)
            kind = CutPacker if plan.spec.packing == "cut" else BestFitPacker
            packer = self._packers[domain_index] = kind(documents, domain_index, cursor)
        made = packer.next_sample(stage.sequence_length, spans)
        self._cursors[domain_index] = packer.cursor()
        return made

    def cursors(self) -> LaneState:
        """Return the cursors after the last sample."""
        return list(self._cursors)
