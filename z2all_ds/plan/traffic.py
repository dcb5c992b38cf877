"""What each rank sends in an optimizer step under a ZeRO JSON, as DeepSpeed 0.19.8 does it.

The ZeRO paper counts in parameters Ψ: 2Ψ for stages 0 to 2 (gradients reduced to their owners, weights gathered), 3Ψ
for stage 3 (weights gathered twice). Three things make it more here, and are counted: a message has bytes, and fp32
gradients twice those of bf16; stages 2 and 3 send the gradients of every micro-batch; and stages 1 and 2 reduce by
all-reduce (2Ψ) to all, not to owners alone.
"""

from dataclasses import dataclass
from typing import Any

from z2all_ds.train.ds_config import ResolvedDeepSpeed
from z2all_ds.train.ds_json import zero_section

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ENGINE_BUCKET = 500_000_000
"""Elements that DeepSpeed's engine sends at a time where its optimizer does not send itself."""


@dataclass(frozen=True)
class Collective:
    """The same message, several times a step."""

    what: str
    kind: str
    """all_reduce, all_gather or reduce_scatter."""
    size: int
    """Bytes of the whole, over all ranks' parts."""
    times: int
    """A step."""
    calls: int
    """Into which it is cut."""
    beside_compute: bool
    """DeepSpeed lets it run while the next part is computed."""

    def sent(self, ranks: int) -> float:
        """Bytes that one rank sends in a step, by a ring or anything as good."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * (ranks - 1) / ranks * self.size * self.times


def collectives(resolved: ResolvedDeepSpeed, parameters: int, layers: int) -> list[Collective]:
    """In the order of a step."""
    zero = zero_section(resolved.config)
    gradient_bytes = BYTES[resolved.dtypes.communication if resolved.dtypes.communication != "none" else "fp32"]
    weight_bytes = BYTES[resolved.dtypes.compute]
    if resolved.stage == 3:
        return _of_stage_3(resolved, zero, parameters, layers, weight_bytes, gradient_bytes)
    times = resolved.accumulation if resolved.stage == 2 else 1
    bucket = int(zero.get("reduce_bucket_size") or ENGINE_BUCKET) if resolved.stage else ENGINE_BUCKET
    overlap = resolved.stage == 2 and bool(zero.get("overlap_comm"))
    gradients = Collective(
        "gradients", "all_reduce", parameters * gradient_bytes, times, -(-parameters // bucket), overlap
    )
    if resolved.stage == 0:
        return [gradients]
    # One call a parameter group: matrices, and norms with biases.
    weights = Collective("weights", "all_gather", parameters * weight_bytes, 1, 2, False)
    return [gradients, weights]


def _of_stage_3(
    resolved: ResolvedDeepSpeed, zero: dict[str, Any], parameters: int, layers: int, weight: int, gradient: int
) -> list[Collective]:
    parts = layers + 2  # a layer's weights are gathered in one go; so are table and head
    times, bucket = resolved.accumulation, int(zero.get("reduce_bucket_size") or ENGINE_BUCKET)
    overlap = bool(zero.get("overlap_comm", True))
    return [
        Collective("weights, forward", "all_gather", parameters * weight, times, parts, True),
        Collective("weights, backward", "all_gather", parameters * weight, times, parts, True),
        Collective("gradients", "reduce_scatter", parameters * gradient, times, -(-parameters // bucket), overlap),
    ]
