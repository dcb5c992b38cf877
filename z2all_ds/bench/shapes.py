"""`z2all bench shapes`: feed-forward and vocabulary sizes near those you wish, by what they cost on this device.

A GPU computes products in tiles and reads rows in aligned pieces: a size that fits neither can cost more than a larger
one that does. Only the products that depend on the size are timed (gate_up and down; the head), forward and both
gradients, at the run's tokens per micro-batch. All candidates are measured before any is repeated, as in the floor.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from z2all_ds.base.config import RunConfig
from z2all_ds.base.console import progress
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.products import Linear, require_room, time_products, training_dtype
from z2all_ds.bench.shared import require_at_least
from z2all_ds.bench.timing import cold_passes, in_words, measured_on

ROUNDS = 5
MULTIPLES = (8, 16, 32, 64, 128, 256, 512)
NEAR = 0.25
"""Candidates differ from the wish by at most this part of it."""
NOISE = 0.01
"""Two measurements of one shape differ by about as much: what is this near to the best counts as equal to it."""


@dataclass(frozen=True)
class Candidate:
    """One size and what its products cost together. `cost`: time over that of the best candidate, which has 1.0."""

    size: int
    flops: int
    milliseconds: float
    teraflops_per_second: float
    cost: float


@dataclass(frozen=True)
class Advice:
    """All candidates for one setting, in order of size."""

    setting: str
    wished: int
    candidates: list[Candidate]
    recommended: int
    reason: str


@dataclass(frozen=True)
class Shapes:
    """Medians, with everything needed to run it again. `tokens` are those of a micro-batch."""

    measured_on: dict[str, str]
    dtype: str
    hidden_size: int
    tokens: int
    rounds: int
    feed_forward: Advice
    vocabulary: Advice


def measure_shapes(
    run: RunConfig,
    device: torch.device,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int | None = None,
    rounds: int = ROUNDS,
) -> Shapes:
    """Times every candidate. What is not given comes from the run's model, the feed-forward size from 8/3 of hidden."""
    hidden = run.model.hidden_size if hidden_size is None else hidden_size
    ffn = max(1, round(hidden * 8 / 3)) if intermediate_size is None else intermediate_size
    vocabulary = run.model.vocab_size if vocab_size is None else vocab_size
    require_at_least(1, rounds=rounds, hidden=hidden, ffn=ffn, vocab=vocabulary)
    tokens, dtype = run.train.micro_batch * run.train.sequence_length, training_dtype(device, run.train.precision)
    ffn_linears = {
        size: [Linear("gate_up", hidden, 2 * size), Linear("down", size, hidden)]
        for size in feed_forward_candidates(ffn)
    }
    head_linears = {size: [Linear("head", hidden, size)] for size in vocabulary_candidates(vocabulary)}
    both = [*ffn_linears.items(), *head_linears.items()]
    require_room([linear for _, linears in both for linear in linears], tokens, device, dtype)
    cold = cold_passes(device)
    passes: list[list[float]] = []
    with progress("shapes", total=(cold + rounds) * len(both), unit="sizes") as advance:
        for _ in range(cold + rounds):
            passes.append([])
            for size, linears in both:
                passes[-1].append(sum(sum(time_products(one, tokens, device, dtype).values()) for one in linears))
                advance(1, f"{linears[0].name} {size}")
    medians = [statistics.median(found) for found in zip(*passes[cold:], strict=True)]
    flops = [float(sum(3 * one.flops_per_product(tokens) for one in linears)) for _, linears in both]

    def by_size(figures: list[float], sizes: Mapping[int, object]) -> dict[int, float]:
        return dict(zip(sizes, figures[: len(sizes)] if sizes is ffn_linears else figures[-len(sizes) :], strict=True))

    return Shapes(
        measured_on(device),
        str(dtype).removeprefix("torch."),
        hidden,
        tokens,
        rounds,
        advise_feed_forward(ffn, by_size(medians, ffn_linears), by_size(flops, ffn_linears)),
        advise_vocabulary(vocabulary, by_size(medians, head_linears), by_size(flops, head_linears)),
    )


