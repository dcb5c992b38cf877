"""`z2all bench order`: how evenly a run reads the documents of a corpus.

Reads the samples of a run and counts the tokens taken from each document. After N epochs' worth of tokens, every
document should have been read N times; the share of the tokens that are missing is reported (as many others were read
once more instead). Padding does not count as read.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.shared import Report, require_at_least, require_known
from z2all_ds.data.data_plan import DataPlan, Lane, StreamSpec, open_documents
from z2all_ds.data.documents import Documents, DocumentSpan, Tokenizer
from z2all_ds.data.packing import PACKING_MODES
from z2all_ds.data.stages import StageSpec
from z2all_ds.tokenizer import load_tokenizer

MOST = {"epochs": 1000, "length": 1 << 24, "lanes": 1 << 16}
"""More would take days."""


def bench_order(
    corpus: str,
    tokenizer: Path,
    epochs: Sequence[int],
    lengths: Sequence[int],
    packing: Sequence[str],
    num_lanes: int,
) -> Report:
    """Measure each domain on its own, with each length of samples and each packing."""
    require_known("packing", packing, PACKING_MODES)
    require_at_least(1, epochs=min(epochs), length=min(lengths), lanes=num_lanes)
    for name, value in (("epochs", max(epochs)), ("length", max(lengths)), ("lanes", num_lanes)):
        if value > MOST[name]:
            raise ConfigError(f"{name}={value}", f"must be at most {MOST[name]:,}", "Give less.")
    loaded = load_tokenizer(tokenizer)
    documents = open_documents(corpus, loaded)
    cases = list(product(documents.domains, packing or PACKING_MODES, lengths))
    found = []
    for domain, mode, length in cases:
        spec = StreamSpec(corpus, [StageSpec(length, {domain: 1.0})], 0, num_lanes, mode)
        found += [
            {"domain": domain, "packing": mode, "sequence_length": length, **one}
            for one in _coverage(spec, loaded, documents, sorted(epochs))
        ]
    return {"lanes": num_lanes, "corpus": _sizes(documents), "rows": found}


def _sizes(documents: Documents) -> Report:
    return {
        name: {"documents": domain.num_documents, "tokens": int(domain.token_counts().sum())}
        for name, domain in documents.domains.items()
    }


def _coverage(spec: StreamSpec, tokenizer: Tokenizer, documents: Documents, epochs: Sequence[int]) -> list[Report]:
    """Return the figures after each of these numbers of epochs."""
    plan = DataPlan.open(spec, tokenizer, documents)
    plan.prepare()
    lanes = [Lane(plan, number, state) for number, state in plan.fresh_lanes(range(spec.num_lanes)).items()]
    sizes = plan.domains[0].token_counts().astype(np.int64) + (plan.begin_id is not None)
    read, total, sample, padding, found = np.zeros_like(sizes), int(sizes.sum()), 0, 0, list[Report]()
    stage, order = plan.schedule.stages[0], plan.orders[0].kind
    label = f"{plan.domains[0].name}, {spec.packing}, {stage.sequence_length}"
    with progress(label, epochs[-1] * total, "tokens") as advance:
        for number in epochs:
            while sample * stage.sequence_length - padding < number * total:
                spans: list[DocumentSpan] = []
                made = lanes[sample % spec.num_lanes].next_sample(sample, stage, spans)
                for span in spans:
                    read[span.document_index] += span.end - span.start
                sample, padding = sample + 1, padding + made.num_padding
                advance(stage.sequence_length - made.num_padding)
            unread = int(np.maximum(number * sizes - read, 0).sum()) / total
            share = padding / (sample * stage.sequence_length)
            found.append({"epochs": number, "unread": unread, "padding": share, "order": order})
    return found


def describe(report: Report) -> Shown:
    """Yield the sizes and a row per measurement."""
    for name, size in report["corpus"].items():
        yield f"{name}: {size['documents']:,} documents, {size['tokens']:,} tokens; {report['lanes']} lanes"
    rows = [
        (one["domain"], one["packing"], str(one["sequence_length"]), str(one["epochs"]), f"{one['unread']:.2%}",
         f"{one['padding']:.2%}", one["order"])
        for one in report["rows"]
    ]  # fmt: skip
    yield Table(("domain", "packing", "length", "epochs", "unread", "padding", "order"), rows, "llr")
