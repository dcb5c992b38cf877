"""Which backend runs, and what is said about it."""

import importlib.util
import itertools
import subprocess
import sys
from typing import get_args

import pytest
import torch

from tests.ops.comparing import on_gpu
from z2all_ds.base.config.sections import OpsSection
from z2all_ds.base.errors import ConfigError
from z2all_ds.ops import OpChoice, Situation, resolve_ops
from z2all_ds.ops.registry import OP_NAMES, backends_of, choose, needs_library

CPU = Situation("cpu", "fp32", 64)
GPU = Situation("cuda", "bf16", 64)
REFERENCES = dict.fromkeys(OP_NAMES, "torch") | {"attention": "eager"}
RUN_ANYWHERE = {"attention": {"sdpa", "eager"}, "cross_entropy": {"chunked", "torch"}}
NO_GPU = "needs a GPU, the model is on cpu"
ALL_BACKENDS = [(op, name) for op in OP_NAMES for name in backends_of(op)]
GPU_ONLY = [(op, name) for op, name in ALL_BACKENDS if name not in RUN_ANYWHERE.get(op, {"torch"})]
FROM_LIBRARIES = {
    ("rope", "liger"): ("liger_kernel", "liger-kernel"),
    ("rms_norm", "liger"): ("liger_kernel", "liger-kernel"),
    ("swiglu", "liger"): ("liger_kernel", "liger-kernel"),
    ("cross_entropy", "liger"): ("liger_kernel", "liger-kernel"),
    ("rope", "flash_attn"): ("flash_attn", "flash-attn"),
    ("cross_entropy", "flash_attn"): ("flash_attn", "flash-attn"),
    ("swiglu", "xformers"): ("xformers", "xformers"),
    ("rms_norm", "triton"): ("triton", "triton"),
}
is_installed = {module: importlib.util.find_spec(module) is not None for module, _ in FROM_LIBRARIES.values()}


def test_auto_on_a_cpu_takes_the_first_that_runs_and_says_why() -> None:
    ops = resolve_ops({}, CPU)
    assert ops.choices == (
        OpChoice("attention", "sdpa", f"packed: {NO_GPU}"),
        OpChoice("rope", "torch", f"triton: {NO_GPU}; liger: {NO_GPU}; flash_attn: {NO_GPU}"),
        OpChoice("rms_norm", "torch", f"triton: {NO_GPU}; liger: {NO_GPU}; apex: {NO_GPU}"),
        OpChoice("swiglu", "torch", f"triton: {NO_GPU}; liger: {NO_GPU}; xformers: {NO_GPU}"),
        ops.choices[4],
        OpChoice("cross_entropy", "torch", f"triton: {NO_GPU}; liger: {NO_GPU}; flash_attn: {NO_GPU}"),
    )
    assert (ops.choices[4].op, ops.choices[4].backend) == ("linear", "torch")
    for choice in ops.choices:
        assert getattr(ops, choice.op) is backends_of(choice.op)[choice.backend].function


def test_auto_leaves_out_what_must_be_asked_for() -> None:
    found = backends_of("cross_entropy")["chunked"]
    assert found.by_request
    assert found.why_not(CPU) is None
    assert choose("cross_entropy", "auto", CPU)[0] is not found
    assert choose("cross_entropy", "chunked", CPU)[0] is found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_auto_on_a_gpu_takes_our_kernels(dtype: str) -> None:
    chosen = {choice.op: choice for choice in resolve_ops({}, Situation("cuda", dtype, 64)).choices}
    for op in ("rope", "rms_norm", "swiglu", "cross_entropy"):
        assert chosen[op] == OpChoice(op, "triton", "first choice")
    assert chosen["attention"].backend != "eager"


@pytest.mark.parametrize(("op", "name"), FROM_LIBRARIES)
def test_missing_library_is_named(op: str, name: str) -> None:
    module, package = FROM_LIBRARIES[op, name]
    if is_installed[module]:
        pytest.skip(f"{package} is installed, so nothing is missing")
    refusal = backends_of(op)[name].why_not(GPU)
    assert refusal is not None
    assert refusal.startswith(f"cannot import {package} (No module named '{module}")
    assert refusal.endswith("; pip install 'z2all_ds[gpu]'")


@pytest.mark.skipif(importlib.util.find_spec("apex") is not None, reason="an apex is installed")
def test_missing_apex_is_not_sought_on_pypi() -> None:
    refusal = backends_of("rms_norm")["apex"].why_not(GPU)
    assert refusal is not None
    assert refusal.startswith("cannot import NVIDIA's apex (")
    assert "PyPI's apex is another package" in refusal


@pytest.mark.gpu
@pytest.mark.skipif(not is_installed["xformers"], reason="xformers is not installed")
def test_xformers_without_a_fused_kernel_says_so() -> None:
    import xformers

    refusal = backends_of("swiglu")["xformers"].why_not(GPU)
    if hasattr(torch.ops.xformers, "silu_bw_fused"):
        assert refusal is None
    else:
        assert refusal is not None
        assert f"xformers {xformers.__version__} no longer has fused SwiGLU" in refusal


