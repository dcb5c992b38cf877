"""Which share of a GPU's peak our training computes at. Measured on one H200 with z2all_1b and the default ops
(docs/results/2026-11-15_h200_bench_step_*.jsonl); on another GPU it is an assumption, and `z2all bench step` there a
better one."""

from collections.abc import Mapping

IN_GRAPHS, LAUNCHED, AT_STAGE_3 = 0.556, 0.525, 0.506
"""Exact operations over the 16-bit peak: ZeRO-1 with CUDA graphs, ZeRO-1 and 2 without, ZeRO-3, whose hooks cost time
even where nothing is sent."""
TOKENS_LOST = 160
"""For which a micro-batch takes longer than its tokens: 4,096 ran at 97 % of the rate of 16,384."""
IN_8_BITS = 1.24
"""Times as fast with ops.linear=fp8."""


def reached_share(tokens: int, stage: int, graphs: bool, ops: Mapping[str, str]) -> float:
    """Of the peak, in micro-batches of `tokens`."""
    share = IN_GRAPHS if graphs else AT_STAGE_3 if stage == 3 else LAUNCHED
    faster = IN_8_BITS if ops["linear"] != "torch" else 1.0
    return min(1.0, share * faster * tokens / (tokens + TOKENS_LOST))
