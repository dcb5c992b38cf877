"""Queries of this machine (compiler, disk, GPUs, processes) and the environment variables for training processes.

Only the operating system is queried, not torch: this works before the slow imports and on a login node. DeepSpeed
compiles some of its ops at first use; most of the special cases here keep that build from failing late or from waiting
forever for the lock of a killed build.
"""

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from z2all_ds.base.errors import MachineError
from z2all_ds.base.paths import expanded

COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"

# Compiler and disk


def require_compiler(environment: Mapping[str, str] = os.environ) -> str:
    """Return the path of the C++ compiler that torch will use for DeepSpeed's ops: $CXX, else c++, else g++."""
    wanted = environment.get("CXX", "").strip()
    names = [shlex.split(wanted)[0]] if wanted else ["c++", "g++"]
    for name in names:
        found = shutil.which(name, path=environment.get("PATH"))
        if found:
            return found
    fix = "Install one: `apt install g++` (Debian, Ubuntu), `dnf install gcc-c++` (RHEL, Fedora) or `conda install gxx`"
    if wanted:
        raise MachineError(f"CXX={wanted}", "not found on PATH", f"{fix}, or unset CXX.")
    raise MachineError("C++ compiler", "DeepSpeed compiles ops at first use, but c++ and g++ are missing", f"{fix}.")


def require_free_disk(path: str | os.PathLike[str], bytes_needed: int, purpose: str) -> int:
    """Return the free bytes where `path` is or will be; raise if `purpose` needs more."""
    folder = expanded(path).absolute()
    while not folder.exists():
        folder = folder.parent
    bytes_free = shutil.disk_usage(folder).free
    if bytes_free < bytes_needed:
        raise MachineError(
            f"{bytes_free / 1e9:.2f} GB free at {folder}",
            f"{purpose} needs {bytes_needed / 1e9:.2f} GB",
            "Free some space there, or choose a folder on another disk.",
        )
    return bytes_free


# Folders and environment


def _is_writable_folder(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _make_writable_folder(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return _is_writable_folder(folder)


def home_is_writable(environment: Mapping[str, str] = os.environ) -> bool:
    """Return False in containers whose user has no home folder, where every cache below ~ would fail late."""
    home = environment.get("HOME") or os.path.expanduser("~")
    return os.path.isabs(home) and _is_writable_folder(Path(home))


def private_temp_dir() -> Path:
    """Return a private folder of this user in the temporary folder, safe to load shared libraries from."""
    folder = Path(tempfile.gettempdir()) / f"z2all-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        rule = f"cannot be created ({error.strerror})"
        raise MachineError(str(folder), rule, "Set TMPDIR to a writable folder.") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise MachineError(str(folder), "belongs to another user", "Remove it, or set TMPDIR to a folder of your own.")
    if found.st_mode & 0o022:
        raise MachineError(str(folder), "can be written to by other users", f"Run `chmod 700 {folder}`.")
    return folder


def set_compile_cache() -> None:
    """Let torch.compile in this process use a private cache. Its default, a folder with a known name in the temporary
    folder, may have been created by another user, and code in it is executed."""
    if COMPILE_CACHE not in os.environ:
        os.environ[COMPILE_CACHE] = str(_compile_cache())


def _compile_cache() -> Path:
    return private_temp_dir() / "torchinductor"


def _require_trusted(folder: Path, what: str) -> None:
    """Refuse a folder of libraries to load that another user owns or may write to; root and our groups may."""
    found = folder.stat()
    fix = "Set TORCH_EXTENSIONS_DIR to a folder of your own, or unset it."
    if found.st_uid not in (os.geteuid(), 0):
        raise MachineError(what, f"{folder} belongs to another user, whose libraries would be loaded", fix)
    if found.st_mode & stat.S_IWOTH:
        raise MachineError(what, f"{folder} can be written to by every user, and its libraries are loaded", fix)


def _torch_folder() -> Path | None:
    return _package_folder("torch")


def _package_folder(name: str) -> Path | None:
    """Return the folder a package is installed in, without importing it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def blank_free_packages(torch_folder: Path | None) -> Path | None:
    """Return a path without blanks to the folder that contains torch; None if its own path has no blanks.

    torch's builder writes `-L/path of/torch/lib` without quotes, so linking fails for an environment in a folder with
    a blank. A symbolic link in the temporary folder avoids this; every process must use the same path, or torch
    considers the build changed and repeats it.
    """
    if torch_folder is None or not re.search(r"\s", str(torch_folder)):
        return None
    packages = torch_folder.parent
    link = private_temp_dir() / f"packages-{hashlib.sha256(str(packages).encode()).hexdigest()[:16]}"
    if not link.is_symlink():
        with suppress(FileExistsError):  # created by another process in the meantime
            link.symlink_to(packages)
    return link


def torch_build_name() -> str:
    """Return torch's build name, e.g. py311_cpu or py312_cu130. Read from its version file: importing torch is slow."""
    versions = _torch_accelerators()
    accelerator = "cpu"
    for key, prefix in (("cuda", "cu"), ("hip", "rocm")):  # hip last: torch prefers it
        if key in versions:
            accelerator = prefix + versions[key].replace(".", "")
    return f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}_{accelerator}"


def torch_cuda_version() -> str | None:
    """Return the CUDA version that torch is built with, e.g. 13.0; None for other builds and without torch."""
    return _torch_accelerators().get("cuda")


def _torch_accelerators() -> dict[str, str]:
    folder = _torch_folder()
    version_file = folder / "version.py" if folder else None
    text = version_file.read_text(encoding="utf-8") if version_file and version_file.is_file() else ""
    return dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))


