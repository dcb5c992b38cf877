"""Runs one case in this process: copy inputs, damage them, call the verb, and judge how it ended.

A case fails on an exception that `z2all` would show as a traceback, on a hang, and on an input file that was lost or
changed. What would start other processes or use the network is replaced (`stand_ins.py`). As root, the verb runs as
another user, so that permissions count and no strange path can harm this machine.
"""

import encodings
import io
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from random import Random
from typing import Any

import typer

from tests.fuzz.inputs import reseal
from tests.fuzz.mutations import change_argument, damage
from tests.fuzz.verbs import Line
from z2all_ds.base.errors import Z2allError
from z2all_ds.base.paths import explain_system_errors
from z2all_ds.base.storage.open_files import OPEN_FILES
from z2all_ds.cli import app

NOBODY = 65534
HANG_SECONDS = 90
USAGE_ERROR: type[BaseException] = typer.BadParameter.__mro__[2]
ENDINGS = (Z2allError, SystemExit, USAGE_ERROR, typer.Exit, typer.Abort, BrokenPipeError)
CACHES = ("out*", "*/.*.idx", "*/.*.token-counts")
"""Files that any verb may change."""
COMMAND = typer.main.get_command(app)


class Hang(BaseException):
    """Not an Exception, so that nothing catches it."""


@dataclass(frozen=True)
class Failure:
    """A case that failed: how to repeat it, and what happened."""

    case: str
    problem: str
    place: str
    """Innermost frame of this package, to group failures."""


def warm_up(lines: list[Line], inputs: Path, work: Path) -> None:
    """Run every line once on undamaged inputs: they must succeed. Afterwards all modules are loaded, which another user
    may not be able to read."""
    for module in iter_modules(encodings.__path__):
        with suppress(ImportError):  # some are of other systems
            import_module(f"encodings.{module.name}")
    problems = []
    for number, line in enumerate(lines):
        folder = work / f"line_{number}"
        copy_inputs(line, inputs, folder)
        with in_folder(folder), limited(), silenced():
            try:
                COMMAND(line.arguments, prog_name="z2all", standalone_mode=False)
            except (SystemExit, typer.Exit):
                pass
            except Exception as error:
                problems.append(f"{line.command}: {type(error).__name__}: {error}")
        shutil.rmtree(folder)
        OPEN_FILES.forget_all()
    assert not problems, "\n".join(problems)


def run_case(line: Line, seed: int | str, inputs: Path, work: Path) -> Failure | None:
    """Run the case of a line and a seed in the new folder `work`."""
    random = Random(f"{line.command} {seed}")
    copy_inputs(line, inputs, work)
    arguments, done = line.arguments, []
    is_argument = random.random() < 0.3
    if is_argument:
        words = 2 if line.verb.count("_") else 1
        arguments = arguments[:words] + change_argument(arguments[words:], random)
    for _ in range(0 if is_argument else random.choice([1, 1, 1, 2])):
        entries = sorted(path for name in line.inputs.split() for path in (work / name, *(work / name).rglob("*")))
        there = [path for path in entries if path.exists() and not path.is_symlink()]
        if there:
            done.append(damage(random.choice(there), random))
    if random.random() < 0.5:  # as if it had been written this way, so that damage behind checksums is seen
        reseal(work)
    return judge(line, arguments, work, f"{line.command!r} seed {seed}: {done or arguments}")


def copy_inputs(line: Line, inputs: Path, work: Path) -> None:
    """Copy the inputs of a line, and add a link to itself and one to nothing."""
    work.mkdir()
    for name in line.inputs.split():
        source = inputs / name
        shutil.copytree(source, work / name) if source.is_dir() else shutil.copy2(source, work / name)
    (work / "loop").symlink_to("loop")
    (work / "dangling").symlink_to("nothing")


def judge(line: Line, arguments: list[str], work: Path, case: str) -> Failure | None:
    """Run a command line in `work`, and return what is wrong with how it ended."""
    before = contents(work)
    try:
        with as_another_user(work), in_folder(work), limited(), silenced(), explain_system_errors():
            COMMAND(arguments, prog_name="z2all", standalone_mode=False)
    except ENDINGS as error:
        if isinstance(error, Z2allError) and len(str(error).splitlines()) != 1:
            return Failure(case, f"not one line: {error}", "")
    except Hang:
        return Failure(case, f"hangs\n{traceback.format_exc()}", f"hang {_innermost()}")
    except BaseException as error:  # panics of Rust code are not Exceptions
        if isinstance(error, KeyboardInterrupt):
            raise
        return Failure(case, traceback.format_exc(), f"{type(error).__name__} {_innermost()}")
    finally:
        OPEN_FILES.forget_all()
        for path in (work, *work.rglob("*")):
            if not path.is_symlink() and path.lstat().st_mode & 0o600 != 0o600:
                path.chmod(0o700)
    after = contents(work)
    for name, content in before.items():
        if after.get(name) != content and not any(fnmatch(name, pattern) for pattern in (*line.changes, *CACHES)):
            return Failure(case, f"{name} was {'changed' if name in after else 'lost'}", f"lost file of {line.verb}")
    return None


def contents(work: Path) -> dict[str, Any]:
    """Return the content of every file, by relative path."""
    files = (path for path in work.rglob("*") if path.is_symlink() or path.is_file())
    return {str(p.relative_to(work)): os.readlink(p) if p.is_symlink() else p.read_bytes() for p in files}


def _innermost() -> str:
    """Return the innermost place in this package, of the error that is being handled."""
    frames = [frame for frame in traceback.extract_tb(sys.exc_info()[2]) if "/z2all_ds/" in frame.filename]
    return f"{frames[-1].filename.partition('/z2all_ds/')[2]}:{frames[-1].lineno}" if frames else "?"


@contextmanager
def as_another_user(work: Path) -> Iterator[None]:
    if os.geteuid():
        yield
        return
    for path in (work, *work.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextmanager
def in_folder(work: Path) -> Iterator[None]:
    before, environment = os.getcwd(), dict(os.environ)
    os.chdir(work)
    os.environ["HOME"] = str(work)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def limited() -> Iterator[None]:
    """Raise Hang after some time."""

    def hang(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def silenced() -> Iterator[None]:
    """Take stdout and stderr as UTF-8, as in a terminal, so that text that cannot be printed is found."""
    stdin = sys.stdin
    sys.stdin = io.StringIO("")
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace"))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        sys.stdin = stdin
