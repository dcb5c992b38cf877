"""Files that users name for output (`--out`, `--write`, `--plot`).

An existing file is replaced only if it is empty or carries `MARK` in its first bytes: plots (metadata), JSON reports
(first key) and hostfiles (comment). Answers of `z2all generate` and run configs have no mark and are never replaced:
JSON lines have no place for one, and users edit and copy run configs.
"""

import io
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from z2all_ds.base.atomic import explain_disk_errors, make_folder, publish, write_whole
from z2all_ds.base.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "written by z2all, which may replace this file (mark af52ac442acea57b)"
HEAD_BYTES = 4096
"""The mark is within the first bytes: an SVG has it after about 700, a PNG after about 120."""
PLOT_SUFFIXES = (".png", ".svg")


def check_output(path: Path, option: str = "--out") -> None:
    """Refuse whatever writing must not replace: a folder, a link, a device, and a file without our mark."""
    if path.is_symlink():
        raise ConfigError(f"{option} {path}", "is a link", "Give the file that it should lead to, or remove it.")
    if path.is_dir():
        raise ConfigError(f"{option} {path}", "is a folder", "Use a file in it.")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{option} {path}", "is not a regular file", "Give another name.")
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head and MARK.encode() not in head:
        rule = "is there already and carries no mark of z2all"
        raise ConfigError(f"{option} {path}", rule, "Give another name, or remove it.")


def check_plot(path: Path, option: str = "--out", fix: str = "Give such a name.") -> None:
    """As `check_output`, for a plot; its suffix is the format."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"{option} {path}", "must end in .png or .svg", fix)
    check_output(path, option)


def require_writable(path: Path, option: str = "--out") -> None:
    """Check before long work that the file can be written, so that no result is lost at the end."""
    check_output(path, option)
    make_folder(path.parent)
    with explain_disk_errors(path.parent), tempfile.TemporaryFile(dir=path.parent):
        pass


def write_output(path: Path, data: bytes | str, option: str = "--out", mode: int = 0o666) -> Path:
    """Write the file atomically, and return its path. Other files next to it, such as PATH.tmp, stay."""
    check_output(path, option)
    make_folder(path.parent)
    temporary = path.with_name(f".z2all_{uuid.uuid4().hex}")
    try:
        with explain_disk_errors(path.parent):
            write_whole(temporary, data, mode)
            check_output(path, option)  # again, right before the rename: writing may have taken long
            publish(temporary, path)
    except OSError as error:
        raise ConfigError(f"{option} {path}", f"cannot be written ({error.strerror})", "Give another place.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return path


def write_plot(figure: "Figure", path: Path, option: str = "--out") -> Path:
    """Write the figure as PNG or SVG, with our mark, and return its path."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], metadata={"Creator": MARK})
    return write_output(path, drawn.getvalue(), option)
