"""Advice on the sizes of a model, each with its reason and what following it would gain.

Times are of products on an H200 (`z2all bench shapes`, docs/results/2026-11-15_h200_bench_shapes.json): a size that is
no multiple of 8 cost 3.7 (feed-forward) to 5.7 (head) times as much; among multiples of 8, whether of 64, 128 or 512,
no difference was larger than 8 %, and none followed the multiple. On another GPU, ask `z2all bench shapes` there.
"""

import math
from dataclasses import dataclass

from z2all_ds.base.accounting import ModelShape, count_matmul_parameters, count_parameters, flops_per_token

ALIGNMENT, TILE = 8, 64
UNALIGNED_COST = {"feed-forward": 3.7, "head": 5.7}
"""Times the cost of the next multiple of 8."""
HEAD_SIZES = (64, 128)
"""For which attention kernels are tuned; others are filled up to the next of `FILLED_UP`."""
FILLED_UP = (32, 64, 96, 128, 192, 256)
FEED_FORWARD_RATIO = 8 / 3
"""Of hidden size: SwiGLU's three matrices then have what two of four times the hidden size had."""
RATIO_RANGE = (2.0, 4.5)
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
    """Share of the step's computing time that it saves, by the figures above; None where it is not one of time."""


def advise(shape: ModelShape, micro_batch: int, sequence_length: int) -> list[Advice]:
    """What to change first comes first; empty where nothing is amiss."""
    advice = [
        *_unaligned(shape, sequence_length),
        *_tiles(shape),
        *_head_size(shape, sequence_length),
        *_feed_forward_ratio(shape),
        *_table(shape),
        *_few_tokens(micro_batch, sequence_length),
    ]
    return sorted(advice, key=lambda one: -(one.gain or 0.0))


def _unaligned(shape: ModelShape, sequence_length: int) -> list[Advice]:
    total = flops_per_token(shape, sequence_length, "exact")
    feed_forward = 18 * shape.num_layers * shape.hidden_size * shape.intermediate_size / total
    head = 6 * shape.vocab_size * shape.hidden_size / total
    products = 6 * count_matmul_parameters(shape) / total
    advice = []
    for setting, size, part, share in (
        ("model.hidden_size", shape.hidden_size, "layers", products),
        ("model.intermediate_size", shape.intermediate_size, "feed-forward", feed_forward),
        ("model.vocab_size", shape.vocab_size, "head", head),
    ):
        if size % ALIGNMENT:
            # Of a hidden size none was measured; it is a side of every product, the feed-forward's among them.
            times = UNALIGNED_COST.get(part, UNALIGNED_COST["feed-forward"])
            reason = f"no multiple of {ALIGNMENT}: the {part}'s products take {times} times as long"
            # The share that its products take now, and what is left of it afterwards.
            slow = share * times / (1 - share + share * times)
            advice.append(Advice(setting, size, _better(shape, setting, size), reason, slow * (1 - 1 / times)))
    return advice


def _tiles(shape: ModelShape) -> list[Advice]:
    """Told without a gain: among multiples of 8 we have measured none that follows the multiple."""
    sizes = {
        "model.hidden_size": shape.hidden_size,
        "model.intermediate_size": shape.intermediate_size,
        "model.vocab_size": shape.vocab_size,
    }
    reason = (
        f"no multiple of {TILE}: products go by tiles of {TILE} or 128, the last one filled up (under 8 % on an H200)"
    )
    return [
        Advice(setting, size, _better(shape, setting, size), reason, None)
        for setting, size in sizes.items()
        if size % TILE and size % ALIGNMENT == 0
    ]


def _better(shape: ModelShape, setting: str, size: int) -> int:
    """The next multiple; of a hidden size, one that the heads divide too."""
    return _up(size, math.lcm(TILE, shape.num_heads) if setting == "model.hidden_size" else TILE)


def _head_size(shape: ModelShape, sequence_length: int) -> list[Advice]:
    size = shape.head_dim
    if size in HEAD_SIZES:
        return []
    padded = next((filled for filled in FILLED_UP if filled >= size), None)
    better = min(
        (heads for heads in HEAD_SIZES if shape.hidden_size % heads == 0), key=lambda one: abs(one - size), default=0
    )
    if not better:
        return []
    if padded is None:
        reason, gain = f"heads of {size} are larger than attention kernels take (256): attention runs without one", None
    else:
        attention = 6 * shape.num_layers * shape.attention_width * sequence_length
        share = attention / flops_per_token(shape, sequence_length, "exact")
        wasted = share * (padded / size - 1)
        reason = f"heads of {size} are filled up to {padded} by attention kernels, which are tuned for 64 and 128"
        gain = wasted / (1 + wasted)
    return [Advice("model.num_attention_heads", shape.num_heads, shape.hidden_size // better, reason, gain)]


def _feed_forward_ratio(shape: ModelShape) -> list[Advice]:
    ratio = shape.intermediate_size / shape.hidden_size
    if RATIO_RANGE[0] <= ratio <= RATIO_RANGE[1]:
        return []
    better = _up(int(FEED_FORWARD_RATIO * shape.hidden_size), 64)
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
    better = -(-FEW_TOKENS // sequence_length)
    reason = f"{tokens:,} tokens do not fill a GPU's products; from {FEW_TOKENS:,} on little is left to gain"
    return [Advice("train.micro_batch", micro_batch, better, reason, None)]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
