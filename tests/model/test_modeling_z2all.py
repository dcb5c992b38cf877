"""Z2allForCausalLM compared with Llama: single and packed documents, cache, generation, gradient checkpointing."""

import pytest
import torch
from torch import Tensor

from tests.helpers.stock_names import to_stock
from tests.model.pairs import SHAPES, pair, relative_difference, some_ids, tiny_config, tiny_model
from tests.ops.comparing import on_gpu
from z2all_ds.base.errors import ConfigError
from z2all_ds.data.packing import Sample, make_batch
from z2all_ds.model import Z2allForCausalLM
from z2all_ds.model.modeling_z2all import TokenLosses
from z2all_ds.ops import Situation, resolve_ops
from z2all_ds.ops.cross_entropy import IGNORED_LABEL

FP32_ORDER = 1e-6
"""Tolerance in fp32 with equal weights; fused products sum in a different order (measured: 0 to 3e-7, relative)."""
FP32_PATHS = 1e-5
"""Tolerance for sums of different lengths or a different attention kernel, in two layers (measured: up to 1e-6)."""


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_llamas(shape: str) -> None:
    ours, llama = pair(**SHAPES[shape])
    ids = some_ids(2, 17)
    with torch.no_grad():
        assert relative_difference(ours(ids).logits, llama(ids).logits) <= FP32_ORDER


@pytest.mark.parametrize("shape", ["grouped", "tied"])
def test_loss_and_gradients_are_llamas(shape: str) -> None:
    ours, llama = pair(**SHAPES[shape])
    ids = some_ids(2, 17)
    labels = ids.clone()
    labels[0, :5] = IGNORED_LABEL
    losses = [model(ids, labels=labels).loss for model in (ours, llama)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=FP32_ORDER)
    for loss in losses:
        loss.backward()
    gradients = to_stock({name: p.grad for name, p in ours.named_parameters()}, ours.config)
    wanted = {name: p.grad for name, p in llama.named_parameters()}
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # Sums over all tokens in a different order.
        assert relative_difference(gradients[name], gradient) <= FP32_PATHS, name


def test_num_items_in_batch_divides_the_loss_as_in_llama() -> None:
    ours, llama = pair()
    ids = some_ids(2, 9)
    for count in (40, torch.tensor(40)):
        found, wanted = (model(ids, labels=ids, num_items_in_batch=count).loss.item() for model in (ours, llama))
        assert found == pytest.approx(wanted, rel=FP32_ORDER)
    assert found != pytest.approx(ours(ids, labels=ids).loss.item(), rel=0.1)


def test_next_tokens_give_the_same_losses_as_labels() -> None:
    model = tiny_model()
    ids = some_ids(2, 9)
    ids_in, next_tokens = ids[:, :-1], ids[:, 1:].clone()
    labels = ids.clone()
    labels[1, 4], next_tokens[1, 3] = IGNORED_LABEL, IGNORED_LABEL
    outputs = model(ids_in, next_tokens=next_tokens)
    assert isinstance(outputs, TokenLosses)
    assert outputs.losses.shape == next_tokens.shape
    assert outputs.losses[1, 3].item() == 0.0
    assert not outputs.losses.requires_grad
    assert outputs.loss.item() == pytest.approx(outputs.losses.sum().item() / 16, rel=FP32_ORDER)
    assert (outputs.losses.sum() / 15).item() == pytest.approx(model(ids, labels=labels).loss.item(), rel=FP32_ORDER)


def test_a_batch_of_the_stream_is_an_input_as_it_is() -> None:
    model, tokens = tiny_model(), some_ids(1, 9)[0]
    batch = make_batch([Sample(tokens.numpy(), [8], 0, continues=True)])
    outputs = model(**batch)
    assert isinstance(outputs, TokenLosses)
    wanted = model(tokens[None], labels=tokens[None]).loss  # shifts its labels itself
    assert outputs.loss.item() == pytest.approx(wanted.item(), rel=FP32_ORDER)


@pytest.mark.parametrize("names", [("loss_mask",), ("labels", "next_tokens")])
def test_inputs_that_would_be_ignored_are_refused(names: tuple[str, ...]) -> None:
    ids = some_ids(1, 4)
    with pytest.raises(TypeError, match=" and ".join(names)):
        tiny_model()(ids, **dict.fromkeys(names, ids))


