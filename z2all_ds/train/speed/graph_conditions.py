"""Whether a run's micro-batches can be replayed as CUDA graphs (`graphed.py`). No torch: the planner uses it too."""

from collections.abc import Mapping

from z2all_ds.base.config import RunConfig
from z2all_ds.zero.ds_config import ResolvedDeepSpeed

USES_SINKS = {"rms_norm": ("triton",), "linear": ("torch", "fp8")}
"""Backends that write their weight's gradient into its sink; all backends of ops not listed here do."""


def has_sinks(resolved: ResolvedDeepSpeed, run: RunConfig) -> bool:
    """Return whether products add to fp32 gradients directly (`gradient_sinks.py`): with DeepSpeed's BF16 optimizer."""
    in_fp32 = resolved.dtype == "bf16" and resolved.dtypes.accumulation == "fp32"
    return resolved.stage == 1 and in_fp32 and not resolved.offload_optimizer and run.train.compile == "none"


def why_no_graphs(device_type: str, run: RunConfig, backends: Mapping[str, str], has_sinks: bool) -> str | None:
    """Return why micro-batches cannot be captured, or None. `backends` has the backend of each op."""
    if device_type != "cuda":
        return f"needs a GPU, the model is on {device_type}"
    if not has_sinks:
        return "needs ZeRO-1 in bf16 with gradients accumulated in fp32 (several micro-batches per step)"
    model = run.model
    drops = model.attention_dropout or model.dropout1 or model.dropout2
    if run.train.activation_checkpointing != "none" and drops:
        return "activation checkpointing with dropout reads the random state, which cannot be captured"
    if (model.rope_scaling or {}).get("rope_type") == "dynamic":
        return "dynamic rope scaling depends on the length of each batch"
    for op, with_sinks in USES_SINKS.items():
        if backends[op] not in with_sinks:
            return f"{op} {backends[op]} passes its weight's gradient to autograd"
    return None
