"""The doctor: looks at everything on this machine that has stopped a run before, and says what to do about each.

It imports no torch and starts nothing heavy, so it answers at once and also where the installation itself is what is
broken. `fail` means that training cannot work, `warn` that it may fail or be slow later, `ok` needs nothing.
"""

import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TextIO

from z2all_ds import machine
from z2all_ds.build_locks import find_locks
from z2all_ds.console import human_bytes
from z2all_ds.errors import MachineError

OK, WARN, FAIL = "ok", "warn", "fail"

PACKAGES_TESTED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.13"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "transformers": ("5.17", "5.22"),
    "tokenizers": ("0.23", "0.23"),
    "safetensors": ("0.8", "0.8"),
    "pyarrow": ("26", "26"),
    "wandb": ("0.31", "0.31"),
}
"""First and last series that our tests have run with, both included. Others may well work: they only warn."""
OPTIONAL_PACKAGES = {"wandb"}
OPS = ("deepspeed_shm_comm", "cpu_adam", "fused_adam")
"""Compiled by DeepSpeed at first use: messages between CPU ranks, Adam on the CPU (offload), fused Adam."""

MIN_DISK_BYTES = 10**9
ROOMY_DISK_BYTES = 20 * 10**9
"""A checkpoint of the 1.2B model with its optimizer is 15 GB, and the one before it stays until it is written."""
MIN_SHM_BYTES = 10**9
MIN_OPEN_FILES = 4096
MAX_SHEBANG_LENGTH = 127
"""Older kernels cut a script's first line there, so every script in the environment dies with 'bad interpreter'."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `fix` is empty when there is nothing to do."""

    name: str
    status: str
    value: str
    fix: str = ""


def examine(folder: str | os.PathLike[str] = ".") -> list[Finding]:
    """Everything, in the order in which a run would meet it; `folder` is where runs and checkpoints will be written."""
    checks: list[Callable[[], list[Finding]]] = [
        _python,
        _interpreter_path,
        _packages,
        _apex,
        _gpus,
        _compiler,
        _ninja,
        _home,
        _ops,
        _locks,
        lambda: _disk(Path(folder)),
        _shared_memory,
        _open_files,
        _addresses,
    ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except MachineError as error:
            findings.append(Finding(error.what, FAIL, error.rule, error.fix))
    return findings


def has_failures(findings: list[Finding]) -> bool:
    """Whether training cannot work here."""
    return any(finding.status == FAIL for finding in findings)


def to_json(findings: list[Finding]) -> str:
    """For programs: a list of {name, status, value, fix}."""
    return json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False)


def render(findings: Sequence[Finding], file: TextIO | None = None) -> None:
    """Prints a table, what to do about each finding that is not ok, and the counts; to stdout unless told otherwise."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {OK: "green", WARN: "yellow", FAIL: "red"}
    marks = {status: f"[{colour}]{status}[/{colour}]" for status, colour in colours.items()}
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "what"):
        table.add_column(column, no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        table.add_row(marks[finding.status], escape(finding.name), escape(finding.value))
    console = Console(file=file, highlight=False)
    console.print(table)
    for finding in findings:
        if finding.fix:
            console.print(f"{marks[finding.status]} {escape(finding.name)}: {escape(finding.fix)}")
    console.print(", ".join(f"{sum(f.status == status for f in findings)} {status}" for status in colours))


# The installation


def _python() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 13):
        return [Finding("python", WARN, version, "Tested with 3.11 and 3.12: use one of these if packages misbehave.")]
    return [Finding("python", OK, version)]


def _interpreter_path() -> list[Finding]:
    return [judge_interpreter_path(sys.executable)]


def judge_interpreter_path(executable: str) -> Finding:
    """Whether scripts such as `deepspeed` and `z2all` can name this interpreter in their first line."""
    length = len("#!" + executable)
    fix = "Make the virtual environment in a folder with a shorter path and no blanks, or run `python -m ...`."
    if length > MAX_SHEBANG_LENGTH:
        return Finding("interpreter path", WARN, f"a script's first line would have {length} characters", fix)
    if re.search(r"\s", executable):
        return Finding("interpreter path", WARN, f"{executable!r} has a blank in it", fix)
    return Finding("interpreter path", OK, executable)


def _packages() -> list[Finding]:
    findings = []
    for name, (first, last) in PACKAGES_TESTED.items():
        try:
            version: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        findings.append(judge_package(name, version, first, last))
    return findings


def judge_package(name: str, version: str | None, first: str, last: str) -> Finding:
    """Compares an installed version with the first and last series known to work (both included)."""
    tested = first if first == last else f"{first} to {last}"
    install = f"Install it with `pip install -c constraints.txt {name}` (tested: {tested})."
    if version is None:
        return Finding(name, WARN if name in OPTIONAL_PACKAGES else FAIL, "not installed", install)
    found = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
    lowest, highest = ([int(number) for number in bound.split(".")] for bound in (first, last))
    if found[: len(lowest)] < lowest or found[: len(highest)] > highest:
        return Finding(name, WARN, version, f"Not a tested version. {install}")
    return Finding(name, OK, version)


def _apex() -> list[Finding]:
    """NVIDIA's apex is not on PyPI; `pip install apex` gets another package, which libraries then mistake for it."""
    try:
        version = metadata.version("apex")
    except metadata.PackageNotFoundError:
        return []
    spec = importlib.util.find_spec("apex")
    places = list(spec.submodule_search_locations or []) if spec else []
    if any((Path(place) / "optimizers").is_dir() for place in places):
        return [Finding("apex", OK, f"{version} (NVIDIA's)")]
    fix = "Run `pip uninstall apex`: libraries that look for NVIDIA's find this one, and nothing here needs either."
    return [Finding("apex", WARN, f"{version} is not NVIDIA's apex", fix)]