@pytest.mark.parametrize("shape", ["grouped", "one-kv-head", "biases"])
def test_greedy_generation_is_llamas_token_for_token(shape: str) -> None:
    ours, llama = pair(seed=3, **SHAPES[shape])
    ids = some_ids(2, 5)
    settings_ = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    wanted = llama.generate(ids, attention_mask=torch.ones_like(ids), **settings_)
    assert torch.equal(ours.generate(ids, attention_mask=torch.ones_like(ids), **settings_), wanted)
    # Without a cache, every step recomputes everything. The cache must not change a token.
    assert torch.equal(ours.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **settings_), wanted)
    assert wanted[:, 5:].unique().numel() > 5  # a model that repeats one token would prove little


def test_left_padding_does_not_change_generated_tokens() -> None:
    ours, llama = pair(seed=3)
    prompts = [some_ids(1, tokens, seed=tokens) for tokens in (3, 7, 6)]
    padded = torch.cat([torch.nn.functional.pad(p, (7 - p.shape[1], 0)) for p in prompts])
    attention_mask = (padded != 0).long()
    settings_ = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0}
    found = ours.generate(padded, attention_mask=attention_mask, **settings_)
    assert torch.equal(found, llama.generate(padded, attention_mask=attention_mask, **settings_))
    for row, prompt in enumerate(prompts):
        alone = ours.generate(prompt, attention_mask=torch.ones_like(prompt), **settings_)
        assert torch.equal(found[row, 7:], alone[0, prompt.shape[1] :])


def test_cached_steps_give_the_same_logits_as_one_pass() -> None:
    model = tiny_model()
    ids = some_ids(2, 9)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :4], use_cache=True)
        second = model(ids[:, 4:8], past_key_values=first.past_key_values, use_cache=True)
        third = model(ids[:, 8:], past_key_values=second.past_key_values, use_cache=True)
    pieces = torch.cat([part.logits for part in (first, second, third)], dim=1)
    assert relative_difference(pieces, whole) <= FP32_PATHS


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_give_the_same_results_as_single_ones(attention: str) -> None:
    """Logits and gradients agree, also at the borders between documents."""
    ops = resolve_ops({"attention": attention}, Situation("cpu", "fp32", 16))
    torch.manual_seed(0)
    model = Z2allForCausalLM(tiny_config(), ops)
    lengths = (5, 1, 7)
    documents = [some_ids(1, length, seed=length) for length in lengths]
    packed = torch.cat(documents, dim=1)
    document_ids = torch.cat([torch.full((1, n), number) for number, n in enumerate(lengths)], dim=1)
    position_ids = torch.cat([torch.arange(n)[None] for n in lengths], dim=1)
    direction = torch.randn(1, 13, 61, generator=torch.Generator().manual_seed(5))

    together = model(packed, document_ids=document_ids, position_ids=position_ids).logits
    (together * direction).sum().backward()
    packed_gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    (alone * direction).sum().backward()

    assert relative_difference(together, alone) <= FP32_PATHS
    for name, parameter in model.named_parameters():
        assert relative_difference(packed_gradients[name], parameter.grad) <= FP32_PATHS, name
    # The mask has an effect: without it, later documents see earlier ones.
    crossed = model(packed, position_ids=position_ids).logits
    assert relative_difference(crossed[:, 5:], alone[:, 5:]) > 0.01


@on_gpu[0]
@on_gpu[1]
@pytest.mark.parametrize("tokens", [1, 13])
def test_gpu_kernels_agree_with_the_reference_ops(tokens: int) -> None:
    """The backends that `auto` selects on a GPU agree with the reference of every op."""
    references = {"attention": "eager", **dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), "torch")}
    ids = some_ids(1, tokens).cuda()
    found = []
    for wanted in ({}, references):
        torch.manual_seed(0)
        model = Z2allForCausalLM(tiny_config(), resolve_ops(wanted, Situation("cuda", "fp32", 16))).cuda()
        outputs = model(ids, next_tokens=ids.flip(1))
        outputs.loss.backward()
        found.append({"losses": outputs.losses, **{name: p.grad for name, p in model.named_parameters()}})
    for name, tensor in found[1].items():
        if tensor.abs().max() > 1e-4:  # with one token, the gradients of q and k cancel up to rounding
            # The kernels sum in a different order, forward and backward through two layers.
            assert relative_difference(found[0][name], tensor) <= 1e-4, name


