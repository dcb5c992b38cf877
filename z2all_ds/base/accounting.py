"""Parameter and FLOP counts of a Llama-structure model; no torch.

Two conventions of "FLOPs per token" are in use, and a utilization (MFU) must state which one it uses:

- `origin`: 6 N + 12 L d S, the formula of the PaLM paper. N counts every parameter, including the embedding table,
  although a lookup multiplies nothing; attention is counted over the full square of positions, although a causal mask
  needs half. It gives higher values, and published tables use it.
- `exact`: 6 N_matmul + 6 L d_attention S. Only weights that enter a matrix product are counted (a tied embedding
  counts once, as the head), and attention over the causal half. This is the required work.

Both count a multiply-add as two operations and the backward pass as twice the forward; neither counts recomputation,
which `hardware_flops_per_token` adds to the exact one (HFU instead of MFU).
Both are averages over the positions of a sequence of length S whose tokens all attend to one another: with document
masks, less attention is computed than either counts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from z2all_ds.base.errors import ConfigError

FLOP_CONVENTIONS = ("origin", "exact")


@dataclass(frozen=True)
class ModelShape:
    """The sizes that fix the parameter count of a Llama-structure model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Biases on q, k, v and the output projection, as with `attention_bias` of a Llama config."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}", "must be at least 1", "Use a positive number.")
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"hidden_size = {self.hidden_size} with num_heads = {self.num_heads}",
                "every head gets an equal share of the hidden size",
                "Make hidden_size a multiple of num_heads.",
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads = {self.num_heads} with num_kv_heads = {self.num_kv_heads}",
                "every key/value head serves the same number of query heads",
                "Make num_heads a multiple of num_kv_heads.",
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def attention_width(self) -> int:
        """Total width of all query heads (d_attention in the formulas)."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts by part. `head` is 0 if it shares the embedding table."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms + self.head


def count_parameters(shape: ModelShape) -> ParameterCounts:
    """Return the parameter counts of a `LlamaForCausalLM` of this shape, exactly."""
    biases_per_layer = shape.attention_width + 2 * _kv_width(shape) + shape.hidden_size if shape.attention_bias else 0
    table = shape.vocab_size * shape.hidden_size
    return ParameterCounts(
        embedding=table,
        attention=shape.num_layers * (_attention_matrices_per_layer(shape) + biases_per_layer),
        mlp=shape.num_layers * _mlp_matrices_per_layer(shape),
        norms=(2 * shape.num_layers + 1) * shape.hidden_size,
        head=0 if shape.tie_embeddings else table,
    )


def count_matmul_parameters(shape: ModelShape) -> int:
    """Count the weights in matrix products: no embedding lookup, norms or biases; always the head, tied or not."""
    per_layer = _attention_matrices_per_layer(shape) + _mlp_matrices_per_layer(shape)
    return shape.num_layers * per_layer + shape.vocab_size * shape.hidden_size


def flops_per_token(shape: ModelShape, sequence_length: int, convention: str = "origin") -> int:
    """Return the forward and backward FLOPs per token at `sequence_length`; conventions: see the module docstring."""
    if sequence_length < 1:
        raise ConfigError(f"sequence_length = {sequence_length}", "must be at least 1", "Use a positive number.")
    if convention == "origin":
        attention = 12 * shape.num_layers * shape.hidden_size * sequence_length
        return 6 * count_parameters(shape).total + attention
    if convention == "exact":
        causal_attention = 6 * shape.num_layers * shape.attention_width * sequence_length
        return 6 * count_matmul_parameters(shape) + causal_attention
    raise ConfigError(f"FLOP convention {convention!r}", "unknown", f"Use one of {', '.join(FLOP_CONVENTIONS)}.")


def hardware_flops_per_token(
    shape: ModelShape,
    sequence_length: int,
    activation_checkpointing: str = "none",
    recompute: Sequence[str] = (),
    cross_entropy: str = "",
) -> int:
    """Return the FLOPs per token that are executed: the exact convention, plus a second forward pass of recomputed
    parts (settings `train.activation_checkpointing` and `train.recompute`) and of the head if the cross_entropy backend
    recomputes logits. Recomputation inside kernels is not counted.

    The last product of a part is assumed to be recomputed, as this package's GPU kernels do; torch's own ops stop right
    before it, and for them this is up to 5 % too high.
    """
    exact = flops_per_token(shape, sequence_length, "exact")
    head = 2 * shape.vocab_size * shape.hidden_size
    mlp = 2 * shape.num_layers * _mlp_matrices_per_layer(shape)
    # The forward pass is a third: the backward pass has two products for each product of the forward pass.
    forward = {"attention": exact // 3 - head - mlp, "mlp": mlp}
    again = {"none": (), "full": tuple(forward), "selective": tuple(recompute)}[activation_checkpointing]
    return exact + sum(forward[part] for part in again) + (head if cross_entropy == "chunked" else 0)


def operations_per_token(
    shape: ModelShape, sequence_length: int, activation_checkpointing: str, recompute: Sequence[str], cross_entropy: str
) -> dict[str, int]:
    """Return the FLOPs per token for the three utilizations: MFU by both conventions, and HFU (`executed`)."""
    executed = hardware_flops_per_token(shape, sequence_length, activation_checkpointing, recompute, cross_entropy)
    return {name: flops_per_token(shape, sequence_length, name) for name in FLOP_CONVENTIONS} | {"executed": executed}


def _kv_width(shape: ModelShape) -> int:
    return shape.num_kv_heads * shape.head_dim


def _attention_matrices_per_layer(shape: ModelShape) -> int:
    q_and_out = 2 * shape.hidden_size * shape.attention_width
    k_and_v = 2 * shape.hidden_size * _kv_width(shape)
    return q_and_out + k_and_v


def _mlp_matrices_per_layer(shape: ModelShape) -> int:
    return 3 * shape.hidden_size * shape.intermediate_size  # gate, up, down


# Dense (not "with sparsity") bf16 peaks with fp32 accumulation, from NVIDIA's data sheets; V100 has no bf16, its value
# is fp16. The first match wins. Variants with other clocks or fewer cores under the same name (NVL, Laptop, Ti, D, a
# MIG slice) must not match: a wrong peak gives a wrong MFU, an unknown one gives none.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bH100\b.*\bPCIe\b", 756e12),
    (r"\b(GH200|H200|H100|H800)\b", 989e12),
    (r"\b(A100|A800)\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bA6000\b", 154.8e12),
    (r"\b4090\b", 165.2e12),
    (r"\b3090\b", 71e12),
    (r"\bV100\b(?!.*PCIE)", 125e12),
)
_OTHER_VARIANT = re.compile(r"\b(NVL|Laptop|Ti|D|SUPER|MIG)\b|\bH800\b.*\bPCIe\b", re.IGNORECASE)


def peak_flops(device_name: str) -> float | None:
    """Return the dense 16-bit FLOP/s of a GPU by its CUDA device name; None if unknown."""
    if _OTHER_VARIANT.search(device_name):
        return None
    for pattern, operations_per_second in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return operations_per_second
    return None


def mfu(tokens_per_second: float, flops_per_token: float, peak: float | None) -> float | None:
    """Return the model FLOPs utilization, 0 to 1, for devices with `peak` FLOP/s in total; None without a peak."""
    if not peak:
        return None
    return tokens_per_second * flops_per_token / peak
