"""Replacement of `subprocess.Popen` that forks the tests' Python processes from a warm process, where that is safe.

`use_warm_process` replaces `subprocess.Popen` by a subclass. A command `[sys.executable, "-m", module, ...]` with a
module of ours, DeepSpeed or torch, or one that runs a script of `tests/` or `launch/`, is then forked
(`warm_process.py`) instead of executed. The result is a real process: a child of its caller with its own pid, session,
signals, files, environment and exit code, and it runs the same module as `__main__`. It differs from a fresh one only
in that the imports are done. Processes that it starts in the same way are forked, too, so that the ranks of a training
start within a tenth of a second instead of ten seconds. The proof of an export, which must run without the package, has
its own warm process.

Workers of multiprocessing's method "spawn" are forked in the same way.

These are executed as usual:
- `python -c`, which tests use to examine a fresh interpreter;
- commands whose environment changes what is read when an interpreter or a library starts (`STARTUP_VARIABLES`);
- everything, if Z2ALL_TEST_FRESH is set: `Z2ALL_TEST_FRESH=1 pytest ...`.
"""

import ctypes
import multiprocessing.util
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.helpers import warm_process
from z2all_ds.base.machine import default_environment

PYTHON = sys.executable
ROOT = Path(__file__).resolve().parents[2]
FRESH = "Z2ALL_TEST_FRESH"
EXPORT_PROOF = ROOT / "z2all_ds" / "export" / "standalone_check.py"
FORKED_PACKAGES = ("z2all_ds", "tests", "deepspeed", "torch")
PR_SET_CHILD_SUBREAPER = 36
ANSWER_SECONDS = 300.0
"""Longest wait for a fork, including the start of the warm process."""
STARTUP_VARIABLES = re.compile(
    r"PYTHON(?!PATH|SAFEPATH|UNBUFFERED|BREAKPOINT)|LD_|HF_(?!XET|\w*OFFLINE)|HUGGINGFACE|TRANSFORMERS_(?!OFFLINE)"
    r"|TORCH(?!_EXTENSIONS_DIR|INDUCTOR_CACHE_DIR)|MKL|KMP_(?!DUPLICATE)|GOMP|OMP_(?!NUM_THREADS)"
    r"|DS_|DEEPSPEED|MALLOC|MPL|HOME$|XDG|LANG|LC_"
)

num_forked = 0
"""Processes forked for this one so far."""
_start_environment: dict[str, str] = {}
_connections: dict[str, socket.socket] = {}
_is_fork = False
_can_ask = False
_spawn_fresh = multiprocessing.util.spawnv_passfds
_lock = threading.Lock()


class WarmPopen(subprocess.Popen):
    """A `subprocess.Popen` that forks from a warm process where possible."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: bool, *streams_and_rest: Any,
    ) -> None:  # fmt: skip
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest = streams_and_rest
        _, gid, gids, uid, umask, new_session, *group = rest
        is_plain = not (executable or preexec_fn or shell or gids) and (gid, uid, umask) == (None, None, -1)
        environment = dict(os.environ if env is None else env)
        words = forkable_words(args)
        pass_fds = tuple(pass_fds)
        if (
            not (is_plain and close_fds and words and can_fork(environment))
            or (group and group[0] != -1)
            or pass_fds
            or (_is_fork and words[0] == str(EXPORT_PROOF))
            or (cwd is not None and not os.path.isdir(cwd))
        ):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                *streams_and_rest,
            )  # fmt: skip
            return
        request = warm_process.Request(words, environment, os.path.abspath(cwd or os.curdir), bool(new_session))
        given = (p2cread, c2pwrite, errwrite)
        stdio = tuple(own if number == -1 else number for own, number in zip(warm_process.STDIO, given, strict=True))
        self.pid = _ask(request, stdio)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def forkable_words(args: Any) -> list[str]:
    """Return the words after the interpreter if the command can be forked, otherwise an empty list."""
    if isinstance(args, str | bytes | os.PathLike):
        return []
    command = [os.fspath(word) for word in args]
    if len(command) < 2 or command[0] != PYTHON or not all(isinstance(word, str) for word in command):
        return []
    words = command[1:]
    rest = words[1:] if words[0] == "-u" else words
    is_module = len(rest) > 1 and rest[0] == "-m" and rest[1].partition(".")[0] in FORKED_PACKAGES
    is_script = bool(rest) and any(
        Path(rest[0]).resolve().is_relative_to(place) for place in (ROOT / "tests", ROOT / "launch", EXPORT_PROOF)
    )
    return words if is_module or is_script else []


def can_fork(environment: dict[str, str]) -> bool:
    return (
        _can_ask
        and FRESH not in environment
        and all(
            _start_environment.get(name) == value
            for name, value in environment.items()
            if STARTUP_VARIABLES.match(name)
        )
    )


def spawn_worker(path: Any, args: list[Any], passfds: Any) -> int:
    """Replace `multiprocessing.util.spawnv_passfds`: fork the workers of the method "spawn"."""
    words = [os.fsdecode(word) for word in args]
    environment = dict(os.environ)
    if words[-1] != "--multiprocessing-fork" or not can_fork(environment):
        return _spawn_fresh(path, args, passfds)
    passed = tuple(sorted(map(int, passfds)))
    request = warm_process.Request(words[words.index("-c") :], environment, os.getcwd(), False, passed)
    return _ask(request, (*warm_process.STDIO, *passed))


def _ask(request: warm_process.Request, descriptors: tuple[int, ...]) -> int:
    """Let the warm process fork the requested process, which becomes our child, and return its pid."""
    global num_forked
    num_forked += 1
    prctl = ctypes.CDLL(None).prctl
    kind = warm_process.BARE if request.words[0] == str(EXPORT_PROOF) else warm_process.PACKAGE
    with _lock:
        if kind not in _connections:
            _connections[kind] = _start_warm_process(kind)
        _connections[kind].settimeout(ANSWER_SECONDS)
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(_connections[kind], [request.to_json()], list(descriptors))
            answer = _connections[kind].recv(100)
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert answer, "the warm process has ended"
    return int(answer)


def use_twin(connection: socket.socket) -> None:
    """Make a fork of the warm process fork its own processes from its twin."""
    global _is_fork, _can_ask
    _is_fork = _can_ask = True
    _connections[warm_process.PACKAGE] = connection


def use_warm_process() -> None:
    """Make pytest fork from a warm process, which is started for the first fork."""
    global _can_ask
    _can_ask = True
    replace_popen({**os.environ, **default_environment(2)})


def replace_popen(environment: dict[str, str]) -> None:
    """Replace `Popen` and the start of workers; `environment` is that of the warm process."""
    _start_environment.update(environment)
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = spawn_worker  # type: ignore[assignment]
    os.register_at_fork(after_in_child=_forget_warm_process)


def _forget_warm_process() -> None:
    """Stop using the warm process in a plain `os.fork` of this process: it serves only the parent."""
    global _can_ask
    _can_ask = False


def _start_warm_process(kind: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    padding = "x" * warm_process.PADDING_BYTES
    command = [PYTHON, "-m", "tests.helpers.warm_process", str(theirs.fileno()), kind, padding]
    environment = {**_start_environment, warm_process.PADDING: padding}
    subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=(theirs.fileno(),))
    theirs.close()
    return ours