def _gpus() -> list[Finding]:
    count = machine.gpu_count()
    if count == 0:
        return [Finding("GPU", OK, "none visible: training runs on the CPU")]
    if machine.torch_build_name().endswith("_cpu"):
        return [Finding("GPU", WARN, f"{count} visible, but torch is a CPU build", "Install a CUDA build of torch.")]
    return [Finding("GPU", OK, f"{count} visible")]


# What DeepSpeed's ops need


def _compiler() -> list[Finding]:
    return [Finding("C++ compiler", OK, machine.require_compiler())]


def _ninja() -> list[Finding]:
    own = Path(sys.executable).parent / "ninja"
    first = shutil.which("ninja")
    if not own.exists() and first is None:
        return [Finding("ninja", FAIL, "not found", "Run `pip install ninja`: DeepSpeed builds its ops with it.")]
    if own.exists() and first != str(own):
        fix = f"Put {own.parent} first on PATH where you start deepspeed yourself: another ninja recompiles every op."
        return [Finding("ninja", WARN, f"PATH gives {first or 'none'}, the environment has its own", fix)]
    return [Finding("ninja", OK, str(first))]


def _home() -> list[Finding]:
    if machine.home_is_writable():
        return []
    fix = "Caches go to the temporary folder and may be lost. Set HOME to a writable folder to keep them."
    return [Finding("home folder", WARN, "not writable", fix)]


def _ops() -> list[Finding]:
    folder = machine.extensions_dir()
    findings = [Finding("compiled ops", OK, str(folder))]
    for op in OPS:
        built = machine.op_is_built(folder, op)
        findings.append(Finding(f"op {op}", OK, "built" if built else "not built: its first use compiles it, 45-90 s"))
    return findings


def _locks() -> list[Finding]:
    findings = []
    for lock in find_locks(machine.extensions_dir()):
        told = f"{lock.path}, {lock.age_seconds / 60:.0f} min old"
        if lock.state == "held":
            findings.append(Finding("build lock", OK, f"{told}: a build is running"))
        elif lock.state == "stale":
            fix = f"Its build was killed, and every start waits for it in silence: rm {lock.path}"
            findings.append(Finding("build lock", WARN, told, fix))
        else:
            fix = f"Another host or container may be building. If none is: rm {lock.path}"
            findings.append(Finding("build lock", WARN, told, fix))
    return findings or [Finding("build locks", OK, "none")]


# What a run uses up


def _disk(folder: Path) -> list[Finding]:
    bytes_free = machine.require_free_disk(folder, MIN_DISK_BYTES, "any run")
    told = f"{human_bytes(bytes_free)} free at {folder.absolute()}"
    if bytes_free < ROOMY_DISK_BYTES:
        return [Finding("disk", WARN, told, "Enough for a try-out; a checkpoint of a 1.2B model alone is 15 GB.")]
    return [Finding("disk", OK, told)]


def _shared_memory() -> list[Finding]:
    try:
        total_bytes = shutil.disk_usage("/dev/shm").total
    except OSError:
        return [Finding("shared memory", WARN, "no /dev/shm", "Mount a tmpfs there: loaders and ranks use it.")]
    if total_bytes < MIN_SHM_BYTES:
        fix = "Start the container with `--shm-size 8g` or `--ipc host`; with less, loaders die of a bus error."
        return [Finding("shared memory", WARN, human_bytes(total_bytes), fix)]
    return [Finding("shared memory", OK, human_bytes(total_bytes))]


def _open_files() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        return [Finding("open files", WARN, f"at most {soft}", f"Run `ulimit -n {wanted}` before you start a run.")]
    return [Finding("open files", OK, "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")]


def _addresses() -> list[Finding]:
    """The deepspeed launcher takes the first word of `hostname -I` for the master's address when it is given none."""
    try:
        answer = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10)
        addresses = answer.stdout.split() if answer.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired):
        addresses = []
    if not addresses:
        fix = "Give the deepspeed launcher --master_addr (127.0.0.1 on one machine): it takes the address from there."
        return [Finding("hostname -I", WARN, "no address", fix)]
    return [Finding("hostname -I", OK, " ".join(addresses))]
