"""Facts about a node as plain JSON, for comparison with other nodes. Loads no torch."""

import hashlib
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import z2all_ds
from z2all_ds.base.paths import expanded
from z2all_ds.cluster import doctor
from z2all_ds.cluster.doctor.installation import version_of

CODE_SUFFIXES = (".py", ".json", ".yaml", ".txt")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def gather(run_dir: str, files: list[str]) -> dict[str, Any]:
    """Return all facts; `files` are those that must be the same on all nodes."""
    return {
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: version_of(name) or "not installed" for name in doctor.PACKAGES_TESTED},
        "code": code_hash(),
        "files": {file: file_hash(Path(file)) for file in files},
        "findings": [asdict(finding) for finding in doctor.examine(run_dir)],
        "gpus": gpus(),
        "interfaces": interfaces(),
    }


def code_hash() -> str:
    """Hash all sources and settings of the package: edits do not change its version."""
    root = Path(z2all_ds.__file__).parent
    total = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        if file.suffix in CODE_SUFFIXES and "__pycache__" not in file.parts:
            total.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def file_hash(file: Path) -> str:
    """Return the first 16 digits of its SHA-256, or the reason why it cannot be read."""
    try:
        return hashlib.sha256(expanded(file).read_bytes()).hexdigest()[:16]
    except OSError as error:
        return error.strerror or str(error)


def gpus() -> list[str]:
    """Return name and driver of each GPU, as nvidia-smi reports them."""
    if not shutil.which(NVIDIA_SMI[0]):
        return []
    try:
        answer = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi does not answer ({error})"]
    lines = answer.stdout.strip().splitlines()
    return lines if answer.returncode == 0 else [f"nvidia-smi fails ({lines[0] if lines else answer.returncode})"]


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface."""
    import psutil  # a dependency of DeepSpeed

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
