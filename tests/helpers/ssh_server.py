"""What the tests' own ssh servers have in common."""

import fcntl
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOGIN_HOME = Path(pwd.getpwuid(os.getuid()).pw_dir)
"""Where ssh looks for keys, whatever $HOME says."""


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


@contextmanager
def login_ssh_folder() -> Iterator[Path]:
    """A ~/.ssh to mount another on. If tests made it, the last of those that use it removes it: a folder that is
    removed here is unmounted in every namespace."""
    folder = LOGIN_HOME / ".ssh"
    with open(Path(tempfile.gettempdir()) / f"z2all_tests_{os.getuid()}_ssh", "a+b") as made_by_tests:
        fcntl.flock(made_by_tests, fcntl.LOCK_SH)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            made_by_tests.write(b"made")
            made_by_tests.flush()
        try:
            yield folder
        finally:
            with suppress(BlockingIOError):
                fcntl.flock(made_by_tests, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(made_by_tests.fileno()).st_size:
                    made_by_tests.truncate(0)
                    with suppress(OSError):  # somebody has put something into it since
                        folder.rmdir()
