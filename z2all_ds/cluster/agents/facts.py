"""What a node knows of itself, as plain JSON: for comparing nodes with each other. Loads no torch."""

import hashlib
import resource
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import z2all_ds
from z2all_ds.cluster import doctor

CODE_SUFFIXES = (".py", ".json", ".yaml", ".txt")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def gather(run_dir: str, files: list[str]) -> dict[str, Any]:
    """Everything at once; `files` are those that must be the same everywhere."""
    return {
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: _version(name) for name in doctor.PACKAGES_TESTED},
        "code": code_hash(),
        "files": {file: file_hash(Path(file)) for file in files},
        "findings": [asdict(finding) for finding in doctor.examine(run_dir)],
        "gpus": gpus(),
        "interfaces": interfaces(),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "time_unix": time.time(),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def code_hash() -> str:
    """Of every source and setting of the package: versions are not changed with every edit, and nodes drift apart."""
    root = Path(z2all_ds.__file__).parent
    total = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        if file.suffix in CODE_SUFFIXES and "__pycache__" not in file.parts:
            total.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def file_hash(file: Path) -> str:
    """The beginning of its SHA-256, or why there is none."""
    try:
        return hashlib.sha256(file.expanduser().read_bytes()).hexdigest()[:16]
    except OSError as error:
        return error.strerror or str(error)


def gpus() -> list[str]:
    """Name and driver of each, as the vendor's tool tells them."""
    if not shutil.which(NVIDIA_SMI[0]):
        return []
    try:
        answer = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi does not answer ({error})"]
    lines = answer.stdout.strip().splitlines()
    return lines if answer.returncode == 0 else [f"nvidia-smi fails ({lines[0] if lines else answer.returncode})"]


def interfaces() -> dict[str, list[str]]:
    """The addresses of each network interface."""
    import psutil  # DeepSpeed brings it

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in kinds]
        for name, entries in psutil.net_if_addrs().items()
    }
