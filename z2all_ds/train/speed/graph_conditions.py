"""Whether a run's micro-batches can be replayed as CUDA graphs (`graphed.py`). Loads no torch: the planner asks too."""

from collections.abc import Mapping

from z2all_ds.base.config import RunConfig
from z2all_ds.zero.ds_config import ResolvedDeepSpeed

USES_SINKS = {"rms_norm": ("triton",), "linear": ("torch", "fp8")}
"""Backends that put their weight's gradient into its sink; those of ops that are not named here all do."""


def has_sinks(resolved: ResolvedDeepSpeed, run: RunConfig) -> bool:
    """Products add to fp32 gradients themselves (`gradient_sinks.py`): where DeepSpeed takes its BF16 optimizer."""
    in_fp32 = resolved.dtype == "bf16" and resolved.dtypes.accumulation == "fp32"
    return resolved.stage == 1 and in_fp32 and not resolved.offload_optimizer and run.train.compile == "none"


def why_no_graphs(device_type: str, run: RunConfig, backends: Mapping[str, str], has_sinks: bool) -> str | None:
    """One line where micro-batches cannot be captured, None where they can. `backends` has that of each op."""
    if device_type != "cuda":
        return f"needs a GPU, the model is on {device_type}"
    if not has_sinks:
        return "needs ZeRO-1 in bf16 with gradients accumulated in fp32 (several micro-batches a step)"
    model = run.model
    drops = model.attention_dropout or model.dropout1 or model.dropout2
    if run.train.activation_checkpointing != "none" and drops:
        return "to drop the same again, activation checkpointing reads the random numbers' state: no capture can"
    if (model.rope_scaling or {}).get("rope_type") == "dynamic":
        return "dynamic rope scaling looks at every batch's length"
    for op, with_sinks in USES_SINKS.items():
        if backends[op] not in with_sinks:
            return f"{op} {backends[op]} hands its weight's gradient to autograd"
    return None
