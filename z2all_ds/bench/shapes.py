"""`z2all bench shapes`: the feed-forward and vocabulary sizes near the requested ones that are fastest on this device.

A GPU computes products in tiles and reads rows in aligned pieces: a size that fits neither can cost more than a larger
one that does. Only the products that depend on the size are timed (gate_up and down; the head), forward and both
gradients, with the tokens of the run's micro-batch.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch

from z2all_ds.base.config import RunConfig
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.products import Linear, require_room, time_products, training_dtype
from z2all_ds.bench.shared import Report, require_at_least
from z2all_ds.bench.timing import head_line, measure_in_passes, measured_on

MULTIPLES = (8, 16, 32, 64, 128, 256, 512)
NEAR = 0.25
"""Candidates differ from the requested size by at most this share of it."""
NOISE = 0.01
"""Two measurements of one shape differ by about this share: a candidate this close to the best counts as equal."""


def measure_shapes(
    run: RunConfig,
    device: torch.device,
    hidden_size: int | None,
    intermediate_size: int | None,
    vocab_size: int | None,
    rounds: int,
) -> Report:
    """Time every candidate. Sizes that are None come from the run's model; the feed-forward size is 8/3 of hidden.

    The `cost` of a candidate is its time relative to the best one, which has 1.0. `wished` is the requested size.
    """
    hidden = run.model.hidden_size if hidden_size is None else hidden_size
    ffn = max(1, round(hidden * 8 / 3)) if intermediate_size is None else intermediate_size
    vocabulary = run.model.vocab_size if vocab_size is None else vocab_size
    require_at_least(1, rounds=rounds, hidden=hidden, ffn=ffn, vocab=vocabulary)
    tokens, dtype = run.train.micro_batch * run.train.sequence_length, training_dtype(device, run.train.precision)
    linears = {
        "feed-forward": {
            size: [Linear("gate_up", hidden, 2 * size), Linear("down", size, hidden)]
            for size in feed_forward_candidates(ffn)
        },
        "vocabulary": {size: [Linear("head", hidden, size)] for size in vocabulary_candidates(vocabulary)},
    }
    for by_size in linears.values():
        require_room(chain(*by_size.values()), tokens, device, dtype)

    def time_sizes(name: str) -> dict[int, float]:
        return {
            size: sum(sum(time_products(one, tokens, device, dtype).values()) for one in some)
            for size, some in linears[name].items()
        }

    seconds = measure_in_passes("shapes", {name: partial(time_sizes, name) for name in linears}, device, rounds)
    return {
        "measured_on": measured_on(device),
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": hidden,
        "tokens": tokens,
        "rounds": rounds,
        "feed_forward": advise("model.intermediate_size", ffn, seconds["feed-forward"]),
        "vocabulary": advise("model.vocab_size", vocabulary, seconds["vocabulary"]),
    }


def feed_forward_candidates(requested: int) -> list[int]:
    """Return the requested size and the next multiples above and below it."""
    below = {(requested - 1) // step * step for step in MULTIPLES}
    return _near(requested, {requested} | below | _multiples_above(requested))


def vocabulary_candidates(requested: int) -> list[int]:
    """Return the requested size, the next multiples above it, and one token more, to show the cost of an odd size."""
    return _near(requested, {requested, requested + 1} | _multiples_above(requested))


def _multiples_above(requested: int) -> set[int]:
    return {(requested // step + 1) * step for step in MULTIPLES}


def _near(requested: int, sizes: set[int]) -> list[int]:
    return sorted(size for size in sizes if abs(size - requested) <= NEAR * requested)


def advise(setting: str, requested: int, seconds: Mapping[int, float]) -> dict[str, Any]:
    """Recommend one of the measured sizes.

    Every feed-forward column holds parameters that learn, so time per column decides, then the distance to the request.
    Vocabulary columns beyond the tokens are padding, so the whole time decides, then the size.
    """
    is_vocabulary = setting == "model.vocab_size"
    times = seconds if is_vocabulary else {size: seconds[size] / size for size in seconds}
    costs = {size: one / min(times.values()) for size, one in times.items()}
    good = [size for size, cost in costs.items() if cost <= 1 + NOISE]
    chosen = min(good) if is_vocabulary else min(good, key=lambda size: (abs(size - requested), size))
    least = "least time" if is_vocabulary else "least time per parameter"
    first = "smallest" if is_vocabulary else f"nearest to {requested}"
    why = least if costs[chosen] == 1 else f"{first} of those within {NOISE:.0%} of the {least}"
    unit = "in total" if is_vocabulary else "per parameter"
    gain = f"{100 * (1 - costs[chosen] / costs[requested]):.1f}% less {unit} than {requested}"
    return {
        "setting": setting,
        "wished": requested,
        "candidates": [
            {"size": size, "milliseconds": seconds[size] * 1e3, "cost": costs[size]} for size in sorted(seconds)
        ],
        "recommended": chosen,
        "reason": f"{why}, {'which is the requested size' if chosen == requested else gain}",
    }


def describe(shapes: Report) -> Shown:
    """Yield the device, and for both settings a table of candidates and the advice."""
    sizes = (f"hidden {shapes['hidden_size']}", f"{shapes['tokens']} tokens", f"median of {shapes['rounds']} rounds")
    yield head_line(shapes["measured_on"], shapes["dtype"], *sizes)
    for advice in (shapes["feed_forward"], shapes["vocabulary"]):
        marks = {"requested": advice["wished"], "recommended": advice["recommended"]}
        rows = []
        for one in advice["candidates"]:
            mark = ", ".join(name for name, size in marks.items() if size == one["size"])
            rows.append((str(one["size"]), f"{one['milliseconds']:.4f}", f"{one['cost']:.3f}", mark))
        yield ""
        yield Table((advice["setting"], "ms", "cost", ""), rows, "lrrl")
        yield f"{advice['setting']}={advice['recommended']}: {advice['reason']}"
