"""What the tests' own ssh servers have in common."""

import os
import shutil
import subprocess
from pathlib import Path


def tool_path(name: str) -> str | None:
    """Also where only root's PATH leads."""
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


def make_key(path: Path) -> Path:
    """A private key, and the public one beside it, without a comment."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return path


def sshd_config(port: int, host_key: Path, authorized: Path, *more: str) -> str:
    """Keys alone, also root's, and nothing of this machine's own sshd."""
    lines = [
        f"Port {port}",
        f"HostKey {host_key}",
        f"AuthorizedKeysFile {authorized}",
        "PidFile none",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "StrictModes no",
        *more,
    ]
    return "\n".join(lines) + "\n"
