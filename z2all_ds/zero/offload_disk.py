"""Checks the machine's support for offload to disk (`device: nvme` in a DeepSpeed JSON) before anything is loaded.

DeepSpeed itself fails late: for the folder when the model is built, for libaio during a build.
"""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from z2all_ds.base import machine
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.zero.ds_config import OFFLOADS, ResolvedDeepSpeed
from z2all_ds.zero.ds_json import zero_section


def disk_folders(config: dict[str, Any]) -> list[Path]:
    """Return the folders of a resolved JSON that weights or optimizer states are written to; usually none."""
    sections = [zero_section(config).get(what) or {} for what in OFFLOADS]
    paths = [section["nvme_path"] for section in sections if section.get("device") == "nvme"]
    return [Path(path) for path in dict.fromkeys(paths)]


def require_disk(resolved: ResolvedDeepSpeed) -> None:
    """Create the folders and write one byte into each."""
    for folder in disk_folders(resolved.config):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder) as probe:
                probe.write(b"0")
        except OSError as error:
            raise ConfigError(
                f"nvme_path {folder}",
                f"cannot be written ({error.strerror})",
                "Set train.nvme_folder to a writable folder on a fast disk.",
            ) from None


def require_libaio(environment: Mapping[str, str] = os.environ) -> None:
    """Compile and link a minimal program against libaio, as the build of DeepSpeed's async_io will."""
    compiler = shlex.split(environment.get("CXX", "")) or [machine.require_compiler(environment)]
    command = [*compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
    program = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
    answer = subprocess.run(command, input=program, env=dict(environment), capture_output=True, text=True)
    if answer.returncode:
        raise MachineError(
            "offload to nvme",
            "DeepSpeed's async_io needs libaio and its headers, which are not installed",
            "Install them: `apt install libaio-dev` (Debian, Ubuntu) or `dnf install libaio-devel` (RHEL, Fedora).",
        )
