"""Functions that the ssh servers of the tests share."""

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
"""The home folder in which ssh looks for keys, regardless of $HOME."""


def tool_path(name: str) -> str | None:
    """Return the path of a tool, which may also be in /usr/sbin or /sbin, or None."""
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


def make_key(path: Path) -> Path:
    """Create a private key, and its public key without a comment next to it."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return path


def sshd_config(port: int, host_key: Path, authorized: Path, *more: str) -> str:
    """Return a config that accepts only keys, also for root, and uses nothing of this machine's own sshd."""
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
    """Yield ~/.ssh, created if it is missing, as a mount point.

    If tests created it, the last test that uses it removes it: a folder that is removed here is unmounted in every
    namespace.
    """
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
                    with suppress(OSError):  # it is no longer empty
                        folder.rmdir()
