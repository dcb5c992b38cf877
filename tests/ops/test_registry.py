"""Which backend runs, and what is said about it."""

import importlib.util
import itertools

import pytest

from z2all_ds.errors import ConfigError
from z2all_ds.ops import OpChoice, Situation, resolve_ops
from z2all_ds.ops.registry import OP_NAMES, backends_of, choose, needs_library

CPU = Situation("cpu", "fp32", 64)
GPU = Situation("cuda", "bf16", 64)
REFERENCES = {
    "attention": "eager",
    "rope": "torch",
    "rms_norm": "torch",
    "swiglu": "torch",
    "cross_entropy": "torch",
}
has_liger = importlib.util.find_spec("liger_kernel") is not None


def test_auto_on_a_cpu_takes_the_first_that_runs_and_says_why() -> None:
    ops = resolve_ops({}, CPU)
    liger_refused = "liger: needs a GPU, the model is on cpu"
    assert ops.choices == (
        OpChoice("attention", "sdpa", "first choice"),
        OpChoice("rope", "torch", liger_refused),
        OpChoice("rms_norm", "torch", liger_refused),
        OpChoice("swiglu", "torch", liger_refused),
        OpChoice("cross_entropy", "torch", "first choice"),
    )
    assert ops.rope is backends_of("rope")["torch"].function
    assert ops.attention is backends_of("attention")["sdpa"].function


@pytest.mark.skipif(has_liger, reason="liger-kernel is installed, so nothing is missing")
def test_auto_on_a_gpu_without_liger_names_the_missing_package() -> None:
    _, choice = choose("rms_norm", "auto", GPU)
    assert choice.backend == "torch"
    assert choice.reason.startswith("liger: cannot import liger-kernel (")
    assert "pip install 'z2all_ds[gpu]'" in choice.reason


@pytest.mark.gpu
@pytest.mark.skipif(not has_liger, reason="liger-kernel is not installed")
@pytest.mark.parametrize("op", ["rope", "rms_norm", "swiglu"])
def test_auto_on_a_gpu_with_liger_takes_it(op: str) -> None:
    assert choose(op, "auto", GPU)[1] == OpChoice(op, "liger", "first choice")


def test_named_backend_is_taken_and_the_rest_stays_auto() -> None:
    ops = resolve_ops({"attention": "eager"}, CPU)
    assert ops.choices[0] == OpChoice("attention", "eager", "asked for")
    assert ops.attention is backends_of("attention")["eager"].function
    assert [choice.op for choice in ops.choices] == list(OP_NAMES)


@pytest.mark.parametrize("op", ["rope", "rms_norm", "swiglu"])
def test_forced_backend_that_cannot_run_is_an_error(op: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_ops({op: "liger"}, CPU)
    assert str(caught.value) == (f"ops.{op}=liger: needs a GPU, the model is on cpu. Use ops.{op}= one of auto, torch.")


@pytest.mark.parametrize("op", OP_NAMES)
def test_unknown_name_lists_the_known(op: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(op, "flash9", CPU)
    assert str(caught.value) == f"ops.{op}=flash9: no such backend. Known: auto, {', '.join(backends_of(op))}."


@pytest.mark.parametrize("op", OP_NAMES)
def test_reference_stands_last_and_always_runs(op: str) -> None:
    *_, last = backends_of(op).values()
    assert last.name == REFERENCES[op]
    for device, dtype, head_dim in itertools.product(("cpu", "cuda"), ("fp32", "bf16", "fp16"), (32, 96, 256)):
        assert last.why_not(Situation(device, dtype, head_dim)) is None


def test_library_is_looked_for_on_a_gpu_only() -> None:
    assert needs_library("json", "json")(GPU) is None
    assert needs_library("json", "json")(CPU) == "needs a GPU, the model is on cpu"
    refusal = needs_library("no_such_module_anywhere", "that-package")(GPU)
    assert refusal is not None
    assert "cannot import that-package (No module named 'no_such_module_anywhere')" in refusal
