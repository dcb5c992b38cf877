"""Bytes of model states per GPU (weights, gradients, optimizer) under ZeRO 0 to 3, with and without optimizer offload.

The arithmetic of the ZeRO paper, with P parameters, N GPUs and Adam: weights and gradients take the compute dtype
(2 bytes each for bf16 and fp16), the optimizer 12 bytes (fp32 master weights and two moments). Stage 1 divides the
optimizer by N, stage 2 the gradients too, stage 3 the weights too. What differs from the paper was read in
DeepSpeed 0.19.8 and is told where it is counted.
"""

from dataclasses import dataclass

from z2all_ds.base.errors import ConfigError

BYTES_PER_DTYPE = {"bf16": 2, "fp16": 2, "fp32": 4}
FP32_BYTES = 4
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class ModelStates:
    """Bytes for one GPU; `host` is what its process keeps in main memory instead, when the optimizer is offloaded."""

    weights: int
    gradients: int
    accumulation: int
    """fp32 sums of the gradients of several micro-batches, where these are asked for in a 16-bit run."""
    master_weights: int
    moments: int
    host: int

    @property
    def gpu(self) -> int:
        return self.weights + self.gradients + self.accumulation + self.master_weights + self.moments


def zero_states(
    parameters: int,
    num_gpus: int,
    stage: int,
    compute_dtype: str = "bf16",
    accumulation_dtype: str | None = None,
    offload_optimizer: bool = False,
) -> ModelStates:
    """Model states of one GPU out of `num_gpus` for a model of `parameters` parameters trained with Adam.

    `accumulation_dtype` None accumulates gradients in the compute dtype, which is DeepSpeed's default.
    """
    _check(parameters, num_gpus, stage, compute_dtype, accumulation_dtype, offload_optimizer)
    bytes_per_weight = BYTES_PER_DTYPE[compute_dtype]

    def split_from(first_stage: int) -> int:
        """How many GPUs share a state that is split from this stage on."""
        return num_gpus if stage >= first_stage else 1

    def share(bytes_each: int, gpus: int) -> int:
        return bytes_each * -(-parameters // gpus)  # rounded up: the largest share decides whether it fits

    weights = share(bytes_per_weight, split_from(3))
    gradients = share(bytes_per_weight, split_from(2))
    accumulates_apart = accumulation_dtype == "fp32" and compute_dtype != "fp32"
    # The 16-bit gradients of a micro-batch live until they are added, so both are there at the end of a backward.
    accumulation = share(FP32_BYTES, split_from(2)) if accumulates_apart else 0
    moments = share(2 * FP32_BYTES, split_from(1))
    # In fp32 the weights are their own master; only stages 1 and 2 clone their partition all the same.
    needs_master = compute_dtype != "fp32" or stage in (1, 2) or offload_optimizer
    master_weights = share(FP32_BYTES, split_from(1)) if needs_master else 0

    if not offload_optimizer:
        return ModelStates(weights, gradients, accumulation, master_weights, moments, host=0)
    # Master weights, moments and fp32 gradients of the own partition move to the host. At stages 2 and 3 gradients
    # only pass through the GPU's buckets on their way there; stage 1 holds them all until the reduction.
    host = master_weights + moments + share(FP32_BYTES, num_gpus)
    return ModelStates(weights, gradients if stage == 1 else 0, accumulation=0, master_weights=0, moments=0, host=host)


def _check(
    parameters: int, num_gpus: int, stage: int, compute_dtype: str, accumulation_dtype: str | None, offload: bool
) -> None:
    for name, value in (("parameters", parameters), ("number of GPUs", num_gpus)):
        if value < 1:
            raise ConfigError(f"{name} = {value}", "must be at least 1", "Give a positive number.")
    if stage not in ZERO_STAGES:
        raise ConfigError(f"ZeRO stage {stage}", "there are the stages 0, 1, 2 and 3", "Give one of these.")
    for name, dtype in (("compute dtype", compute_dtype), ("accumulation dtype", accumulation_dtype or compute_dtype)):
        if dtype not in BYTES_PER_DTYPE:
            raise ConfigError(f"{name} {dtype!r}", "unknown", f"Use one of {', '.join(BYTES_PER_DTYPE)}.")
    if stage == 0 and offload:
        raise ConfigError("optimizer offload at ZeRO stage 0", "needs a ZeRO stage", "Use stage 1, 2 or 3.")
    if stage == 0 and compute_dtype == "bf16" and accumulation_dtype == "fp32":
        raise ConfigError(
            "bf16 with fp32 accumulation at ZeRO stage 0", "DeepSpeed refuses it", "Use stage 1, 2 or 3, or fp32."
        )
