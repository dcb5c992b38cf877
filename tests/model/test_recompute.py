"""Activation checkpointing: it saves memory, and gradients, random numbers and gradient sinks stay the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.pairs import some_ids, tiny_config
from tests.ops.comparing import on_gpu
from z2all_ds.model import Z2allForCausalLM
from z2all_ds.model.recompute import set_recompute
from z2all_ds.ops import Situation, gradient_sink, resolve_ops

CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "none": ("none", ("mlp",)),
    "mlp": ("selective", ("mlp",)),
    "attention": ("selective", ("attention",)),
    "both": ("selective", ("attention", "mlp")),
    "full": ("full", ("mlp",)),
}


def model_in_training(choice: str, device: str = "cpu", ops: Any = None, **changes: Any) -> Z2allForCausalLM:
    torch.manual_seed(0)
    model = Z2allForCausalLM(tiny_config(**changes), ops).to(device).train()
    set_recompute(model, *CHOICES[choice])
    return model


def loss_of(model: Z2allForCausalLM) -> Tensor:
    ids = some_ids(2, 17).to(model.device)
    documents = torch.arange(16, device=ids.device)[None].expand(2, -1) // 6
    torch.manual_seed(9)
    loss: Tensor = model(ids[:, :-1], next_tokens=ids[:, 1:], document_ids=documents).loss
    torch.rand(3)  # draw random numbers between the forward and the backward pass
    return loss


def gradients(model: Z2allForCausalLM) -> dict[str, Tensor]:
    loss_of(model).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["no-dropout", "dropout"])
@pytest.mark.parametrize("choice", [name for name in CHOICES if name != "none"])
def test_gradients_are_bitwise_equal_with_and_without_recomputation(choice: str, dropout: float) -> None:
    shares: dict[str, Any] = dict.fromkeys(("attention_dropout", "dropout1", "dropout2"), dropout)
    wanted = gradients(model_in_training("none", **shares))
    found = gradients(model_in_training(choice, **shares))
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def bytes_kept(choice: str) -> int:
    """Return the bytes that autograd keeps for the backward pass, without weights; shared memory counts once."""
    model = model_in_training(choice)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = (memory.nbytes(), tensor)  # keep the tensor, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model)
    total = sum(size for size, _ in kept.values())
    loss.backward()
    return total


def test_each_choice_keeps_less_memory_than_the_one_before() -> None:
    sizes = [bytes_kept(choice) for choice in ("none", "attention", "mlp", "both", "full")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    # gate_up and the product have 3 x 88 values of 4 bytes per token, for 32 tokens in 2 layers. The input of the
    # feed-forward (64 values per token) is kept instead.
    assert sizes[0] - sizes[2] > 3 * 88 * 4 * 32 * 2 - 64 * 4 * 32 * 2


def test_a_recompute_choice_can_be_changed_later() -> None:
    model = model_in_training("full")
    assert model.is_gradient_checkpointing
    set_recompute(model, "selective", ["attention"])
    assert not model.is_gradient_checkpointing
    assert model.model.layers[1].recomputed_parts == {"attention"}
    set_recompute(model, "none")
    assert all(not layer.recomputed_parts for layer in model.model.layers)


def test_an_unknown_part_fails_an_assertion() -> None:
    with pytest.raises(AssertionError):
        set_recompute(model_in_training("none"), "selective", ["norm"])


@pytest.mark.parametrize(("choice", "asked"), [("full", True), ("both", True), ("none", False)])
def test_nothing_is_recomputed_in_eval_mode(choice: str, asked: bool) -> None:
    """The norm of the first layer runs twice per training step if it is recomputed, otherwise once."""
    model = model_in_training(choice)
    calls = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    loss_of(model).backward()
    assert len(calls) == 1 + asked
    calls.clear()
    model.eval()
    loss_of(model).backward()
    assert len(calls) == 1


@pytest.mark.parametrize("choice", ["mlp", "both"])
def test_a_cache_in_training_is_filled_once(choice: str) -> None:
    from transformers import DynamicCache

    model = model_in_training(choice)
    cache = DynamicCache(config=model.config)
    model(some_ids(2, 7), past_key_values=cache).logits.sum().backward()
    assert cache.get_seq_length() == 7


def gradients_in_sinks(model: Z2allForCausalLM) -> dict[str, Tensor]:
    """Return the gradients from fp32 sinks, or from autograd for weights whose op backend does not use a sink."""
    sinks = {}
    for name, weight in model.named_parameters():
        sinks[name] = torch.zeros_like(weight, dtype=torch.float32)
        gradient_sink.attach(weight, sinks[name])
    loss_of(model).backward()
    weights = dict(model.named_parameters())
    assert any(weight.grad is None for weight in weights.values())
    return {name: sink if weights[name].grad is None else sink + weights[name].grad for name, sink in sinks.items()}


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_are_added_to_their_sinks_once(choice: str) -> None:
    wanted = gradients(model_in_training("none"))
    found = gradients_in_sinks(model_in_training(choice))
    for name, gradient in wanted.items():
        # The matrix product into the sink may sum over the 32 tokens in a different order.
        assert (found[name] - gradient).abs().max() <= 1e-6 * gradient.abs().max(), name


@pytest.mark.parametrize("choice", [pytest.param(name, marks=on_gpu) for name in ("mlp", "both", "full")])
def test_gpu_gradients_in_sinks_stay_the_same_with_auto_backends(choice: str) -> None:
    """Recomputation does not change bf16 gradients with the backends that `auto` selects on a GPU."""

    def found(name: str) -> dict[str, Tensor]:
        ops = resolve_ops({}, Situation("cuda", "bf16", 64))
        model = model_in_training(name, "cuda", ops, hidden_size=256, intermediate_size=512)
        return gradients_in_sinks(model.to(torch.bfloat16))

    wanted, again = found("none"), found(choice)
    for name, gradient in wanted.items():
        # The kernels and values are the same, but attention's backward kernels sum in a nondeterministic order, which
        # costs a few bf16 roundings (2^-8). A gradient that is lost or added twice is off by 100 %.
        assert (again[name] - gradient).abs().max() <= 2**-5 * gradient.abs().max(), name
