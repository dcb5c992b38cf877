"""Paths that users write, and errors of the operating system about them as one line.

pathlib raises RuntimeError for `~nobody/x` and for a loop of links, without naming the path.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from z2all_ds.base.errors import ConfigError, MachineError, Z2allError
from z2all_ds.base.url_passwords import urls_with_passwords

WRONG_PATHS = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY,
    errno.EINVAL, errno.ENXIO, errno.ENODEV,
}  # fmt: skip
FIXES = {
    errno.ENOSPC: "Free some space or choose another disk, then run the same command.",
    errno.EDQUOT: "Free some space or choose another disk, then run the same command.",
    errno.EACCES: "Change its permissions or choose another.",
    errno.EPERM: "Change its permissions or choose another.",
    errno.EROFS: "Choose a writable folder.",
    errno.EMFILE: "Raise the limit on open files (ulimit -n).",
}


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return the path with `~` and `~user` replaced by the home folder."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        name = found.partition("/")[0]
        raise ConfigError(f"{path}", f"there is no user {name[1:]}", f"For a file of that name, write ./{name}.")
    return Path(found)


def full_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path without `~` and links; a link that cannot be followed stays."""
    return Path(os.path.realpath(expanded(path)))


def system_error(error: Exception) -> OSError | None:
    """Return an error of the operating system itself; None for other ones, also those of libraries that use OSError.

    Libraries in Rust (tokenizers, safetensors) raise other exceptions, whose text ends in "(os error 28)".
    """
    if isinstance(error, OSError):
        return error if error.errno is not None and error.strerror else None
    if isinstance(error, Z2allError):
        return None
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


@contextmanager
def explain_system_errors() -> Iterator[None]:
    """Turn errors of the operating system that nothing else has handled into one line: the path and the reason."""
    try:
        yield
    except UnicodeEncodeError as error:
        if "surrogates" not in error.reason:
            raise
        fix = "Rename the file, or clean the text."
        raise ConfigError(_shortened(repr(error.object)), "is not valid UTF-8", fix) from error
    except Exception as raised:
        found = system_error(raised)
        if found is None or isinstance(found, BrokenPipeError):
            raise
        names = [str(name) for name in (found.filename, found.filename2) if name is not None]
        what = _shortened(" and ".join(names)) or "the operating system"
        kind = ConfigError if found.errno in WRONG_PATHS else MachineError
        fix = FIXES.get(found.errno or 0, "Check the path." if names else "--debug shows where.")
        raise kind(what, found.strerror or str(found), fix) from raised


def _shortened(text: str, most: int = 300) -> str:
    """Return the text, without its middle if it is long: a name over 255 bytes is itself the mistake."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


def refuse_passwords(value: Any) -> None:
    """Raise if a setting, or one of nested settings, is a URL with a password or token."""
    for shown in urls_with_passwords(value):
        rule = "a password in a URL would be written to run.yaml and sent to trackers"
        fix = "Remove it; give it to fsspec in ~/.config/fsspec/*.json or a variable such as FSSPEC_HTTP."
        raise ConfigError(shown, rule, fix)
