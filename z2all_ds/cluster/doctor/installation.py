"""Interpreter and packages: missing, untested or incompatible versions, and failing imports."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from z2all_ds.base import machine
from z2all_ds.base.child_process import package_environment
from z2all_ds.cluster.doctor import gpus
from z2all_ds.cluster.doctor.findings import FAIL, OK, WARN, Check, Finding

PACKAGES_TESTED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.13"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "transformers": ("5.17", "5.22"),
    "tokenizers": ("0.23", "0.23"),
    "safetensors": ("0.8", "0.8"),
    "pyarrow": ("26", "26"),
    "wandb": ("0.31", "0.31"),
}
"""First and last series that our tests have run with, inclusive. Others may work: they are only a warning."""
OPTIONAL_PACKAGES = {"wandb"}
LOADED = ("torch", "deepspeed")
LOAD_SECONDS = 120.0
"""For both: three seconds normally, far more from a shared disk with a cold cache."""
LOAD = """
import importlib, sys
for name in sys.argv[1:]:
    print("loading", name, flush=True)
    importlib.import_module(name)
cuda = sys.modules["torch"].cuda
print("gpus", cuda.device_count() if cuda.is_available() else 0)
"""
OTHER_PACKAGES = ("triton", "flash-attn", "xformers", "liger-kernel", "torchao", "nvidia-ml-py", "numpy")
"""Optional packages whose version requirements are checked, too."""
MAX_SHEBANG_LENGTH = 127
"""Older kernels truncate the first line of a script there, so that scripts fail with 'bad interpreter'."""


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 13):
        return Finding("python", WARN, version, "Tested with 3.11 and 3.12: use one of these if packages fail.")
    return Finding("python", OK, version)


def interpreter_path(executable: str = sys.executable) -> Finding:
    """Check that scripts such as `deepspeed` and `z2all` can name this interpreter in their first line."""
    length = len("#!" + executable)
    fix = "Create the virtual environment in a folder with a shorter path without blanks, or run `python -m ...`."
    if length > MAX_SHEBANG_LENGTH:
        return Finding("interpreter path", WARN, f"a script's first line would have {length} characters", fix)
    if re.search(r"\s", executable):
        return Finding("interpreter path", WARN, f"{executable!r} contains a blank", fix)
    return Finding("interpreter path", OK, executable)


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages() -> list[Finding]:
    conflicting = unmet(*_installed())  # `together` reports them
    names = [name for name in PACKAGES_TESTED if name not in conflicting]
    return [judge_package(name, version_of(name), *PACKAGES_TESTED[name]) for name in names]


def judge_package(name: str, version: str | None, first: str, last: str) -> Finding:
    """Compare an installed version with the first and last series known to work, inclusive."""
    tested = first if first == last else f"{first} to {last}"
    install = f"Install it with `pip install -c constraints.txt {name}` (tested: {tested})."
    if version is None:
        return Finding(name, WARN if name in OPTIONAL_PACKAGES else FAIL, "not installed", install)
    found = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
    lowest, highest = ([int(number) for number in bound.split(".")] for bound in (first, last))
    if found[: len(lowest)] < lowest or found[: len(highest)] > highest:
        return Finding(name, WARN, version, f"Not a tested version. {install}")
    return Finding(name, OK, version)


def together() -> list[Finding]:
    installed, requirements = _installed()
    findings = unmet_requirements(installed, requirements)
    findings += built_for_another_torch(installed, machine.torch_cuda_version())
    return findings or [Finding("packages together", OK, "their versions are compatible")]


def _installed() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return versions and requirements of the installed packages."""
    names = [*PACKAGES_TESTED, *OTHER_PACKAGES]
    installed = {name: version for name in names if (version := version_of(name))}
    return installed, {name: metadata.requires(name) or [] for name in installed}


def unmet_requirements(installed: Mapping[str, str], requirements: Mapping[str, Iterable[str]]) -> list[Finding]:
    """Report version conflicts. pip reports them only once, at the install that causes them."""
    findings = []
    for wanted, by in unmet(installed, requirements).items():
        needs = [f"{name} {installed[name]} needs {wanted}{specifier}" for name, specifier in by.items()]
        fix = f"Install them in one command: `pip install -c constraints.txt {' '.join(by)} {wanted}`."
        value = f"{'; '.join(needs)}, installed is {installed[wanted]}"
        findings.append(Finding("packages together", WARN, value, fix))
    return findings