def test_gradient_checkpointing_does_not_change_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.model.layers[0].gradient_checkpointing
        ids = some_ids(2, 9)
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_equal_seeds_give_equal_weights_of_the_configured_deviation() -> None:
    first, again, other = (_fresh(seed) for seed in (7, 7, 8))
    for name, weight in first.items():
        assert torch.equal(weight, again[name]), name
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    # At least 8192 values: their sample deviation is accurate to 1 %.
    for name in ("model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"):
        assert first[name].std().item() == pytest.approx(0.2, rel=0.05)
    assert torch.equal(first["model.norm.weight"], torch.ones(64))
    assert torch.equal(first["model.layers.0.self_attn.qkv_proj.bias"], torch.zeros(128))


def _fresh(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return Z2allForCausalLM(tiny_config(attention_bias=True)).state_dict()


def test_a_model_built_on_meta_can_load_weights_later() -> None:
    model = tiny_model()
    with torch.device("meta"):
        empty = Z2allForCausalLM(model.config)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert torch.equal(empty.model.rotary.inverse_frequencies, model.model.rotary.inverse_frequencies)
    empty.load_state_dict(model.state_dict(), assign=True)
    ids = some_ids(1, 5)
    with torch.no_grad():
        assert torch.equal(empty.eval()(ids).logits, model(ids).logits)


def test_rotary_frequencies_stay_fp32_in_a_bf16_model() -> None:
    model = tiny_model()
    wanted = model.model.rotary.inverse_frequencies.clone()
    positions = torch.arange(60)[None]
    cos, sin = model.model.rotary(positions, torch.float32)
    model.to(torch.bfloat16)
    rotary = model.model.rotary
    assert rotary.inverse_frequencies.dtype == torch.float32
    assert torch.equal(rotary.inverse_frequencies, wanted)
    assert torch.equal(rotary(positions, torch.bfloat16)[0], cos.bfloat16())
    assert torch.equal(rotary(positions, torch.bfloat16)[1], sin.bfloat16())
    assert model(some_ids(1, 3)).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_resizing_the_vocabulary_keeps_the_existing_logits(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    ids = some_ids(1, 5)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(70, mean_resizing=False)
        after = model(ids).logits
    assert after.shape[-1] == model.config.vocab_size == 70
    # The rows are the same, but the matrix product is wider: only rounding differs.
    assert relative_difference(after[..., :61], before) <= FP32_ORDER
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_input_embeddings_give_the_same_logits_as_ids() -> None:
    model = tiny_model()
    ids = some_ids(2, 5)
    with torch.no_grad():
        found = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
        assert torch.equal(found, model(ids).logits)


def test_logits_to_keep_returns_only_the_requested_positions() -> None:
    model = tiny_model()
    ids = some_ids(2, 5)
    with torch.no_grad():
        whole = model(ids).logits
        # A smaller matrix product may sum in a different order.
        assert relative_difference(model(ids, logits_to_keep=2).logits, whole[:, -2:]) <= FP32_ORDER
        kept = model(ids, logits_to_keep=torch.tensor([0, 3])).logits
        assert relative_difference(kept, whole[:, [0, 3]]) <= FP32_ORDER


def test_nan_in_a_weight_shows_in_the_loss() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 3] = float("nan")
    ids = some_ids(1, 5)
    assert model(ids, labels=ids).loss.isnan()


def test_an_unsupported_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act=gelu") as caught:
        Z2allForCausalLM(tiny_config(hidden_act="gelu"))
    assert "LlamaForCausalLM" in str(caught.value)


def test_a_sequence_longer_than_max_seq_len_is_refused() -> None:
    model = tiny_model(max_position_embeddings=8)
    model(some_ids(1, 8))
    with pytest.raises(ConfigError, match=r"9 tokens.*max_seq_len=8"):
        model(some_ids(1, 9))


@pytest.mark.parametrize("label", [61, -1])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    model = tiny_model()
    ids = some_ids(1, 4)
    wrong = ids.clone()
    wrong[0, 2] = label
    for labels in ({"labels": wrong}, {"next_tokens": wrong}):
        with pytest.raises(ConfigError, match=f"label {label}.*0 to 60"):
            model(ids, **labels)


def test_dropout_is_active_only_in_training() -> None:
    model = tiny_model(dropout1=0.5, dropout2=0.5)
    plain = tiny_model()
    ids = some_ids(1, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
        assert not torch.equal(model.train()(ids).logits, plain(ids).logits)


def test_residual_in_fp32_reduces_the_error_of_bf16() -> None:
    ids = some_ids(2, 9)
    with torch.no_grad():
        truth = tiny_model()(ids).logits
        off = {
            wide: relative_difference(tiny_model(residual_in_fp32=wide).bfloat16()(ids).logits.float(), truth)
            for wide in (False, True)
        }
    assert 0 < off[True] < off[False], off