@pytest.mark.parametrize("name", ["cudnn", "flash", "varlen", "flash_attn"])
def test_kernels_for_half_precision_say_so(name: str) -> None:
    why_not = backends_of("attention")[name].why_not
    assert why_not(Situation("cuda", "fp32", 64)) == "computes in bf16 and fp16 only, the model computes in fp32"
    assert why_not(Situation("cpu", "bf16", 64)) == NO_GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cudnn", "flash", "varlen", "flash_attn"])
def test_gpu_that_torch_does_not_see_is_said(name: str) -> None:
    assert backends_of("attention")[name].why_not(GPU) == "torch sees no GPU"


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in ("cudnn", "flash", "varlen")])
def test_head_size_that_no_kernel_has_is_refused_in_one_line(name: str) -> None:
    assert backends_of("attention")[name].why_not(GPU) is None
    refusal = backends_of("attention")[name].why_not(Situation("cuda", "bf16", 1024))
    assert refusal is not None
    assert refusal.startswith("does not support heads of 1024 in bf16 on this machine (")
    assert "\n" not in refusal


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=on_gpu) for name in ("cudnn", "flash", "varlen", "flash_attn")]
)
def test_looking_at_a_backend_leaves_the_random_numbers_alone(name: str) -> None:
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    backends_of("attention")[name].why_not(Situation("cuda", "bf16", 128))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])


def test_named_backend_is_taken_and_the_rest_stays_auto() -> None:
    ops = resolve_ops({"attention": "eager"}, CPU)
    assert ops.choices[0] == OpChoice("attention", "eager", "requested")
    assert ops.attention is backends_of("attention")["eager"].function
    assert [choice.op for choice in ops.choices] == list(OP_NAMES)


@pytest.mark.parametrize(("op", "name"), GPU_ONLY)
def test_forced_backend_that_cannot_run_is_an_error(op: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_ops({op: name}, CPU)
    refusal = backends_of(op)[name].why_not(CPU)
    assert refusal is not None
    assert "GPU" in refusal and refusal.endswith("the model is on cpu")
    others = ", ".join(["auto", *(other for other in backends_of(op) if other != name)])
    assert str(caught.value) == f"ops.{op}={name}: {refusal}. Use ops.{op}= one of {others}."


@pytest.mark.parametrize("op", OP_NAMES)
def test_unknown_name_lists_the_known(op: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(op, "flash9", CPU)
    assert str(caught.value) == f"ops.{op}=flash9: no such backend. Known: auto, {', '.join(backends_of(op))}."


@pytest.mark.parametrize("op", OP_NAMES)
def test_config_knows_the_same_names(op: str) -> None:
    names = get_args(OpsSection.model_fields[op].annotation)
    assert names[0] == "auto"
    assert OpsSection.model_fields[op].default == "auto"
    # fp8 is a name of the config from the start, whether or not its file is there.
    assert set(backends_of(op)) - {"fp8"} == set(names) - {"auto", "fp8"}


@pytest.mark.parametrize("op", OP_NAMES)
def test_reference_stands_last_and_always_runs(op: str) -> None:
    *_, last = backends_of(op).values()
    assert last.name == REFERENCES[op]
    for device, dtype, head_dim in itertools.product(("cpu", "cuda"), ("fp32", "bf16", "fp16"), (32, 96, 256)):
        assert last.why_not(Situation(device, dtype, head_dim)) is None


@pytest.mark.parametrize(("op", "name"), ALL_BACKENDS)
def test_refusals_are_one_line(op: str, name: str) -> None:
    for device, dtype, head_dim in itertools.product(("cpu", "cuda"), ("fp32", "bf16", "fp16"), (8, 64)):
        refusal = backends_of(op)[name].why_not(Situation(device, dtype, head_dim))
        assert refusal is None or (refusal and "\n" not in refusal)


def test_choosing_on_a_cpu_imports_no_kernel_library() -> None:
    code = (
        "import sys\n"
        "from z2all_ds.ops import Situation, resolve_ops\n"
        "resolve_ops({}, Situation('cpu', 'fp32', 64))\n"
        "print([m for m in ('triton', 'liger_kernel', 'flash_attn', 'apex', 'xformers') if m in sys.modules])\n"
    )
    # torch itself may import triton where it is installed.
    torch_alone = subprocess.run(
        [sys.executable, "-c", "import sys, torch; print('triton' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == ("['triton']" if torch_alone == "True" else "[]")


def test_library_is_looked_for_on_a_gpu_only() -> None:
    assert needs_library("json", "json")(GPU) is None
    assert needs_library("json", "json")(CPU) == NO_GPU
    refusal = needs_library("no_such_module_anywhere", "that-package")(GPU)
    assert refusal is not None
    assert "cannot import that-package (No module named 'no_such_module_anywhere')" in refusal