def feed_forward_candidates(wish: int) -> list[int]:
    """The wish and the next multiples on both sides of it."""
    below = {(wish - 1) // step * step for step in MULTIPLES}
    return _near(wish, {wish} | below | _multiples_above(wish))


def vocabulary_candidates(wish: int) -> list[int]:
    """Never fewer than the tokens there are. One more of them, too: it shows what an odd size costs."""
    return _near(wish, {wish, wish + 1} | _multiples_above(wish))


def _multiples_above(wish: int) -> set[int]:
    return {(wish // step + 1) * step for step in MULTIPLES}


def _near(wish: int, sizes: set[int]) -> list[int]:
    """Another model's sizes are no advice: 512 where 85 is wished."""
    return sorted(size for size in sizes if abs(size - wish) <= NEAR * wish)


def advise_feed_forward(wish: int, seconds: Mapping[int, float], flops: Mapping[int, float]) -> Advice:
    """Every column is a parameter that learns: time per column decides, and then the distance to the wish."""
    costs = _relative({size: seconds[size] / size for size in seconds})
    chosen = min(_best(costs), key=lambda size: (abs(size - wish), size))
    why = "least time per parameter"
    if costs[chosen] > 1:
        why = f"nearest to {wish} of those within {NOISE:.0%} of the {why}"
    return _advice("model.intermediate_size", wish, chosen, why, "per parameter", seconds, flops, costs)


def advise_vocabulary(wish: int, seconds: Mapping[int, float], flops: Mapping[int, float]) -> Advice:
    """Columns beyond the tokens are padding: the whole time decides, and then the size."""
    costs = _relative(seconds)
    chosen = min(_best(costs))
    why = "least time" if costs[chosen] == 1 else f"smallest of those within {NOISE:.0%} of the least time"
    return _advice("model.vocab_size", wish, chosen, why, "in all", seconds, flops, costs)


def _relative(costs: Mapping[int, float]) -> dict[int, float]:
    best = min(costs.values())
    return {size: cost / best for size, cost in costs.items()}


def _best(costs: Mapping[int, float]) -> list[int]:
    """Returns those that are as good as the best."""
    return [size for size, cost in costs.items() if cost <= 1 + NOISE]


def _advice(
    setting: str,
    wish: int,
    chosen: int,
    why: str,
    unit: str,
    seconds: Mapping[int, float],
    flops: Mapping[int, float],
    costs: Mapping[int, float],
) -> Advice:
    gain = f"{100 * (1 - costs[chosen] / costs[wish]):.1f}% less {unit} than {wish}"
    candidates = [
        Candidate(size, int(flops[size]), seconds[size] * 1e3, flops[size] / seconds[size] / 1e12, costs[size])
        for size in sorted(seconds)
    ]
    reason = f"{why}, {'and it is what you wished' if chosen == wish else gain}"
    return Advice(setting, wish, candidates, chosen, reason)


def describe(shapes: Shapes) -> Shown:
    """Yields the device, and for both settings a table of candidates and the advice."""
    sizes = (f"hidden {shapes.hidden_size}", f"{shapes.tokens} tokens", f"median of {shapes.rounds} rounds")
    yield in_words(shapes.measured_on, shapes.dtype, *sizes)
    for advice in (shapes.feed_forward, shapes.vocabulary):
        rows = []
        for one in advice.candidates:
            marks = ("wished",) * (one.size == advice.wished) + ("recommended",) * (one.size == advice.recommended)
            figures = (f"{one.milliseconds:.4f}", f"{one.teraflops_per_second:.4g}", f"{one.cost:.3f}")
            rows.append((str(one.size), *figures, ", ".join(marks)))
        yield ""
        yield Table((advice.setting, "ms", "TFLOP/s", "cost", ""), rows, "lrrrl")
        yield f"{advice.setting}={advice.recommended}: {advice.reason}"
