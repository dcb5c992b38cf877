"""`generate`, compared token by token with LlamaForCausalLM with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.helpers.stock_names import to_stock
from tests.model.pairs import SHAPES, pair, some_ids
from tests.model.test_rotary import ROPES
from z2all_ds.model import Z2allForCausalLM

NEW_TOKENS = 20
PROMPT = 6


def new_tokens(
    model: Z2allForCausalLM | LlamaForCausalLM, ids: Tensor, mask: Tensor | None = None, **settings: Any
) -> Tensor:
    """Return the tokens after the prompt. Sampling starts from the same random state every time."""
    torch.manual_seed(9)
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **settings}
    made: Tensor = model.generate(ids, attention_mask=mask, **settings)
    return made[:, ids.shape[1] :]


def assert_same_tokens(
    ours: Z2allForCausalLM, llama: LlamaForCausalLM, ids: Tensor, mask: Tensor | None = None, **settings: Any
) -> Tensor:
    wanted = new_tokens(llama, ids, mask, **settings)
    assert torch.equal(new_tokens(ours, ids, mask, **settings), wanted)
    assert wanted.unique().numel() > 4, "a model that repeats itself would prove little"
    return wanted


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_are_llamas_with_and_without_a_cache(shape: str) -> None:
    ours, llama = pair(seed=3, **SHAPES[shape])
    wanted = assert_same_tokens(ours, llama, some_ids(2, PROMPT))
    # Without a cache, every step recomputes everything. The cache must not change a token.
    assert torch.equal(new_tokens(ours, some_ids(2, PROMPT), use_cache=False), wanted)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 5, "repetition_penalty": 1.3},
        {"num_return_sequences": 3},
    ],
    ids=str,
)
def test_sampled_tokens_are_llamas(settings: dict[str, Any]) -> None:
    ours, llama = pair(seed=3)
    sampled = assert_same_tokens(ours, llama, some_ids(2, PROMPT), do_sample=True, **settings)
    if "num_return_sequences" not in settings:
        assert not torch.equal(sampled, new_tokens(ours, some_ids(2, PROMPT)))


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_beam_search_tokens_are_llamas(settings: dict[str, Any]) -> None:
    """Beam search reorders the cache between steps."""
    ours, llama = pair(seed=3)
    found = assert_same_tokens(ours, llama, some_ids(2, PROMPT), **settings)
    assert not torch.equal(found[:1], new_tokens(ours, some_ids(2, PROMPT))[:1])


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("shape", ["grouped", "llama3-rope"])
def test_tokens_of_a_left_padded_batch_are_llamas(shape: str, settings: dict[str, Any]) -> None:
    ours, llama = pair(seed=3, pad_token_id=0, **SHAPES[shape])
    prompts = [some_ids(1, length, seed=length)[0] for length in (3, 8, 5)]
    ids, mask = torch.zeros(3, 8, dtype=torch.long), torch.zeros(3, 8, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 8 - len(prompt) :], mask[row, 8 - len(prompt) :] = prompt, 1
    together = assert_same_tokens(ours, llama, ids, mask, **settings)
    if not settings:  # greedy decoding gives each row the same tokens as a batch of one
        for row, prompt in enumerate(prompts):
            assert torch.equal(new_tokens(ours, prompt[None])[0], together[row])


def test_an_end_token_ends_a_row_and_pads_it() -> None:
    ours, llama = pair(seed=3)
    ids = some_ids(2, PROMPT)
    end = int(new_tokens(ours, ids)[0, 4])
    found = assert_same_tokens(ours, llama, ids, eos_token_id=end)
    first_end = found[0].tolist().index(end)
    assert first_end <= 4
    assert not found[0, first_end + 1 :].any()


@pytest.mark.parametrize("rope", ROPES)
def test_tokens_beyond_the_original_length_are_llamas_for_every_rope_type(rope: str) -> None:
    """The prompt is shorter than the original length, and the generated tokens go beyond it."""
    original, prompt = 16, 12
    scaling = {**ROPES[rope], "rope_theta": 10000.0}
    if "original_max_position_embeddings" in scaling:
        scaling["original_max_position_embeddings"] = original
    longest = original if rope == "dynamic" else 4 * original
    ours, llama = pair(seed=3, rope_parameters=scaling, max_position_embeddings=longest)
    unscaled, _ = pair(seed=3, max_position_embeddings=4 * original)
    found = assert_same_tokens(ours, llama, some_ids(2, prompt), max_new_tokens=30)
    assert (rope == "default") == torch.equal(found, new_tokens(unscaled, some_ids(2, prompt), max_new_tokens=30))
    # A shorter input afterwards: dynamic frequencies must return to the original ones.
    assert_same_tokens(ours, llama, some_ids(2, 4), max_new_tokens=10)
    if rope != "dynamic":  # cached dynamic keys have other frequencies than recomputed ones
        again = new_tokens(ours, some_ids(2, prompt), max_new_tokens=30, use_cache=False)
        assert torch.equal(again, found)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [70, 50])
def test_tokens_after_resizing_the_vocabulary_are_llamas(size: int, tied: bool) -> None:
    ours, _ = pair(seed=3, tie_word_embeddings=tied)
    torch.manual_seed(4)
    ours.resize_token_embeddings(size)
    llama = LlamaForCausalLM(ours.config.to_llama()).eval()
    assert llama.config.vocab_size == size
    llama.load_state_dict(to_stock(ours.state_dict(), ours.config))
    ids = some_ids(2, PROMPT) % 50
    assert int(assert_same_tokens(ours, llama, ids, do_sample=True).max()) < size


@pytest.mark.parametrize("shape", ["grouped", "tied", "llama3-rope"])
def test_bf16_tokens_are_llamas_best_up_to_rounding(shape: str) -> None:
    """Each token must be Llama's best up to rounding. bf16 logits tie, so two correct models diverge sooner or later.

    The judge is Llama with the same bf16 weights. It computes in fp32 on the generated tokens.
    """
    ours, judge = pair(seed=3, **SHAPES[shape])
    ours = ours.to(torch.bfloat16)
    with torch.no_grad():
        for weight in judge.parameters():  # not judge.to(bfloat16), which also rounds the rotary frequencies
            weight.copy_(weight.bfloat16())
    ids = some_ids(2, PROMPT)
    found = new_tokens(ours, ids)
    assert found.unique().numel() > 4
    with torch.no_grad():
        logits = judge(torch.cat((ids, found), dim=1)).logits[:, PROMPT - 1 : -1]
    chosen = logits.gather(-1, found[..., None])[..., 0]
    behind = (logits.amax(-1) - chosen) / logits.abs().max() / torch.finfo(torch.bfloat16).eps
    # bf16 logits are 2 % off, Llama's too: over 16 models, its worst token was 2.8 roundings behind, Z2all's 2.3.
    assert behind.max() <= 4
    # A wrong model would choose tokens that are far behind.
    assert ((logits.amax(-1) - logits.median(-1).values) / logits.abs().max()).min() > 20 * 2**-7


def test_dropout_and_an_fp32_residual_stream_change_no_token() -> None:
    """Dropout is inactive outside training, and the residual stream of an fp32 model is fp32 anyway."""
    ours, llama = pair(seed=3, dropout1=0.5, dropout2=0.5, attention_dropout=0.5, residual_in_fp32=True)
    assert_same_tokens(ours, llama, some_ids(2, PROMPT))
