"""`z2all bench shapes`: feed-forward and vocabulary sizes near those you wish, by what they cost on this device.

A GPU computes products in tiles and reads rows in aligned pieces: a size that fits neither can cost more than a larger
one that does. Only the products that the size is part of are timed (gate_up and down; the head), forward and both
gradients, at the run's tokens per micro-batch. All candidates are measured before any is repeated, as in the floor.
"""

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from z2all_ds.base.config import RunConfig
from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError
from z2all_ds.bench.products import (
    Linear,
    feed_forward_linears,
    head_linear,
    require_room,
    time_products,
    training_dtype,
)
from z2all_ds.bench.timing import check_rounds, in_words, measured_on

ROUNDS = 5
MULTIPLES = (8, 16, 32, 64, 128, 256, 512)
NEAR = 0.25
"""Candidates differ from the wish by at most this part of it."""
NOISE = 0.01
"""Two measurements of one shape differ by about as much: what is this near to the best counts as equal to it."""


@dataclass(frozen=True)
class Candidate:
    """One size and what its products cost, together."""

    size: int
    flops: int
    milliseconds: float
    teraflops_per_second: float
    cost: float
    """Time per useful column over that of the best candidate: 1.0 is the best."""


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
    """Medians, with everything needed to run it again."""

    measured_on: dict[str, str]
    dtype: str
    hidden_size: int
    tokens: int
    """Of a micro-batch."""
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
    """Times every candidate; what is not given comes from the run's model, the feed-forward from 8/3 of hidden."""
    check_rounds(rounds)
    hidden = _checked("hidden", run.model.hidden_size if hidden_size is None else hidden_size)
    ffn = _checked("ffn", max(1, round(hidden * 8 / 3)) if intermediate_size is None else intermediate_size)
    vocabulary = _checked("vocab", run.model.vocab_size if vocab_size is None else vocab_size)
    tokens, dtype = run.train.micro_batch * run.train.sequence_length, training_dtype(device, run.train.precision)
    products_of: dict[tuple[str, int], list[Linear]] = {
        **{("ffn", size): feed_forward_linears(hidden, size) for size in feed_forward_candidates(ffn)},
        **{("vocab", size): [head_linear(hidden, size)] for size in vocabulary_candidates(vocabulary)},
    }
    require_room([one for linears in products_of.values() for one in linears], tokens, device, dtype)
    # A GPU's first pass finds it cold and its libraries unloaded.
    unmeasured = 1 if device.type == "cuda" else 0
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in products_of}
    with progress("shapes", total=(unmeasured + rounds) * len(products_of), unit="sizes") as advance:
        for _ in range(unmeasured + rounds):
            for key, linears in products_of.items():
                timed = (time_products(linear, tokens, device, dtype) for linear in linears)
                seconds[key].append(sum(sum(one.values()) for one in timed))
                advance(1, f"{key[0]} {key[1]}")
    medians = {key: statistics.median(found[unmeasured:]) for key, found in seconds.items()}
    flops = {key: sum(3 * one.flops_per_product(tokens) for one in linears) for key, linears in products_of.items()}

    def only(kind: str, figures: Mapping[tuple[str, int], float]) -> dict[int, float]:
        return {size: value for (which, size), value in figures.items() if which == kind}

    return Shapes(
        measured_on=measured_on(device),
        dtype=str(dtype).removeprefix("torch."),
        hidden_size=hidden,
        tokens=tokens,
        rounds=rounds,
        feed_forward=advise_feed_forward(ffn, only("ffn", medians), only("ffn", flops)),
        vocabulary=advise_vocabulary(vocabulary, only("vocab", medians), only("vocab", flops)),
    )


def _checked(name: str, size: int) -> int:
    if size < 1:
        raise ConfigError(f"{name}={size}", "a size is at least 1", "Give a positive number.")
    return size


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
    """Every column is a parameter that learns: what counts is time per column."""
    costs = _relative({size: seconds[size] / size for size in seconds})
    chosen = _pick(costs, key=lambda size: (abs(size - wish), size))
    why = "least time per parameter"
    if costs[chosen] > 1:
        why = f"nearest to {wish} of those within {NOISE:.0%} of the {why}"
    reason = f"{why}, {_against(wish, chosen, costs, 'per parameter')}"
    return Advice("model.intermediate_size", wish, _candidates(seconds, flops, costs), chosen, reason)


def advise_vocabulary(wish: int, seconds: Mapping[int, float], flops: Mapping[int, float]) -> Advice:
    """Columns beyond the tokens are padding: what counts is the whole time."""
    costs = _relative(seconds)
    chosen = _pick(costs, key=lambda size: (size,))
    why = "least time" if costs[chosen] == 1 else f"smallest of those within {NOISE:.0%} of the least time"
    reason = f"{why}, {_against(wish, chosen, costs, 'in all')}"
    return Advice("model.vocab_size", wish, _candidates(seconds, flops, costs), chosen, reason)


def _relative(costs: Mapping[int, float]) -> dict[int, float]:
    best = min(costs.values())
    return {size: cost / best for size, cost in costs.items()}


def _pick(costs: Mapping[int, float], key: Callable[[int], tuple[int, ...]]) -> int:
    """The first by `key` of those that cannot be told from the best."""
    return min((size for size, cost in costs.items() if cost <= 1 + NOISE), key=key)


def _against(wish: int, chosen: int, costs: Mapping[int, float], unit: str) -> str:
    if chosen == wish:
        return "and it is what you wished"
    return f"{100 * (1 - costs[chosen] / costs[wish]):.1f}% less {unit} than {wish}"


def _candidates(
    seconds: Mapping[int, float], flops: Mapping[int, float], costs: Mapping[int, float]
) -> list[Candidate]:
    return [
        Candidate(size, int(flops[size]), seconds[size] * 1e3, flops[size] / seconds[size] / 1e12, costs[size])
        for size in sorted(seconds)
    ]


def to_json(shapes: Shapes) -> str:
    return json.dumps(asdict(shapes), indent=2, ensure_ascii=False)


def to_lines(shapes: Shapes) -> list[str]:
    """For people."""
    facts = in_words(shapes.measured_on)
    facts += [
        shapes.dtype,
        f"hidden {shapes.hidden_size}",
        f"{shapes.tokens} tokens",
        f"median of {shapes.rounds} rounds",
    ]
    lines = [" | ".join(facts)]
    for advice in (shapes.feed_forward, shapes.vocabulary):
        lines += ["", f"{advice.setting:24}{'ms':>11}{'TFLOP/s':>11}{'cost':>9}"]
        for one in advice.candidates:
            marks = ("wished",) * (one.size == advice.wished) + ("recommended",) * (one.size == advice.recommended)
            figures = f"{one.size:<24}{one.milliseconds:11.4f}{one.teraflops_per_second:11.4g}{one.cost:9.3f}"
            lines.append(f"{figures}  {', '.join(marks)}".rstrip())
        lines.append(f"{advice.setting}={advice.recommended}: {advice.reason}")
    return lines
