"""Strict parser for DeepSpeed's hostfile: one `host slots=N` per line, `#` comments and blank lines.

DeepSpeed's own parser ignores the end of a line: `node1 slots=8x` runs 8 processes and `node1 slots=2 slots=4` runs 2.
Here such a line is an error with its line number. DeepSpeed reads every file that passes in the same way.
"""

import os
import re
from pathlib import Path

from z2all_ds.base.errors import ClusterError
from z2all_ds.base.storage.open_files import open_regular

HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]*[A-Za-z0-9_])?|[0-9A-Fa-f:]+")
"""A name, an IPv4 address or an IPv6 address. No `user@` and no `:port`: ssh takes these from ~/.ssh/config."""


def read_text(file: Path) -> str:
    """Return the text of a hostfile of either format."""
    try:
        # Without "-sig", a byte-order mark would become part of the first name.
        with os.fdopen(open_regular(file), encoding="utf-8-sig") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ClusterError(f"hostfile {file}", f"cannot be read ({reason})", "Give the path of a hostfile.") from error


def parse_hostfile_text(text: str, source: str) -> dict[str, int]:
    """Return the slots of each host, in the order of the file. `source` names the file in errors."""
    slots: dict[str, int] = {}
    lines: dict[str, int] = {}
    # Not splitlines(): it also breaks at form feeds and the like, and the line numbers would differ from an editor's.
    for number, raw in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        where = f"{source}, line {number}"
        name, count = _parse_line(line, where)
        if name in slots:
            fix = "Keep one line per host and give it all its slots there."
            raise ClusterError(f"{where}: {name}", f"already listed in line {lines[name]}", fix)
        slots[name], lines[name] = count, number
    if not slots:
        raise ClusterError(source, "lists no host", "Add a line like `node1 slots=8`.")
    return slots


def _parse_line(line: str, where: str) -> tuple[str, int]:
    if "#" in line:
        # DeepSpeed ignores text after the slots, but reads `node1#old slots=2` as a host of that name.
        raise ClusterError(f"{where}: {line!r}", "a comment needs a line of its own", "Move it to the line above.")
    name, *rest = line.split()
    fix = f"Write `{name} slots=N`, with one slot per GPU."
    if not HOST_NAME.fullmatch(name):
        rule = "is not a host name or address (letters, digits, '.', '-', '_'; no user@ and no port)"
        raise ClusterError(f"{where}: {name!r}", rule, "Give the bare name; set user and port for it in ~/.ssh/config.")
    if not rest:
        raise ClusterError(f"{where}: {line!r}", "the number of slots is missing", fix)
    if len(rest) > 1:
        raise ClusterError(f"{where}: {line!r}", "a line is two words: host and slots", fix)
    slots = re.fullmatch(r"slots=([0-9]+)", rest[0])
    if not slots or int(slots[1]) < 1:
        raise ClusterError(f"{where}: {rest[0]!r}", "slots must be a whole number of at least 1", fix)
    return name, int(slots[1])
