"""Perplexity of models on texts, per domain and overall: by token, byte and character.

`windows.py` defines which tokens count. Tokens of different tokenizers are not comparable: models that do not share one
are compared by bits per byte.
"""

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from z2all_ds.base import errors
from z2all_ds.base.child_process import JsonProcess, module_command, package_environment
from z2all_ds.base.console import Advance, progress
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.reports import Shown, Table
from z2all_ds.evaluate.loading import load_model
from z2all_ds.evaluate.perplexity_rank import PerplexitySettings, RankResult, Sums, measure_share
from z2all_ds.evaluate.texts import open_texts

POLL_SECONDS = 0.1
FIGURES = ("documents", "tokens", "loss", "ppl/token", "ppl/byte", "ppl/char", "bits/byte", "bits/char")


@dataclass(frozen=True)
class PerplexityRow:
    """Figures of one domain, or of all. None if there is nothing to divide by, or no finite value."""

    domain: str
    documents: int
    tokens: int
    """Predicted tokens."""
    bytes: int
    """UTF-8 bytes of the predicted text."""
    characters: int
    loss: float | None
    """Nats per token."""
    perplexity: float | None
    perplexity_per_byte: float | None
    perplexity_per_character: float | None
    bits_per_byte: float | None
    bits_per_character: float | None

    @classmethod
    def of(cls, domain: str, sums: Sums) -> "PerplexityRow":
        counts = (sums.tokens, sums.bytes, sums.characters)
        nats = [sums.nats / count if count and math.isfinite(sums.nats) else None for count in counts]
        bits = [None if one is None else one / math.log(2) for one in nats[1:]]
        return cls(domain, sums.documents, *counts, nats[0], *map(_exp, nats), *bits)


@dataclass(frozen=True)
class ModelPerplexity:
    """Figures of one model."""

    model: str
    step: int | None
    window: int
    stride: int | None
    """None for packed windows."""
    bos: bool
    domains: list[PerplexityRow]
    all: PerplexityRow


def measure_perplexity(
    models: Iterable[str | Path], settings: PerplexitySettings, ranks: int = 1
) -> list[ModelPerplexity]:
    """Measure the models one after the other."""
    for name, value in (("batch", settings.batch), ("ranks", ranks)):
        if value < 1:
            raise ConfigError(f"{name}={value}", "must be at least 1", "Use a larger number.")
    return [_measure(str(model), settings, ranks) for model in models]


def _measure(model: str, settings: PerplexitySettings, ranks: int) -> ModelPerplexity:
    domains = open_texts(settings.data, settings.documents, settings.follow_links)
    # Documents differ in length, so the time left follows from bytes. Reading them twice costs little next to scoring.
    total = sum(len(text.encode(errors="replace")) for domain in domains for text in domain.read(0, 1))
    loaded = load_model(model, settings.dtype) if ranks == 1 else None
    with progress("perplexity", total, "bytes") as advance:
        if loaded:
            results = [measure_share(loaded, domains, settings, 0, 1, advance)]
        else:
            results = measure_in_ranks(model, settings, ranks, advance)
    del loaded
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for the next model
    sums = {domain.name: sum((one.sums[domain.name] for one in results), Sums()) for domain in domains}
    rows = [PerplexityRow.of(name, of_domain) for name, of_domain in sums.items()]
    overall = PerplexityRow.of("all", sum(sums.values(), Sums()))
    first = results[0]
    return ModelPerplexity(first.model, first.step, first.window, first.stride, first.bos, rows, overall)


def _exp(nats: float | None) -> float | None:
    """Return exp(nats); None if a float cannot represent it."""
    return None if nats is None or nats > math.log(1e300) else math.exp(nats)


# Several processes


def measure_in_ranks(model: str, settings: PerplexitySettings, ranks: int, advance: Advance) -> list[RankResult]:
    """Measure in one process per rank. The failure of a rank ends all of them, and none outlives this function."""
    gpus = torch.cuda.device_count()
    if gpus and ranks > gpus:
        raise ConfigError(f"ranks={ranks}", f"there are {gpus} GPUs, and each rank needs one", "Use fewer ranks.")
    command = module_command("z2all_ds.evaluate.perplexity_rank")
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            processes.append(JsonProcess(command, package_environment(), shows_errors=True))
            stack.callback(processes[-1].close)
            processes[-1].send({"rank": rank, "ranks": ranks, "model": model, "settings": asdict(settings)})
        return _results(processes, advance)


def _results(processes: Sequence[JsonProcess], advance: Advance) -> list[RankResult]:
    results: dict[int, RankResult] = {}
    while len(results) < len(processes):
        for rank, process in enumerate(processes):
            while rank not in results:
                try:
                    message = process.receive(0)
                except TimeoutError:
                    break
                if message is None:
                    raise MachineError(
                        f"rank {rank}",
                        f"ended without a result (exit code {process.wait()})",
                        "See its output above; if it ran out of memory, use fewer ranks or a smaller --batch.",
                    )
                if "error" in message:
                    name, *parts = message["error"]
                    raise getattr(errors, name)(*parts)
                if "result" in message:
                    sums = {name: Sums(**one) for name, one in message["result"].pop("sums").items()}
                    results[rank] = RankResult(**message["result"], sums=sums)
                else:
                    advance(message["bytes"])
        time.sleep(POLL_SECONDS)
    return [results[rank] for rank in range(len(processes))]


# Report


def describe(measured: list[ModelPerplexity]) -> Shown:
    """Yield a table with one row per domain and model, the rows over all domains last, and one line per model."""
    several = len(measured) > 1
    by_domain = list(zip(*(one.domains for one in measured), strict=True))
    if len(by_domain) > 1:
        by_domain.append(tuple(one.all for one in measured))
    rows = [
        [row.domain, *([one.model] if several else []), *_figures(row)]
        for of_domain in by_domain
        for one, row in zip(measured, of_domain, strict=True)
    ]
    yield Table(("domain", *(["model"] if several else []), *FIGURES), rows, "llr" if several else "lr")
    yield from (f"{one.model}: {_method(one)}" for one in measured)


def _figures(row: PerplexityRow) -> list[str]:
    shown = (
        (row.loss, 4),
        (row.perplexity, 2),
        (row.perplexity_per_byte, 3),
        (row.perplexity_per_character, 3),
        (row.bits_per_byte, 4),
        (row.bits_per_character, 4),
    )
    return [f"{row.documents:,}", f"{row.tokens:,}", *(_figure(value, digits) for value, digits in shown)]


def _figure(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.3g}"


def _method(one: ModelPerplexity) -> str:
    """Return how the figures were measured: figures of different methods are not comparable."""
    if one.stride is None:
        windows = f"packed in windows of {one.window} tokens"
    else:
        windows = f"windows of {one.window} tokens, at least {one.window - one.stride} of context where available"
    first = "begin-of-text before each document" if one.bos else "first token not counted (it has no context)"
    return f"{windows}; {first}"
