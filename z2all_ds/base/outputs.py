"""Files that users name for output (`--out`, `--write`)."""

import tempfile
import uuid
from pathlib import Path

from z2all_ds.base.atomic import explain_disk_errors, make_folder, write_whole
from z2all_ds.base.errors import ConfigError


def check_output(path: Path, option: str = "--out") -> None:
    """Refuse a folder, and a link, which writing would replace."""
    if path.is_symlink():
        raise ConfigError(f"{option} {path}", "is a link", "Give the file that it should lead to, or remove it.")
    if path.is_dir():
        raise ConfigError(f"{option} {path}", "is a folder", "Use a file in it.")


def require_writable(path: Path) -> None:
    """Check before long work that the file can be written, so that no result is lost at the end."""
    check_output(path)
    make_folder(path.parent)
    with explain_disk_errors(path.parent), tempfile.TemporaryFile(dir=path.parent):
        pass


def write_output(path: Path, data: bytes | str, option: str = "--out") -> Path:
    """Write the file atomically, and return its path. Other files next to it, such as PATH.tmp, stay."""
    check_output(path, option)
    make_folder(path.parent)
    try:
        with explain_disk_errors(path.parent):
            write_whole(path, data, temporary=path.with_name(f".z2all_{uuid.uuid4().hex}.tmp"))
    except OSError as error:
        raise ConfigError(f"{option} {path}", f"cannot be written ({error.strerror})", "Give another place.") from error
    return path
