"""Activation checkpointing: what a layer computes between its halves is made again in the backward pass, not kept.

full: a layer keeps its input alone (transformers' own way). selective: of the halves named, only the input is kept.
Worth the most per byte is the feed-forward, whose gate_up is wider than everything else a layer keeps; next comes
attention, whose kernel has to run again.

Under ZeRO-3 the weights are there when a half is made again: the whole layer's are gathered before its backward pass.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.checkpoint import checkpoint

RECOMPUTABLE_PARTS = ("attention", "mlp")


def set_recompute(model: Any, choice: str, parts: Iterable[str] = ()) -> None:
    """Puts `train.activation_checkpointing` and `train.recompute` into force on a Z2allForCausalLM."""
    parts = frozenset(parts) if choice == "selective" else frozenset()
    assert choice in ("none", "full", "selective") and parts <= frozenset(RECOMPUTABLE_PARTS), (choice, parts)
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()
    if choice == "full":
        draws = any(layer.draws_random_numbers for layer in model.model.layers)
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": draws})
    for layer in model.model.layers:
        layer.recomputed_parts = parts


def recompute(part: Callable[..., Any], *inputs: Any, draws_random_numbers: bool) -> Any:
    """`part(*inputs)`, of which only the inputs are kept. What draws random numbers must draw the same again.

    To remember their state the host waits for the device, so it is done only where they are drawn.
    """
    return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=draws_random_numbers)
