"""Compiled layers: losses match eager layers under every ZeRO stage, with few graphs, and weights can be freed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.training import losses, run_arguments, train_many
from tests.model.pairs import relative_difference, some_ids, tiny_config
from tests.ops.comparing import devices, on_gpu
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.model import Z2allForCausalLM
from z2all_ds.model.modules import DecoderLayer
from z2all_ds.model.recompute import set_recompute
from z2all_ds.ops import Ops, Situation
from z2all_ds.ops.visibility import Visible, document_borders
from z2all_ds.train.speed.compiling import TRACED, compile_layers, ops_to_compile, require_inductor

STAGES = ("zero1", "zero2", "zero3")
TWO_LENGTHS = "stages=[{name: short, steps: 2, sequence_length: 16, global_batch: 16}, {name: long}]"
FREEING = {
    "full": ("train.activation_checkpointing=full",),
    "selective": ("train.activation_checkpointing=selective", TWO_LENGTHS),
}
"""Cases under a ZeRO-3 JSON that frees every weight after use; the shipped JSON keeps weights this small gathered."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Path:
    """Train 4 steps on two ranks for each case; return the folder with runs NAME (eager) and NAME_compiled."""
    folder = tmp_path_factory.mktemp("two_ways")
    freeing = folder / "freeing.json"
    never = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    freeing.write_text(json.dumps({"zero_optimization": {"stage": 3, **{f"stage3_{key}": 0 for key in never}}}))

    def arguments(run: str, deepspeed: str, *more: str) -> list[str]:
        short = ("train.steps=4", "schedule.warmup_steps=1", "checkpoint.at_end=false")
        return run_arguments(folder / run, small_corpus, small_tokenizer, f"deepspeed={deepspeed}", *short, *more)

    cases: dict[str, tuple[str, ...]] = {name: (name,) for name in STAGES}
    cases |= {name: (str(freeing), *overrides) for name, overrides in FREEING.items()}
    plan = []
    for name, (deepspeed, *more) in cases.items():
        plan += [arguments(name, deepspeed, *more)]
        plan += [arguments(f"{name}_compiled", deepspeed, *more, "train.compile=layers")]
    assert train_many(folder, plan) == [0] * len(plan)
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("name", [*STAGES, *FREEING])
def test_losses_match_those_of_eager_layers(name: str, runs: Path) -> None:
    found, wanted = losses(runs / f"{name}_compiled"), losses(runs / name)
    assert len(wanted) == 4
    # Fused kernels sum in another order: differences of one fp32 rounding (6e-8 of the loss) grow over 4 steps.
    assert found == pytest.approx(wanted, rel=2e-6)
    assert wanted[-1] < wanted[0]


@pytest.mark.extended
def test_activation_checkpointing_without_compiling_changes_no_bit(runs: Path) -> None:
    assert losses(runs / "full") == losses(runs / "zero3")


