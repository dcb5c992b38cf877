"""What DeepSpeed's ops need, which it compiles at first use: compilers, ninja, a cache, and no lock left in it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from z2all_ds.base import machine
from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Finding
from z2all_ds.zero.build_locks import find_locks

OPS = ("deepspeed_shm_comm", "cpu_adam", "fused_adam", "async_io")
"""Messages between CPU ranks, Adam on the CPU (offload), fused Adam, offload to a disk."""


def compiler() -> list[Finding]:
    return [Finding("C++ compiler", OK, machine.require_compiler())]


def nvcc() -> list[Finding]:
    """Only where there is a GPU and a torch for it."""
    cuda = machine.torch_cuda_version()
    if not cuda or not machine.gpu_count():
        return []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    program = shutil.which("nvcc", path=f"{home}/bin" if home else None) or shutil.which("nvcc")
    said = ""
    if program:
        try:
            said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.TimeoutExpired):
            program = None
    return [judge_nvcc(program, said, cuda)]


def judge_nvcc(program: str | None, said: str, cuda: str) -> Finding:
    """torch refuses to build an op with an nvcc of another major version than its own CUDA."""
    if program is None:
        return Finding(
            "nvcc", OK, "none: DeepSpeed's CUDA ops cannot be built, and no run by our optimizers needs them"
        )
    release = re.search(r"release (\d+)\.(\d+)", said)
    if not release:
        fix = f"Install CUDA {cuda}, or take this nvcc off PATH and out of CUDA_HOME."
        return Finding("nvcc", WARN, f"{program} does not tell its version", fix)
    found = f"{release[1]}.{release[2]}"
    if release[1] != cuda.split(".")[0]:
        fix = f"Set CUDA_HOME to an installation of CUDA {cuda}: with this one no CUDA op can be built."
        return Finding("nvcc", WARN, f"{found} at {program}, torch is built with CUDA {cuda}", fix)
    return Finding("nvcc", OK, f"{found} at {program}, torch is built with CUDA {cuda}")


def gpu_architectures(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """DeepSpeed reads each entry of TORCH_CUDA_ARCH_LIST as a number."""
    chosen = environment.get("TORCH_CUDA_ARCH_LIST", "")
    if not re.search(r"\d[a-z]\b", chosen):
        return []
    plain = re.sub(r"(\d)[a-z]\b", r"\1", chosen)
    fix = f"export TORCH_CUDA_ARCH_LIST='{plain}': DeepSpeed cannot read the letter, and builds no op."
    return [Finding("TORCH_CUDA_ARCH_LIST", WARN, chosen, fix)]


def ninja() -> list[Finding]:
    own = Path(sys.executable).parent / "ninja"
    first = shutil.which("ninja")
    if not own.exists() and first is None:
        return [Finding("ninja", FAIL, "not found", "Run `pip install ninja`: DeepSpeed builds its ops with it.")]
    if own.exists() and first != str(own):
        fix = f"Put {own.parent} first on PATH where you start deepspeed yourself: another ninja recompiles every op."
        return [Finding("ninja", WARN, f"PATH gives {first or 'none'}, the environment has its own", fix)]
    return [Finding("ninja", OK, str(first))]


def home() -> list[Finding]:
    if machine.home_is_writable():
        return []
    fix = "Caches go to the temporary folder and may be lost. Set HOME to a writable folder to keep them."
    return [Finding("home folder", WARN, "not writable", fix)]


def ops() -> list[Finding]:
    folder = machine.extensions_dir()
    findings = [Finding("compiled ops", OK, str(folder))]
    for op in OPS:
        built = machine.op_is_built(folder, op)
        told = "built" if built else "not built: its first use compiles it, a minute or more (--prebuild: now)"
        findings.append(Finding(f"op {op}", OK, told))
    return findings


def locks() -> list[Finding]:
    findings = []
    for lock in find_locks(machine.extensions_dir()):
        told = f"{lock.path}, {lock.age_seconds / 60:.0f} min old"
        if lock.state == "held":
            findings.append(Finding("build lock", OK, f"{told}: a build is running"))
        elif lock.state == "stale":
            fix = f"Its build was killed, and every start waits for it: `z2all doctor --fix`, or rm {lock.path}"
            findings.append(Finding("build lock", WARN, told, fix))
        else:
            fix = f"Another host or container may be building. If none is: rm {lock.path}"
            findings.append(Finding("build lock", WARN, told, fix))
    return findings or [Finding("build locks", OK, "none")]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (compiler, nvcc, gpu_architectures, ninja, home, ops, locks)
