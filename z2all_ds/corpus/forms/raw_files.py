"""The raw files of a domain: what paths, folders and patterns stand for, in an order that is always the same."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from z2all_ds.base.errors import DataError


def expand_raw(paths: Iterable[str | Path]) -> list[Path]:
    """Files as given, folders walked in sorted order without hidden files, patterns expanded; each file once."""
    found: dict[str, Path] = {}  # by real path: links may give a file several names
    for given in paths:
        path = Path(given).expanduser()
        if path.exists():
            files = _files_in(path)
        elif glob.has_magic(str(path)):
            files = [file for match in sorted(glob.glob(str(path), recursive=True)) for file in _files_in(Path(match))]
        else:
            raise DataError(str(given), "does not exist", "Check the path; relative ones start at the current folder.")
        if not files:
            raise DataError(str(given), "holds no file (hidden ones do not count)", "Check the path.")
        for file in files:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _files_in(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files, seen = [], set()
    for folder, subfolders, names in os.walk(path, followlinks=True):
        # a link may lead back to a folder above it
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.is_file() or file.is_symlink())