def extensions_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Return (and create) the cache of compiled ops: $TORCH_EXTENSIONS_DIR, torch's default, or a temporary folder.

    The default has the Python and CUDA versions in its name. torch omits them when the variable is set, so they are
    part of the returned path: ops of two Pythons are kept apart, and ops already built are found.
    """
    chosen = environment.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        folder, what = expanded(chosen).absolute(), f"TORCH_EXTENSIONS_DIR={chosen}"
        if not _make_writable_folder(folder):
            raise MachineError(what, "cannot be created or written to", "Set it to a writable folder, or unset it.")
        for place in (folder, *filter(Path.is_dir, folder.iterdir())):
            _require_trusted(place, what)
        return folder
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    name = Path("torch_extensions") / torch_build_name()
    if cache.is_absolute() and (home_is_writable(environment) or _is_writable_folder(cache)):
        folder = Path(os.path.realpath(cache)) / name
        if _make_writable_folder(folder):  # fails if root created ~/.cache
            return folder
    folder = private_temp_dir() / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def op_is_built(extensions: Path, op: str) -> bool:
    """Return whether an op of this environment's DeepSpeed is in the cache. torch would silently rebuild an op of
    another environment or of a killed build while all ranks wait."""
    library, plan = extensions / op / f"{op}.so", extensions / op / "build.ninja"
    deepspeed = _package_folder("deepspeed")
    if deepspeed is None:
        return False
    packages = blank_free_packages(_torch_folder()) or deepspeed.parent
    try:
        is_finished = library.stat().st_mtime >= plan.stat().st_mtime
        # With the blank: /a/.venv/lib/... is also the end of /b/a/.venv/lib/...
        return is_finished and f" {packages / 'deepspeed'}{os.sep}" in plan.read_text(errors="replace")
    except OSError:
        return False


def usable_cores() -> int:
    """Return the cores this process may use: its affinity, or fewer if a container has a CPU quota (cgroup v2)."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return cores


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit new processes that do not compute to one thread each; otherwise numpy starts one spinning thread per core.

    On 16 cores that costs two seconds of CPU time per process at startup.
    """
    ours = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def default_environment(ranks: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables to set for `ranks` training processes on this one machine.

    Variables set by the user are not in the result, except PATH and TORCH_EXTENSIONS_DIR, which always are. Not for
    several machines: gloo is bound to the loopback interface.
    """
    wanted = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // max(1, ranks))),
        "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive the fork of data loader workers
    }
    if any(name == "lo" for _, name in socket.if_nameindex()):
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise gloo needs the host name to resolve
    if gpu_count(environment) == 0:
        wanted["DS_ACCELERATOR"] = "cpu"
    if not home_is_writable(environment):
        temporary = private_temp_dir()
        wanted["HF_HOME"] = str(temporary / "huggingface")
        wanted["MPLCONFIGDIR"] = str(temporary / "matplotlib")
        wanted["TRITON_CACHE_DIR"] = str(temporary / "triton")
    path = environment.get("PATH", os.defpath)
    gxx = shutil.which("g++", path=path)
    if gxx and not shutil.which("c++", path=path):
        wanted["CXX"] = gxx  # torch only looks for c++
    result = {key: value for key, value in wanted.items() if key not in environment}
    # The interpreter's own ninja must come first: a different version marks every build as changed.
    own_bin = str(Path(sys.executable).parent)
    result["PATH"] = os.pathsep.join([own_bin, *(part for part in path.split(os.pathsep) if part != own_bin)])
    result["TORCH_EXTENSIONS_DIR"] = str(extensions_dir(environment))
    if COMPILE_CACHE not in environment:
        result[COMPILE_CACHE] = str(_compile_cache())
    packages = blank_free_packages(_torch_folder())
    if packages:
        theirs = [
            part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(packages)
        ]
        result["PYTHONPATH"] = os.pathsep.join([*theirs, str(packages)])
    return result