def unmet(installed: Mapping[str, str], requirements: Mapping[str, Iterable[str]]) -> dict[str, dict[str, str]]:
    """Return package -> packages that need another version of it -> that version."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    names = {canonicalize_name(name): name for name in installed}
    found: dict[str, dict[str, str]] = {}
    for name, lines in requirements.items():
        for line in lines:
            try:
                wanted = Requirement(line)
            except InvalidRequirement:  # an outdated syntax
                continue
            other = names.get(canonicalize_name(wanted.name))
            if other is None or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            if not wanted.specifier.contains(installed[other], prereleases=True):
                found.setdefault(other, {})[name] = str(wanted.specifier)
    return found


def built_for_another_torch(installed: Mapping[str, str], cuda: str | None) -> list[Finding]:
    """Check wheels with kernels, which are built for one torch and one CUDA: 2.8.3+cu12torch2.6."""
    torch, findings = installed.get("torch", ""), []
    for name in ("flash-attn", "xformers"):
        version = installed.get(name, "")
        built = re.search(r"\+.*?(?:cu(\d+))?(?:torch(\d+\.\d+))?(?:cxx11|$)", version)
        for_cuda, for_torch = (built[1], built[2]) if built else (None, None)
        wrong_torch = bool(for_torch) and not re.match(rf"{re.escape(for_torch or '')}(\D|$)", torch)
        wrong_cuda = bool(for_cuda and cuda) and (for_cuda or "")[:2] != (cuda or "").split(".")[0]
        if wrong_torch or wrong_cuda:
            has = f"torch {torch.partition('+')[0]} with CUDA {cuda or 'none'}"
            fix = f"Install {name} for this torch, or remove it: our kernels do not need it."
            findings.append(Finding("packages together", WARN, f"{name} {version} was not built for {has}", fix))
    return findings


def loading() -> list[Finding]:
    """Import torch and deepspeed in a child process, since an incompatible library may end the process."""
    if any(version_of(name) is None for name in LOADED):
        return []  # `packages` reports it
    environment = {**package_environment(), **({} if machine.gpu_count() else {"DS_ACCELERATOR": "cpu"})}
    command = [sys.executable, "-c", LOAD, *LOADED]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LOAD_SECONDS)
    except subprocess.TimeoutExpired:
        fix = "Find the slow import: `python -X importtime -c 'import torch, deepspeed'`; a shared disk may be slow."
        return [Finding("packages load", WARN, f"not within {LOAD_SECONDS:.0f} s", fix)]
    # A driver that is too old has its own finding.
    good = not any(finding.name == "GPU driver" and finding.status != OK for finding in gpus.check())
    return [judge_loading(answer.returncode, answer.stdout, answer.stderr, machine.gpu_count() if good else 0)]


def judge_loading(code: int, output: str, errors: str, visible: int) -> Finding:
    """Judge exit code and output of LOAD, given the number of visible GPUs."""
    if code != 0:
        name = (re.findall(r"^loading (\S+)", output, re.MULTILINE) or ["python"])[-1]
        last = (errors.strip().splitlines() or [f"its process ended with code {code}"])[-1]
        fix = f"Reinstall it with its dependencies: `pip install --force-reinstall -c constraints.txt {name}`."
        return Finding("packages load", FAIL, f"{name} does not ({last})", fix)
    seen = int(re.findall(r"^gpus (\d+)", output, re.MULTILINE)[-1])
    built_for_gpus = not machine.torch_build_name().endswith("_cpu")  # otherwise `gpus.check` reports it
    if built_for_gpus and seen < visible:
        fix = "Run `python -c 'import torch; torch.cuda.init()'`; usually the driver is too old or hangs."
        return Finding("packages load", FAIL, f"torch can use {seen} of {visible} GPUs", fix)
    return Finding("packages load", OK, f"{' and '.join(LOADED)}" + (f", with {seen} GPU(s)" if seen else ""))


def apex() -> list[Finding]:
    """Detect PyPI's `apex`, which is not NVIDIA's but is mistaken for it by libraries."""
    version = version_of("apex")
    if version is None:
        return []
    spec = importlib.util.find_spec("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if any((Path(folder) / "optimizers").is_dir() for folder in folders):
        return [Finding("apex", OK, f"{version} (NVIDIA's)")]
    fix = "Run `pip uninstall apex`: libraries mistake it for NVIDIA's, and nothing here needs either."
    return [Finding("apex", WARN, f"{version} is not NVIDIA's apex", fix)]


CHECKS: tuple[Check, ...] = (python, interpreter_path, packages, together, apex)
