"""The environment in which the peers are measured: made on demand, kept in a cache folder, never the one we run in.

One environment serves all peers, so that they share one torch and one version of `tokenizers`, which is ours: the
tokenizer is most of the work that is compared. streaming 0.13 asks for transformers below 5 and for torchvision, which
brings another torch; it is installed without them, and with what it really imports.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import MachineError
from z2all_ds.bench.shared import last_words

Steps = list[list[str]]
"""Arguments of `pip install`, call after call."""

PEERS = {"hf_datasets": "datasets", "mosaic_streaming": "mosaicml-streaming"}
"""Script -> package."""


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "z2all" / "bench_peers" / "data"


def requirements(peer: str) -> Steps:
    """torch first and by itself: whatever comes later has to take it."""
    first = ["torch==2.13.0", "numpy>=2,<2.2"]
    common = [*first, f"tokenizers=={version('tokenizers')}", "xxhash<4"]
    if peer == "hf_datasets":
        return [first, [*common, "datasets==5.2.*"]]
    imported = ["transformers==5.*", "Brotli", "catalogue", "pillow", "pyarrow", "python-snappy", "tqdm", "zstd"]
    return [first, [*common, *imported], ["--no-deps", "mosaicml-streaming==0.13.*"]]


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def is_ready(folder: Path, peer: str) -> bool:
    """Whether all that the peer needs was installed there, as it is asked for today."""
    try:
        return bool(json.loads(_stamp(folder, peer).read_text()) == requirements(peer)) and python_of(folder).exists()
    except (OSError, ValueError):
        return False


def make_ready(folder: Path, peer: str) -> None:
    """Installs the peer where it is missing."""
    if not is_ready(folder, peer):
        with heartbeat(f"installing {PEERS[peer]} in {folder}"):
            if not python_of(folder).exists():
                _run([sys.executable, "-m", "venv", str(folder)])
            pip = [str(python_of(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            for arguments in requirements(peer):
                _run([*pip, *arguments])
        _stamp(folder, peer).write_text(json.dumps(requirements(peer)))


def _stamp(folder: Path, peer: str) -> Path:
    """Written last."""
    return folder / f"{peer}.installed.json"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        why = last_words(done.stderr or done.stdout) if done.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        raise MachineError("a peer", f"cannot be installed: {why}", "Install it by hand, or give --no-peers.")
