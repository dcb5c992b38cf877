"""Requirements of DeepSpeed's ops, which it compiles at first use: compilers, ninja, a cache without stale locks."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from z2all_ds.base import machine
from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Check, Finding
from z2all_ds.zero.build_locks import find_locks

OPS = ("deepspeed_shm_comm", "cpu_adam", "fused_adam", "async_io")
"""Communication between CPU ranks, Adam on the CPU (offload), fused Adam, disk offload."""


def compiler() -> Finding:
    return Finding("C++ compiler", OK, machine.require_compiler())


def nvcc() -> Finding | list[Finding]:
    """Check nvcc if there is a GPU and a CUDA build of torch."""
    cuda = machine.torch_cuda_version()
    if not cuda or not machine.gpu_count():
        return []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    program = shutil.which("nvcc", path=f"{home}/bin" if home else None) or shutil.which("nvcc")
    version = ""
    if program:
        try:
            version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.TimeoutExpired):
            program = None
    return judge_nvcc(program, version, cuda)


def judge_nvcc(program: str | None, version: str, cuda: str) -> Finding:
    """Compare major versions: torch builds ops only with an nvcc of its own CUDA version."""
    if program is None:
        return Finding("nvcc", OK, "none: DeepSpeed's CUDA ops cannot be built; our optimizers do not need them")
    release = re.search(r"release (\d+)\.(\d+)", version)
    if not release:
        fix = f"Install CUDA {cuda}, or remove this nvcc from PATH and CUDA_HOME."
        return Finding("nvcc", WARN, f"{program} does not print its version", fix)
    value = f"{release[1]}.{release[2]} at {program}, torch is built with CUDA {cuda}"
    if release[1] != cuda.split(".")[0]:
        fix = f"Set CUDA_HOME to an installation of CUDA {cuda}: with this one no CUDA op can be built."
        return Finding("nvcc", WARN, value, fix)
    return Finding("nvcc", OK, value)


def gpu_architectures(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Warn about letters in TORCH_CUDA_ARCH_LIST, whose entries DeepSpeed reads as numbers."""
    chosen = environment.get("TORCH_CUDA_ARCH_LIST", "")
    if not re.search(r"\d[a-z]\b", chosen):
        return []
    plain = re.sub(r"(\d)[a-z]\b", r"\1", chosen)
    fix = f"export TORCH_CUDA_ARCH_LIST='{plain}': DeepSpeed cannot read the letter and builds no ops."
    return [Finding("TORCH_CUDA_ARCH_LIST", WARN, chosen, fix)]


def ninja() -> Finding:
    own = Path(sys.executable).parent / "ninja"
    first = shutil.which("ninja")
    if not own.exists() and first is None:
        return Finding("ninja", FAIL, "not found", "Run `pip install ninja`: DeepSpeed builds its ops with it.")
    if own.exists() and first != str(own):
        fix = f"Put {own.parent} first on PATH if you start deepspeed yourself: another ninja rebuilds every op."
        return Finding("ninja", WARN, f"PATH has {first or 'none'}, but the environment has its own", fix)
    return Finding("ninja", OK, str(first))


def home() -> list[Finding]:
    if machine.home_is_writable():
        return []
    fix = "Caches go to the temporary folder and may be lost. Set HOME to a writable folder to keep them."
    return [Finding("home folder", WARN, "not writable", fix)]


def ops() -> list[Finding]:
    folder = machine.extensions_dir()
    findings = [Finding("compiled ops", OK, str(folder))]
    for op in OPS:
        missing = "not built: its first use compiles it, which takes a minute or more (--prebuild builds it now)"
        findings.append(Finding(f"op {op}", OK, "built" if machine.op_is_built(folder, op) else missing))
    return findings


def locks() -> list[Finding]:
    findings = []
    for lock in find_locks(machine.extensions_dir()):
        value = f"{lock.path}, {lock.age_seconds / 60:.0f} min old"
        if lock.state == "held":
            findings.append(Finding("build lock", OK, f"{value}: a build is running"))
            continue
        fix = f"Another host or container may be building. If none is: rm {lock.path}"
        if lock.state == "stale":
            fix = f"Its build was killed, and every start waits for it: `z2all doctor --fix`, or rm {lock.path}"
        findings.append(Finding("build lock", WARN, value, fix))
    return findings or [Finding("build locks", OK, "none")]


CHECKS: tuple[Check, ...] = (compiler, nvcc, gpu_architectures, ninja, home, ops, locks)
