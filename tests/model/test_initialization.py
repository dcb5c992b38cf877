"""Initial weights, which depend only on seed, name and shape, not on the number of ranks or on partitioning."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tests.model.pairs import some_ids, tiny_config
from tests.model.ranks import run_ranks
from tests.model.zero_init_ranks import CASES, DTYPES, SEED
from tests.ops.comparing import on_gpu
from z2all_ds.model import Z2allForCausalLM
from z2all_ds.model.initialization import VALUES_PER_BLOCK, initialise_weights, materialise, normal_values


def initialised(seed: int = SEED, dtype: torch.dtype = torch.float32, **changes: Any) -> Z2allForCausalLM:
    model = Z2allForCausalLM(tiny_config(**changes)).to(dtype)
    initialise_weights(model, seed)
    return model


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def written_by_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero_init")
    run_ranks("zero_init_ranks.py", str(folder), ranks=request.param)
    return folder


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks and one GPU; the CPU shows the same")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_partitioned_weights_equal_unpartitioned_ones(written_by_ranks: Path, case: str, dtype: str) -> None:
    """The real zero.Init partitions every parameter at construction. Inside it torch creates tensors in the
    model's dtype, but the rotary frequencies must stay fp32."""
    found = torch.load(written_by_ranks / f"{case}-{dtype}.pt", weights_only=True)
    model = initialised(dtype=DTYPES[dtype], **CASES[case])
    frequencies = {"rotary frequencies": model.model.rotary.inverse_frequencies}
    assert_same_bits(found, {**dict(model.named_parameters(remove_duplicate=False)), **frequencies})


def test_weights_depend_on_the_seed_and_not_on_torchs_random_state() -> None:
    torch.manual_seed(1)
    first = initialised(5).state_dict()
    torch.manual_seed(2)
    assert_same_bits(initialised(5).state_dict(), first)
    other = initialised(6).state_dict()
    for name, weight in first.items():
        assert torch.equal(other[name], weight) == (weight.dim() == 1), name


def test_a_parameter_does_not_depend_on_the_others() -> None:
    """Two models that differ in depth and vocabulary have equal weights in the layers that both have."""
    small, large = initialised().state_dict(), initialised(num_hidden_layers=3, vocab_size=200).state_dict()
    shared = [name for name in small if "layers" in name or name == "model.norm.weight"]
    assert len(shared) == 13
    assert_same_bits({name: large[name] for name in shared}, {name: small[name] for name in shared})


def test_no_two_parameters_are_equal() -> None:
    """The name is part of the seed, so equal shapes in two layers get different values."""
    weights = [weight.flatten()[:64] for weight in initialised().state_dict().values() if weight.dim() == 2]
    for index, first in enumerate(weights):
        for second in weights[index + 1 :]:
            assert not torch.equal(first, second)


def test_weights_are_normal_and_biases_padding_and_norms_constant() -> None:
    state = initialised(attention_bias=True, mlp_bias=True, pad_token_id=3, hidden_size=128).state_dict()
    for name, weight in state.items():
        if name.endswith(".bias"):
            assert torch.equal(weight, torch.zeros_like(weight)), name
        elif weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            drawn = weight[torch.arange(len(weight)) != 3] if "embed" in name else weight
            # At least 7,680 values: the deviation is accurate to 0.8 %, the mean to 0.0023; four times that is allowed.
            assert drawn.std().item() == pytest.approx(0.2, rel=0.033), name
            assert abs(drawn.mean().item()) < 0.0092, name
    assert torch.equal(state["model.embed_tokens.weight"][3], torch.zeros(128))


def test_only_the_padding_row_is_zero_as_in_llama() -> None:
    ours = initialised(pad_token_id=3)
    llama = LlamaForCausalLM(ours.config.to_llama())
    for model in (ours, llama):
        rows = model.model.embed_tokens.weight.abs().sum(dim=1)
        assert torch.equal((rows == 0).nonzero().flatten(), torch.tensor([3]))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_built_on_meta_gets_the_same_weights(tied: bool) -> None:
    wanted = initialised(tie_word_embeddings=tied).eval()
    with torch.device("meta"):
        model = Z2allForCausalLM(wanted.config)
    materialise(model, "cpu")
    initialise_weights(model, SEED)
    assert_same_bits(dict(model.named_parameters()), dict(wanted.named_parameters()))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids = some_ids(1, 7)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, wanted(ids).logits)


def test_initialising_a_model_on_meta_fails() -> None:
    with torch.device("meta"):
        model = Z2allForCausalLM(tiny_config())
    with pytest.raises(AssertionError, match="materialise"):
        initialise_weights(model, SEED)


@on_gpu[0]
@on_gpu[1]
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_on_a_gpu_are_bitwise_equal_to_those_on_the_cpu(dtype: str) -> None:
    with torch.device("meta"):
        model = Z2allForCausalLM(tiny_config()).to(DTYPES[dtype])
    materialise(model, "cuda")
    initialise_weights(model, SEED)
    assert_same_bits(model.state_dict(), initialised(dtype=DTYPES[dtype]).state_dict())


def drawn(name: str, shape: torch.Size, threads: int = 1) -> Tensor:
    with ThreadPoolExecutor(threads) as pool:
        return normal_values(7, name, shape, pool)


def test_drawn_values_equal_the_recorded_ones() -> None:
    """A new numpy version or a code change must not change the weights that a seed gives."""
    found = drawn("lm_head.weight", torch.Size([2, 3]))
    assert found.dtype == torch.float32
    assert [[value.hex() for value in row] for row in found.tolist()] == [
        ["0x1.957a720000000p-1", "0x1.0ab73e0000000p-1", "0x1.2502360000000p-1"],
        ["0x1.ea05cc0000000p-1", "-0x1.9710380000000p-2", "-0x1.12d75a0000000p+0"],
    ]


def test_blocks_differ_and_do_not_depend_on_the_number_of_threads() -> None:
    shape = torch.Size([3, VALUES_PER_BLOCK - 5])
    found = [drawn("a.weight", shape, threads) for threads in (1, 4)]
    assert torch.equal(*found)
    blocks = found[0].flatten().split(VALUES_PER_BLOCK)
    assert len(blocks) == 3
    for first, second in ((0, 1), (1, 2), (0, 2)):
        length = len(blocks[second])
        # Products of independent values have mean 0 and deviation 1; five deviations of their mean are allowed.
        assert abs((blocks[first][:length] * blocks[second]).mean().item()) < 5 / length**0.5
    assert torch.equal(drawn("a.weight", torch.Size([VALUES_PER_BLOCK])), blocks[0])


def test_parameters_are_gathered_one_by_one() -> None:
    """The caller's context is entered once for each parameter."""
    model = Z2allForCausalLM(tiny_config(tie_word_embeddings=True))
    entered: list[nn.Parameter] = []

    @contextmanager
    def gathered(parameter: nn.Parameter) -> Iterator[None]:
        entered.append(parameter)
        yield

    initialise_weights(model, SEED, gathered)
    assert [id(p) for p in entered] == [id(p) for p in model.parameters()]
