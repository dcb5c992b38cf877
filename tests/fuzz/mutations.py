"""Damage to files and strange arguments, chosen by a seeded random generator."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "0",
    "auto", "a\nb", "\x1b[31m", "[/bold]", "\ud800", "日本", "a" * 5000, "../../etc", "/", "~nouser/x", [], {}, [[]],
    [None], {"": None}, {"a": {"b": 1}}, ["x"] * 50, "2024-01-01", "!!python/object:os.system", "{{ 1 }}",
]  # fmt: skip
ARGUMENTS = [
    "", ".", "..", "/dev/null", "~", "~nouser/x", "a" * 300, "a/" * 3000, "loop", "loop/x", "dangling", "missing/x",
    "run.yaml", "corpus", "-1", "0", "1e400", "nan", "99999999999999999999", "a\nb", "\x1b[2J", "[red]", "\udcff.json",
    "名字", "memory://x", "file:///nope", "x://y", "=", "a=b=c", "a,,b", "*", "[", "%s", "{0}", ":", "--", "-",
    "--json", "train.steps=", "train.steps=[", "model.vocab_size=1e9", "data.corpus=~nouser", "run_dir=" + "a" * 300,
    "a.b.c=1", "train.steps=2024-01-01", "train.steps=" + "9" * 5000, "train.steps=" + "[" * 2000, "/proc/self/mem",
    "/proc/1/environ",
]  # fmt: skip
NUMBERS = ["0", "-1", "1", "7", "1e9", "99999999999999999999", "nan", "inf", "-inf", "0.5", "", "x"]
MAX_NODES = 2000


def damage(path: Path, random: Random) -> str:
    """Damage one file or folder, and return what was done."""
    how = random.choice(FOLDER_DAMAGES if path.is_dir() else [*FILE_DAMAGES, *TEXT_DAMAGES.get(path.suffix, []) * 4])
    how(path, random)
    return f"{how.__name__.strip('_')} {path}"


def change_argument(arguments: list[str], random: Random) -> list[str]:
    """Replace, drop, repeat or add one argument after the verb."""
    changed = list(arguments)
    where = random.randrange(len(changed) + 1)
    what = random.randrange(10)
    if what == 0 and where < len(changed):
        del changed[where]
    elif what == 1:
        changed.insert(where, random.choice(ARGUMENTS))
    elif where < len(changed):
        is_number = changed[where].replace(".", "").isdigit()
        changed[where] = random.choice(NUMBERS if is_number and what < 8 else ARGUMENTS)
    return changed


# Any file or folder


def _remove(path: Path, random: Random) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _make_folder(path: Path, random: Random) -> None:
    _remove(path, random)
    path.mkdir()


def _make_file(path: Path, random: Random) -> None:
    _remove(path, random)
    path.write_bytes(random.choice([b"", b"x", b"\0" * 100]))


def _make_loop(path: Path, random: Random) -> None:
    _remove(path, random)
    path.symlink_to(path.name)


def _make_dangling(path: Path, random: Random) -> None:
    _remove(path, random)
    path.symlink_to("nothing here")


def _make_unreadable(path: Path, random: Random) -> None:
    path.chmod(0)


def _add_odd_names(path: Path, random: Random) -> None:
    folder = path if path.is_dir() else path.parent
    name = random.choice([b"\xff\xfe.jsonl", b"a\nb.jsonl", b"x.parquet", b".hidden.json", "名.txt".encode(), b"z.tmp"])
    with open(os.fsencode(folder) + b"/" + name, "wb") as file:
        file.write(random.choice([b"", b"{}\n", b"\xff"]))


# The bytes of a file


def _edit(path: Path, edit: Callable[[bytearray], bytes | bytearray]) -> None:
    path.write_bytes(edit(bytearray(path.read_bytes())))


def _truncate(path: Path, random: Random) -> None:
    _edit(path, lambda data: data[: random.randrange(len(data) + 1)])


def _flip_bits(path: Path, random: Random) -> None:
    def flip(data: bytearray) -> bytearray:
        for _ in range(random.choice([1, 1, 1, 3, 30])):
            if data:
                data[_place(data, random)] ^= 1 << random.randrange(8)
        return data

    _edit(path, flip)


def _insert_bytes(path: Path, random: Random) -> None:
    pieces = [
        b"\0",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\r\n",
        b'"',
        b"{",
        b"}",
        b"[" * 3000,
        b"9" * 5000,
        b"\n\n",
        b"\xed\xa0\x80",
    ]
    piece = random.choice([*pieces, random.randbytes(20)])

    def insert(data: bytearray) -> bytearray:
        where = _place(data, random) if data else 0
        return data[:where] + piece + data[where:]

    _edit(path, insert)


def _cut_out(path: Path, random: Random) -> None:
    def cut(data: bytearray) -> bytearray:
        begin = _place(data, random) if data else 0
        return data[:begin] + data[begin + random.choice([1, 2, 8, 100, 1000]) :]

    _edit(path, cut)


def _repeat(path: Path, random: Random) -> None:
    _edit(path, lambda data: data + data)


def _place(data: bytearray, random: Random) -> int:
    """Return a place; headers are as likely as all that follows."""
    return random.randrange(min(len(data), random.choice([64, 1000, len(data)])))


# The values of JSON, JSON lines and YAML


def _change_json(path: Path, random: Random) -> None:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        _flip_bits(path, random)
        return
    path.write_text(json.dumps(_changed(content, random)), encoding="utf-8")


def _change_lines(path: Path, random: Random) -> None:
    lines = path.read_bytes().splitlines()
    where = random.randrange(len(lines)) if lines else 0
    try:
        lines[where] = json.dumps(_changed(json.loads(lines[where]), random)).encode()
    except (ValueError, IndexError, RecursionError):
        _flip_bits(path, random)
        return
    path.write_bytes(b"\n".join(lines) + b"\n")


def _change_yaml(path: Path, random: Random) -> None:
    try:
        content = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError):  # after other damage
        _flip_bits(path, random)
        return
    try:
        path.write_text(yaml.safe_dump(_changed(content, random), allow_unicode=True), encoding="utf-8")
    except (UnicodeEncodeError, yaml.YAMLError, RecursionError):
        _insert_bytes(path, random)


def _changed(content: Any, random: Random) -> Any:
    """Return the content with one value replaced, removed, added or renamed."""
    places = _places(content)
    if not places:
        return random.choice(VALUES)
    parent, key = random.choice(places)
    what = random.randrange(8)
    if what == 0:
        del parent[key]
    elif what == 1 and isinstance(parent, dict):
        parent[random.choice(["", "x", "step", "files", "0"])] = random.choice(VALUES)
    elif what == 2 and isinstance(parent, dict):
        parent[f"{key}{random.choice([' ', '2', 's'])}"] = parent.pop(key)
    elif what == 3 and isinstance(parent[key], int | float):
        parent[key] = random.choice(
            [-parent[key], parent[key] + 1, parent[key] * 10**6, str(parent[key]), [parent[key]]]
        )
    else:
        parent[key] = random.choice(VALUES)
    return content


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of the values, outer ones first, as many of the inner ones as MAX_NODES allows."""
    found: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting and len(found) < MAX_NODES:
        one = waiting.pop(0)
        keys = one.keys() if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        waiting += [one[key] for key in keys]
    return found


FOLDER_DAMAGES = [_remove, _make_file, _make_folder, _make_loop, _make_dangling, _make_unreadable, _add_odd_names]
FILE_DAMAGES = [
    _remove, _make_folder, _make_file, _make_loop, _make_dangling, _make_unreadable, _add_odd_names,
    *[_truncate, _flip_bits, _insert_bytes, _cut_out, _repeat] * 2,
]  # fmt: skip
TEXT_DAMAGES: dict[str, list[Callable[[Path, Random], None]]] = {
    ".json": [_change_json],
    ".jsonl": [_change_lines],
    ".yaml": [_change_yaml],
}