@pytest.mark.extended
def test_the_log_says_what_is_compiled_and_why(runs: Path) -> None:
    def said(run: str) -> str:
        lines = (runs / run / "logs" / "rank_0000.log").read_text().splitlines()
        # Lines without a time come from the next run, whose terminal output goes to this log.
        return "\n".join(line[9:] for line in lines if line[2:3] == ":")

    assert said("zero3_compiled").count("compiling the layers: the first step takes longer") == 1
    for op, backend in {"attention": "sdpa", "rope": "torch", "rms_norm": "torch", "swiglu": "torch"}.items():
        assert f"op {op}: {backend} (train.compile=layers, which fuses it)" in said("zero3_compiled")
    assert "compil" not in said("zero3")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset the compiler and its counters; restore the recompile limit, which models may raise, after the test."""
    import torch._dynamo

    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.config.recompile_limit = limit


def graphs_made() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def model_on(device: str, ops: Ops, dtype: torch.dtype = torch.float32, **changes: Any) -> Z2allForCausalLM:
    torch.manual_seed(0)
    return Z2allForCausalLM(tiny_config(num_hidden_layers=3, **changes), ops).to(device, dtype).train()


def loss_of(model: Z2allForCausalLM, tokens: int = 16, document: int = 6) -> Tensor:
    ids = some_ids(2, tokens + 1).to(model.device)
    documents = torch.arange(tokens, device=ids.device)[None].expand(2, -1) // document
    borders = document_borders(documents)
    loss: Tensor = model(ids[:, :-1], next_tokens=ids[:, 1:], cu_seqlens=borders).loss
    return loss


def kept_by_regions(loss: Tensor) -> list[Tensor]:
    """Return the tensors that the compiled forward passes keep for their backward passes."""
    kept: list[Tensor] = []
    todo: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        if "CompiledFunction" in node.name():
            kept += [tensor for tensor in node.saved_tensors if tensor is not None]
    return kept


@pytest.mark.extended
@pytest.mark.parametrize("device", devices())
def test_layers_share_compiled_regions_which_keep_no_view_of_a_weight(device: str, fresh_compiler: None) -> None:
    ops = ops_to_compile({}, Situation(device, "fp32", 16))
    eager, model = model_on(device, ops), model_on(device, ops)
    wanted = loss_of(eager)
    wanted.backward()
    compile_layers(model, ops, num_shapes=2, say=lambda line: None)
    loss = loss_of(model)
    assert graphs_made() == 2  # one for the first layer, which has no residual stream yet, one for the other two

    weights = {id(weight) for weight in model.parameters()}
    memory = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = kept_by_regions(loss)
    assert len({id(tensor) for tensor in kept} & weights) >= 3 * 4  # the weight matrices of 3 layers
    # ZeRO-3 frees a weight by emptying its data; a view would keep the memory until the backward pass.
    assert not [t.shape for t in kept if id(t) not in weights and t.untyped_storage().data_ptr() in memory]

    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for name, weight in eager.named_parameters():
        # fp32 sums have another order, over three layers.
        assert relative_difference(gradients[name], weight.grad) <= 1e-5, name
    loss_of(model, document=3).backward()
    assert graphs_made() == 2
    loss_of(model, tokens=9)  # as in a stage with another sequence length
    assert graphs_made() == 4


def test_recomputed_layers_need_no_further_graphs(fresh_compiler: None) -> None:
    ops = ops_to_compile({}, Situation("cpu", "fp32", 16))
    model = model_on("cpu", ops)
    set_recompute(model, "full")
    compile_layers(model, ops, num_shapes=1, say=lambda line: None)
    loss_of(model).backward()
    assert graphs_made() == 2


def test_generation_runs_uncompiled(fresh_compiler: None) -> None:
    ops = ops_to_compile({}, Situation("cpu", "fp32", 16))
    model = model_on("cpu", ops).eval()
    ids, settings = some_ids(1, 5), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    compile_layers(model, ops, num_shapes=1, say=lambda line: None)
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **settings), wanted)
    assert graphs_made() == 0


@pytest.mark.parametrize("parts", [(), ("mlp",), ("attention", "mlp")], ids=["kept", "mlp", "both"])
def test_nothing_inside_a_layer_breaks_the_graph(parts: tuple[str, ...], fresh_compiler: None) -> None:
    model = model_on("cpu", ops_to_compile({}, Situation("cpu", "fp32", 16)))
    set_recompute(model, "selective" if parts else "none", parts)
    layer = model.model.layers[0]
    assert isinstance(layer, DecoderLayer)
    x, stream = torch.randn(2, 8, 64, requires_grad=True), torch.randn(2, 8, 64)
    rotation = model.model.rotary(torch.arange(8).expand(2, -1), torch.float32)
    documents = torch.arange(8)[None].expand(2, -1) // 3
    visible = Visible(2, 8, torch.device("cpu"), document_ids=documents)
    found = torch._dynamo.explain(layer.forward)(x, stream, rotation, visible, None)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_the_recompile_limit_allows_for_every_stage(fresh_compiler: None) -> None:
    ops = ops_to_compile({}, Situation("cpu", "fp32", 16))
    compile_layers(model_on("cpu", ops), ops, num_shapes=7, say=lambda line: None)
    assert torch._dynamo.config.recompile_limit == 16
    compile_layers(model_on("cpu", ops), ops, num_shapes=1, say=lambda line: None)
    assert torch._dynamo.config.recompile_limit == 16


def test_requested_backends_are_used_and_auto_selects_traceable_ones() -> None:
    ops = ops_to_compile({"attention": "eager", "cross_entropy": "chunked"}, Situation("cpu", "fp32", 16))
    chosen = {choice.op: choice for choice in ops.choices}
    assert {op: chosen[op].backend for op in TRACED} == {
        **{op: names[0] for op, names in TRACED.items()},
        "attention": "eager",
    }
    assert chosen["attention"].reason == "requested"
    assert chosen["cross_entropy"].backend == "chunked"
    with pytest.raises(ConfigError, match="needs a GPU"):
        ops_to_compile({"rope": "triton"}, Situation("cpu", "fp32", 16))


@pytest.mark.extended
@pytest.mark.parametrize("choice", ["selective", "full"])
def test_an_op_that_is_not_traced_runs_between_compiled_pieces(
    choice: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All CPU backends can be traced, so the test excludes one from tracing."""
    monkeypatch.setitem(TRACED, "attention", ("eager",))
    ops = ops_to_compile({"attention": "sdpa"}, Situation("cpu", "fp32", 16))
    assert "requested; runs between compiled pieces of the layer" in [choice.reason for choice in ops.choices]
    eager, model = model_on("cpu", ops), model_on("cpu", ops)
    set_recompute(model, choice, ("attention", "mlp"))
    compile_layers(model, ops, num_shapes=1, say=lambda line: None)
    wanted, found = loss_of(eager), loss_of(model)
    assert graphs_made() >= 4  # first layer and other layers, each before and after the attention
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    wanted.backward()
    found.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for name, weight in eager.named_parameters():
        assert relative_difference(gradients[name], weight.grad) <= 1e-5, name


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"attention": "varlen"}, marks=on_gpu, id="varlen"),
        pytest.param({"rope": "triton", "rms_norm": "triton", "swiglu": "triton"}, marks=on_gpu, id="triton"),
    ],
)
@pytest.mark.parametrize("choice", ["none", "selective", "full"])
def test_requested_kernels_run_between_compiled_pieces(
    asked: dict[str, str], choice: str, fresh_compiler: None
) -> None:
    # A wider model with smaller weights: in the tiny one attention is so sharp that bf16 alone is off by 20 %.
    sizes = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}
    ops = ops_to_compile(asked, Situation("cuda", "bf16", 64))
    reasons = {op.op: op.reason for op in ops.choices}
    assert all("between compiled pieces" in reasons[op] for op in asked)
    eager, model = (model_on("cuda", ops, torch.bfloat16, **sizes) for _ in range(2))
    set_recompute(model, choice, ("attention", "mlp"))
    compile_layers(model, ops, num_shapes=1, say=lambda line: None)
    wanted, found = loss_of(eager), loss_of(model)
    # Inductor keeps fp32 between ops where eager torch rounds to bf16 (8 bits), over three layers. In bf16 on a CPU,
    # losses differ by 3e-4 and gradients by 1.3 %, and both are equally far from the exact values.
    assert found.item() == pytest.approx(wanted.item(), rel=2e-3)
    wanted.backward()
    found.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for name, weight in eager.named_parameters():
        assert (gradients[name] - weight.grad).norm() <= 0.03 * weight.grad.norm(), name


def test_a_missing_compiler_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    require_inductor("cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MachineError, match=r"train.compile=layers: .*no-such-compiler.*apt install g\+\+.*=none"):
        require_inductor("cpu")


def test_compiling_for_a_gpu_without_triton_is_refused() -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        with pytest.raises(MachineError, match=r"triton is not installed.*pip install triton"):
            require_inductor("cuda")
    else:
        require_inductor("cuda")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.compile=layers", "train.cuda_graphs=always"], "always must not be used with compile=layers"),
        (["train.activation_checkpointing=selective", "train.recompute=[]"], "recompute=[]"),
        (["train.recompute=[norm]"], "train.recompute.0='norm'"),
        (["train.compile=model"], "must be none or layers"),
    ],
)
def test_invalid_compile_and_recompute_settings_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_run_config(None, overrides)
    assert message in str(refused.value)


@pytest.mark.parametrize(("written", "meant"), [("true", "full"), ("false", "none"), ("selective", "selective")])
def test_activation_checkpointing_accepts_the_old_booleans(written: str, meant: str) -> None:
    train = load_run_config(None, [f"train.activation_checkpointing={written}"]).train
    assert (train.activation_checkpointing, train.recompute) == (meant, ("mlp",))
