"""Finds the files that travel with the package (DeepSpeed JSONs, presets) by name, in a checkout as in a wheel."""

import difflib
from pathlib import Path

from z2all_ds.base.errors import ConfigError

PACKAGE_DIR = Path(__file__).resolve().parents[1]


def resource_dir(name: str) -> Path:
    """The folder `name`: inside the package in a wheel, beside it in a checkout (where the card wants ds_configs/)."""
    for parent in (PACKAGE_DIR, PACKAGE_DIR.parent):
        if (parent / name).is_dir():
            return parent / name
    raise FileNotFoundError(f"{name}/ is neither in {PACKAGE_DIR} nor beside it: the installation is incomplete")


def find_named_file(wanted: str, kind: str, folder: str, suffix: str) -> Path:
    """A path as given if it exists, else the shipped file of that name; a miss lists what exists."""
    path = Path(wanted).expanduser()
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
