"""Reads DeepSpeed's hostfile: one `host slots=N` a line, `#` comments and blank lines; anything else is an error.

DeepSpeed's own parser takes a line by its beginning and drops the rest: `node1 slots=8x` runs 8 processes and
`node1 slots=2 slots=4` runs 2. Here the whole line has to be meant, and what is not is named with its line number,
before anything is started. Whatever passes here DeepSpeed reads in the same way.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.errors import ClusterError

EXPECTED_LINE = "node1 slots=8"
HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]*[A-Za-z0-9_])?|[0-9A-Fa-f:]+")
"""A name, an IPv4 address or an IPv6 address. No `user@` and no `:port`: ssh takes these from ~/.ssh/config."""


@dataclass(frozen=True)
class Host:
    """One machine and how many processes (usually: GPUs) it takes."""

    name: str
    slots: int


def parse_hostfile(path: str | os.PathLike[str]) -> list[Host]:
    """The hosts in the order of the file; the first one is where rank 0 runs."""
    file = Path(path).expanduser()
    return parse_hostfile_text(read_text(file), str(file))


def read_text(file: Path) -> str:
    """A hostfile's text, in whichever form it is."""
    try:
        return file.read_text(encoding="utf-8-sig")  # an editor's byte-order mark would become part of the first name
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ClusterError(f"hostfile {file}", f"cannot be read ({reason})", "Give the path of a hostfile.") from error


def parse_hostfile_text(text: str, source: str) -> list[Host]:
    """The same for text already read; `source` names it in errors."""
    line_of_host: dict[str, int] = {}
    hosts = []
    # Not splitlines(): it also breaks at form feeds and the like, and the line numbers would differ from an editor's.
    for number, raw in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        host = _parse_line(line, f"{source}, line {number}")
        if host.name in line_of_host:
            raise ClusterError(
                f"{source}, line {number}: {host.name}",
                f"already listed in line {line_of_host[host.name]}",
                "Keep one line per host and give it all its slots there.",
            )
        line_of_host[host.name] = number
        hosts.append(host)
    if not hosts:
        raise ClusterError(source, "lists no host", f"Add a line like `{EXPECTED_LINE}`.")
    return hosts


def _parse_line(line: str, where: str) -> Host:
    if "#" in line:
        # DeepSpeed happens to ignore what follows the slots, but takes `node1#old slots=2` for a host of that name.
        raise ClusterError(f"{where}: {line!r}", "a comment needs a line of its own", "Move it to the line above.")
    name, *rest = line.split()
    if not HOST_NAME.fullmatch(name):
        raise ClusterError(
            f"{where}: {name!r}",
            "is no host name or address (letters, digits, '.', '-', '_'; no user@ and no port)",
            "Give the bare name; set user and port for it in ~/.ssh/config.",
        )
    if not rest:
        raise ClusterError(f"{where}: {line!r}", "the number of slots is missing", f"Write `{name} slots=N`.")
    if len(rest) > 1:
        raise ClusterError(f"{where}: {line!r}", "a line is two words: host and slots", f"Write `{name} slots=N`.")
    slots = re.fullmatch(r"slots=([0-9]+)", rest[0])
    if not slots or int(slots[1]) < 1:
        raise ClusterError(
            f"{where}: {rest[0]!r}",
            "slots must be a whole number of at least 1",
            f"Write it like `{EXPECTED_LINE}`: as many slots as processes are to run there (one per GPU).",
        )
    return Host(name, int(slots[1]))
