"""Finds the files shipped with the package (DeepSpeed JSONs, presets) by name, in a checkout and in a wheel."""

import difflib
from pathlib import Path

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.paths import expanded

PACKAGE_DIR = Path(__file__).resolve().parents[1]


def resource_dir(name: str) -> Path:
    """Return the folder `name`: inside the package in a wheel, next to it in a checkout."""
    for parent in (PACKAGE_DIR, PACKAGE_DIR.parent):
        if (parent / name).is_dir():
            return parent / name
    raise FileNotFoundError(f"{name}/ is neither in {PACKAGE_DIR} nor next to it: the installation is incomplete")


def find_named_file(wanted: str, kind: str, folder: str, suffix: str) -> Path:
    """Return the path if it is a file, else the shipped file of that name; the error lists the shipped ones."""
    path = expanded(wanted)
    if path.is_file():
        return path.resolve()
    shipped = {p.stem: p for p in sorted(resource_dir(folder).glob(f"*{suffix}"))}
    name = path.name.removesuffix(suffix)
    if path.parent == Path(".") and name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"{kind} {wanted!r}",
        f"neither a file nor one of the shipped ones ({', '.join(shipped)})",
        f"{guess}Give one of these names or the path of your own {suffix} file.",
    )
