"""The choice of op backends, and the reasons that are reported for it."""

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


def test_auto_on_a_cpu_takes_the_first_backend_that_runs_and_gives_the_reason() -> None:
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


def test_auto_skips_backends_that_must_be_requested() -> None:
    found = backends_of("cross_entropy")["chunked"]
    assert found.by_request
    assert found.why_not(CPU) is None
    assert choose("cross_entropy", "auto", CPU)[0] is not found
    assert choose("cross_entropy", "chunked", CPU)[0] is found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_auto_on_a_gpu_takes_the_triton_kernels(dtype: str) -> None:
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
def test_the_message_for_a_missing_apex_warns_about_pypis_apex() -> None:
    refusal = backends_of("rms_norm")["apex"].why_not(GPU)
    assert refusal is not None
    assert refusal.startswith("cannot import NVIDIA's apex (")
    assert "PyPI's apex is another package" in refusal


@pytest.mark.gpu
@pytest.mark.skipif(not is_installed["xformers"], reason="xformers is not installed")
def test_xformers_without_a_fused_kernel_is_refused() -> None:
    import xformers

    refusal = backends_of("swiglu")["xformers"].why_not(GPU)
    if hasattr(torch.ops.xformers, "silu_bw_fused"):
        assert refusal is None
    else:
        assert refusal is not None
        assert f"xformers {xformers.__version__} no longer has fused SwiGLU" in refusal


@pytest.mark.parametrize("name", ["cudnn", "flash", "varlen", "flash_attn"])
def test_half_precision_kernels_refuse_fp32_and_the_cpu(name: str) -> None:
    why_not = backends_of("attention")[name].why_not
    assert why_not(Situation("cuda", "fp32", 64)) == "computes in bf16 and fp16 only, the model computes in fp32"
    assert why_not(Situation("cpu", "bf16", 64)) == NO_GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cudnn", "flash", "varlen", "flash_attn"])
def test_attention_kernels_report_that_torch_sees_no_gpu(name: str) -> None:
    assert backends_of("attention")[name].why_not(GPU) == "torch sees no GPU"


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in ("cudnn", "flash", "varlen")])
def test_an_unsupported_head_size_is_refused_in_one_line(name: str) -> None:
    assert backends_of("attention")[name].why_not(GPU) is None
    refusal = backends_of("attention")[name].why_not(Situation("cuda", "bf16", 1024))
    assert refusal is not None
    assert refusal.startswith("does not support heads of 1024 in bf16 on this machine (")
    assert "\n" not in refusal


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=on_gpu) for name in ("cudnn", "flash", "varlen", "flash_attn")]
)
def test_checking_a_backend_does_not_change_the_random_state(name: str) -> None:
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    backends_of("attention")[name].why_not(Situation("cuda", "bf16", 128))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])


def test_a_requested_backend_is_taken_and_the_other_ops_stay_auto() -> None:
    ops = resolve_ops({"attention": "eager"}, CPU)
    assert ops.choices[0] == OpChoice("attention", "eager", "requested")
    assert ops.attention is backends_of("attention")["eager"].function
    assert [choice.op for choice in ops.choices] == list(OP_NAMES)


@pytest.mark.parametrize(("op", "name"), GPU_ONLY)
def test_a_requested_backend_that_cannot_run_is_an_error(op: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_ops({op: name}, CPU)
    refusal = backends_of(op)[name].why_not(CPU)
    assert refusal is not None
    assert "GPU" in refusal and refusal.endswith("the model is on cpu")
    others = ", ".join(["auto", *(other for other in backends_of(op) if other != name)])
    assert str(caught.value) == f"ops.{op}={name}: {refusal}. Use ops.{op}= one of {others}."


@pytest.mark.parametrize("op", OP_NAMES)
def test_an_unknown_backend_is_refused_with_a_list_of_known_ones(op: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(op, "flash9", CPU)
    assert str(caught.value) == f"ops.{op}=flash9: no such backend. Known: auto, {', '.join(backends_of(op))}."


@pytest.mark.parametrize("op", OP_NAMES)
def test_the_config_accepts_the_same_backend_names(op: str) -> None:
    names = get_args(OpsSection.model_fields[op].annotation)
    assert names[0] == "auto"
    assert OpsSection.model_fields[op].default == "auto"
    # The config accepts fp8 whether or not its module exists.
    assert set(backends_of(op)) - {"fp8"} == set(names) - {"auto", "fp8"}


@pytest.mark.parametrize("op", OP_NAMES)
def test_the_reference_comes_last_and_always_runs(op: str) -> None:
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
    # torch itself may import triton if it is installed.
    torch_alone = subprocess.run(
        [sys.executable, "-c", "import sys, torch; print('triton' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == ("['triton']" if torch_alone == "True" else "[]")


def test_a_library_is_imported_only_for_a_gpu() -> None:
    assert needs_library("json", "json")(GPU) is None
    assert needs_library("json", "json")(CPU) == NO_GPU
    refusal = needs_library("no_such_module_anywhere", "that-package")(GPU)
    assert refusal is not None
    assert "cannot import that-package (No module named 'no_such_module_anywhere')" in refusal