# Processes, ports, GPUs


def process_start_time(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; unique together with the pid. None if it is gone."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def process_is_alive(pid: int, start_time: int | None) -> bool:
    """Return whether this process still runs: not a later one with the same pid, not a zombie. Without a start time,
    or if /proc does not show it, any process with this pid counts."""
    fields = _stat_fields(pid) if pid > 0 else []
    if fields:
        return fields[0] not in "ZX" and start_time in (None, int(fields[19]))
    if pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and belongs to another user
        return True
    return True


def child_processes(pid: int) -> list[tuple[int, int]]:
    """Return (pid, start time) of the running direct children of a process; empty without /proc."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        fields = _stat_fields(int(name)) if name.isdigit() else []
        if fields and int(fields[1]) == pid and fields[0] not in "ZX":
            found.append((int(name), int(fields[19])))
    return found


def group_is_alive(group: int) -> bool:
    """Return whether a process of this group still runs. Zombies do not count: many containers do not reap orphans."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    if not _stat_fields(os.getpid()):  # without /proc, zombies cannot be recognized
        return True
    members = (_stat_fields(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return any(fields and int(fields[2]) == group and fields[0] not in "ZX" for fields in members)


def _stat_fields(pid: int) -> list[str]:
    """Return /proc/PID/stat from its third field (state) on; the second, the name, may contain spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def free_port() -> int:
    """Return a TCP port that was just free on all interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def gpu_count(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs usable with this environment, without loading CUDA; 0 if set to use the CPU."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if environment.get("DS_ACCELERATOR") == "cpu" or (visible is not None and visible.strip() in ("", "-1")):
        return 0
    present = sum(1 for node in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    present = present or _gpus_by_nvidia_smi()
    if visible is None or present == 0:
        return present
    usable = 0
    for entry in visible.split(","):  # CUDA stops at the first entry it cannot resolve
        if not re.fullmatch(r"\s*(\d+|GPU-.*|MIG-.*)\s*", entry) or (entry.strip().isdigit() and int(entry) >= present):
            break
        usable += 1
    return usable


def device_type() -> str:
    """Return the torch device type that ranks started now will train on."""
    return "cuda" if gpu_count() else "cpu"


def _gpus_by_nvidia_smi() -> int:
    """Count GPUs with nvidia-smi: WSL has GPUs but no device nodes."""
    program = shutil.which("nvidia-smi")
    if not program:
        return 0
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines()) if answer.returncode == 0 else 0
