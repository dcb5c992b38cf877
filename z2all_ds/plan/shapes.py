"""Advice on the sizes of a model, each with its reason and its gain.

Times are of products on an H200 (`z2all bench shapes`, docs/results/2026-11-15_h200_bench_shapes.json): a size that is
no multiple of 8 cost 3.7 (feed-forward) to 5.7 (head) times as much; multiples of 8, 64, 128 and 512 differed by up
to 8 %, without a trend. On another GPU run `z2all bench shapes`.
"""

import math
from dataclasses import dataclass

from z2all_ds.base.accounting import ModelShape, count_matmul_parameters, count_parameters, flops_per_token

ALIGNMENT, TILE = 8, 64
FEED_FORWARD_COST, HEAD_COST = 3.7, 5.7
"""Cost of an unaligned size relative to the next multiple of 8."""
HEAD_SIZES = (64, 128)
"""Sizes that attention kernels are tuned for; they pad others to the next of `PADDED`."""
PADDED = (32, 64, 96, 128, 192, 256)
FEED_FORWARD_RATIO, RATIO_RANGE = 8 / 3, (2.0, 4.5)
"""Intermediate over hidden size: at 8/3 SwiGLU's three matrices have the size of two with a ratio of 4."""
LARGE_TABLE_SHARE = 0.25
FEW_TOKENS = 4096
"""A micro-batch of 4,096 tokens ran at 97 % of the speed of one of 16,384 (H200, 1.26 B, ZeRO-1, CUDA graphs)."""


@dataclass(frozen=True)
class Advice:
    """One change that would help."""

    setting: str
    now: int
    better: int
    reason: str
    gain: float | None
    """Share of the step's computing time that it saves; None where it saves no time or none was measured."""


def advise(shape: ModelShape, micro_batch: int, sequence_length: int) -> list[Advice]:
    """Return advice, the largest gain first; none where all sizes are good."""
    advice = [
        *_alignment(shape, sequence_length),
        *_head_size(shape, sequence_length),
        *_feed_forward_ratio(shape),
        *_table(shape),
        *_few_tokens(micro_batch, sequence_length),
    ]
    return sorted(advice, key=lambda one: -(one.gain or 0.0))


def _alignment(shape: ModelShape, sequence_length: int) -> list[Advice]:
    """Advise multiples of 64. The gain is known only for sizes that are no multiple of 8."""
    total, hidden = flops_per_token(shape, sequence_length, "exact"), shape.hidden_size
    unaligned, untiled = [], []
    for setting, size, part, cost, flops in (
        # Hidden sizes were not measured. They are a side of every product, including the feed-forward's.
        ("model.hidden_size", hidden, "layers", FEED_FORWARD_COST, 6 * count_matmul_parameters(shape)),
        (
            *("model.intermediate_size", shape.intermediate_size, "feed-forward", FEED_FORWARD_COST),
            18 * shape.num_layers * hidden * shape.intermediate_size,
        ),
        ("model.vocab_size", shape.vocab_size, "head", HEAD_COST, 6 * shape.vocab_size * hidden),
    ):
        better = _up(size, math.lcm(TILE, shape.num_heads) if part == "layers" else TILE)
        if size % ALIGNMENT:
            share = flops / total
            slow = share * cost / (1 - share + share * cost)  # share of the time now
            reason = f"no multiple of {ALIGNMENT}: the {part}'s products take {cost} times as long"
            unaligned.append(Advice(setting, size, better, reason, slow * (1 - 1 / cost)))
        elif size % TILE:
            reason = (
                f"no multiple of {TILE}: products go by tiles of {TILE} or 128, the last one padded"
                " (under 8 % on an H200)"
            )
            untiled.append(Advice(setting, size, better, reason, None))
    return unaligned + untiled


def _head_size(shape: ModelShape, sequence_length: int) -> list[Advice]:
    size = shape.head_dim
    sizes = [better for better in HEAD_SIZES if shape.hidden_size % better == 0]
    if size in HEAD_SIZES or not sizes:
        return []
    padded = next((padded for padded in PADDED if padded >= size), None)
    if padded is None:
        reason, gain = f"heads of {size} are larger than attention kernels take (256): attention runs without one", None
    else:
        attention = 6 * shape.num_layers * shape.attention_width * sequence_length
        share = attention / flops_per_token(shape, sequence_length, "exact")
        wasted = share * (padded / size - 1)
        reason = f"heads of {size} are padded to {padded} by attention kernels, which are tuned for 64 and 128"
        gain = wasted / (1 + wasted)
    heads = shape.hidden_size // min(sizes, key=lambda better: abs(better - size))
    return [Advice("model.num_attention_heads", shape.num_heads, heads, reason, gain)]


def _feed_forward_ratio(shape: ModelShape) -> list[Advice]:
    ratio = _up(shape.intermediate_size, TILE) / shape.hidden_size  # after the advice on alignment
    if RATIO_RANGE[0] <= ratio <= RATIO_RANGE[1]:
        return []
    better = _up(int(FEED_FORWARD_RATIO * shape.hidden_size), TILE)
    reason = f"{ratio:.1f} times the hidden size; models of this structure have 8/3, and losses are best near it"
    return [Advice("model.intermediate_size", shape.intermediate_size, better, reason, None)]


def _table(shape: ModelShape) -> list[Advice]:
    counts = count_parameters(shape)
    share = (counts.embedding + counts.head) / counts.total
    if shape.tie_embeddings or share < LARGE_TABLE_SHARE:
        return []
    reason = (
        f"embedding and head are {share:.0%} of all parameters; tied, they are one table, and {counts.head:,} fewer"
    )
    return [Advice("model.tie_word_embeddings", 0, 1, reason, None)]


def _few_tokens(micro_batch: int, sequence_length: int) -> list[Advice]:
    tokens = micro_batch * sequence_length
    if tokens >= FEW_TOKENS:
        return []
    reason = f"{tokens:,} tokens do not fill a GPU's products; from {FEW_TOKENS:,} on little is left to gain"
    return [Advice("train.micro_batch", micro_batch, -(-FEW_TOKENS // sequence_length), reason, None)]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
