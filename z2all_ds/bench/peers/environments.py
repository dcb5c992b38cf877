"""The environment of the peers of `z2all bench data`: a venv in a cache folder, created when it is first needed.

One environment serves all peers, so that they share one torch and our version of `tokenizers`: tokenizing is most of
the work that is compared. streaming 0.13 requires transformers below 5, and torchvision, which brings another torch; it
is installed without dependencies, and with the packages that it does import.
"""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

from z2all_ds.base.child_process import module_command
from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import MachineError
from z2all_ds.bench.shared import error_line, run_process


def default_folder() -> Path:
    """Return the folder of the environment in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "z2all" / "bench_peers" / "data"


def requirements(peer: str) -> list[list[str]]:
    """Return the arguments of successive calls of `pip install`. torch comes first, so that the rest accepts it."""
    first = ["torch==2.13.0", "numpy>=2,<2.2"]
    common = [*first, f"tokenizers=={version('tokenizers')}", "xxhash<4"]
    if peer == "hf_datasets":
        return [first, [*common, "datasets==5.2.*"]]
    imported = ["transformers==5.*", "Brotli", "catalogue", "pillow", "pyarrow", "python-snappy", "tqdm", "zstd"]
    return [first, [*common, *imported], ["--no-deps", "mosaicml-streaming==0.13.*"]]


def python_of(folder: Path) -> Path:
    """Return the interpreter of the environment."""
    return folder / "bin" / "python"


def is_ready(folder: Path, peer: str) -> bool:
    """Return whether the current requirements of the peer are installed."""
    try:
        return bool(json.loads(_stamp(folder, peer).read_text()) == requirements(peer)) and python_of(folder).exists()
    except (OSError, ValueError):
        return False


def make_ready(folder: Path, peer: str) -> None:
    """Install the peer if it is missing."""
    if not is_ready(folder, peer):
        with heartbeat(f"installing {peer} in {folder}"):
            if not python_of(folder).exists():
                _run(module_command("venv", str(folder)))
            pip = [str(python_of(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            for arguments in requirements(peer):
                _run([*pip, *arguments])
        _stamp(folder, peer).write_text(json.dumps(requirements(peer)))


def _stamp(folder: Path, peer: str) -> Path:
    """Return the file that is written after a complete installation."""
    return folder / f"{peer}.installed.json"


def _run(command: list[str]) -> None:
    try:
        done = run_process(command, stderr=subprocess.PIPE)
        why = error_line(done.stderr or done.stdout) if done.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        raise MachineError("a peer", f"cannot be installed: {why}", "Install it yourself, or give --no-peers.")
