"""A warm process, which has loaded torch, DeepSpeed and the package and forks Python processes for the tests.

A fresh interpreter spends 5 to 14 s on those imports; a fork spends none. The warm process itself never computes and
has one thread, so a fork of it is as clean as a new interpreter. `warm_python.py` describes what is started this way.
A second warm process has loaded only torch and transformers, for the proof that an export works without the package.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

STDIO = (0, 1, 2)
NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a warm process ignores: it may be in the process group of its client, and ends when the client ends."""
PADDING = "Z2ALL_TEST_PADDING"
PADDING_BYTES = 16_000
"""Space for the environment and the arguments of a fork in the memory that /proc/PID/environ and cmdline show."""

NOT_PRELOADED = ("z2all_ds.__main__", "z2all_ds.ops.kernels", "z2all_ds.bench", "z2all_ds.cli.__main__")
PACKAGE, BARE = "package", "bare"
"""The kinds of warm processes, named after what they have loaded."""
PRELOADED = (
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.utils.cpp_extension",
    "transformers.models.llama.modeling_llama",
)


def preload_bare() -> None:
    """Import the libraries that the user of an exported folder has."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    for name in ("safetensors.torch", "transformers.models.llama.modeling_llama", "transformers.generation.utils"):
        importlib.import_module(name)
    assert "z2all_ds" not in sys.modules


def preload_package() -> None:
    """Import the package with everything that it otherwise imports late."""
    import z2all_ds
    from z2all_ds.train.speed.unused_libraries import left_unloaded

    with left_unloaded():  # as in a rank
        for found in pkgutil.walk_packages(z2all_ds.__path__, "z2all_ds."):
            if not found.name.startswith(NOT_PRELOADED):
                importlib.import_module(found.name)
        for name in PRELOADED:
            importlib.import_module(name)
    # DeepSpeed calls it whenever it loads an op; each call starts a process and takes more than a second.
    cpuinfo: Any = importlib.import_module("cpuinfo")
    known = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: known
    from tests.helpers import warm_python

    global on_fork
    on_fork = warm_python.use_twin
    warm_python.replace_popen(dict(os.environ))


class ShownMemory:
    """The memory behind /proc/PID/cmdline and /proc/PID/environ, where tests and tools look for processes."""

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._arguments = int(fields[45]), int(fields[46])
        self._environment = int(fields[47]), int(fields[48])

    def show(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._write(*self._arguments, arguments)
        self._write(*self._environment, [f"{key}={value}" for key, value in environment.items()])

    @staticmethod
    def _write(start: int, end: int, words: list[str]) -> None:
        """Write the words, then zeros to the end: moving the end needs a capability that containers lack."""
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


shown_memory: ShownMemory | None = None
on_fork: Callable[[socket.socket], None] | None = None
"""Called in a new process with the connection to its twin."""


class Request:
    """A process to start: its command line after the interpreter, its environment, folder, session and descriptors."""

    def __init__(
        self, words: list[str], environment: dict[str, str], cwd: str, new_session: bool, passed: tuple[int, ...] = ()
    ) -> None:
        """Create a request; `passed` are the numbers in the new process of the descriptors sent after stdio."""
        self.words, self.environment, self.cwd, self.new_session = words, environment, cwd, new_session
        self.passed = passed

    def to_json(self) -> bytes:
        return json.dumps(vars(self)).encode("utf-8", "surrogateescape")

    @classmethod
    def from_json(cls, text: bytes) -> "Request":
        return cls(**json.loads(text.decode("utf-8", "surrogateescape")))


def run_in_fork(request: Request, descriptors: list[int], asker: socket.socket) -> NoReturn:
    """Turn a new fork into the requested process, send its pid to the client, and exit as that process would."""
    code: int = 1
    try:
        if request.new_session:
            os.setsid()
        twin = _start_twin()
        asker = _take_descriptors(descriptors, [*STDIO, *request.passed], asker, twin)
        _take_over(request)
        asker.send(str(os.getpid()).encode())
        asker.close()
        code = _run(request.words)
    except BaseException:  # an error of this file, not of the requested process
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _start_twin() -> socket.socket:
    """Fork a twin of the same session and process group, which will fork the processes that this one starts."""
    ours, of_twin = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _close_all_but(*STDIO, of_twin.fileno())
        serve(of_twin)
        os._exit(0)
    of_twin.close()
    return ours


def _take_descriptors(given: list[int], wanted: list[int], asker: socket.socket, twin: socket.socket) -> socket.socket:
    """Move the given descriptors to the wanted numbers, and close all others except the two connections."""
    above = max(wanted) + 1  # so that no copy has a wanted number
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in (asker.detach(), twin.detach(), *given)]
    for number, place in zip(high[2:], wanted, strict=True):
        os.dup2(number, place, inheritable=place in STDIO)
    _close_all_but(*wanted, *high[:2])
    if on_fork is not None:
        on_fork(socket.socket(fileno=high[1]))
    return socket.socket(fileno=high[0])


def _take_over(request: Request) -> None:
    for number in NOT_FOR_US:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty() or "-u" in request.words)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    os.chdir(request.cwd)
    _set_environment(request.environment)
    if shown_memory is not None:
        shown_memory.show([sys.executable, *request.words], request.environment)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _close_all_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # the descriptor of the listing itself
                continue


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if "OMP_NUM_THREADS" in environment and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))


def _run(words: list[str]) -> int:
    """Run `[-u] -m module ...`, `[-u] script ...` or `-c code ...` as the interpreter does; return the exit code."""
    words = [word for index, word in enumerate(words) if word != "-u" or index]
    first = os.getcwd() if words[0] in ("-m", "-c") else str(Path(words[0]).resolve().parent)
    firsts = [] if os.environ.get("PYTHONSAFEPATH") else [first]
    extra = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path[1:]]
    sys.path[:1] = [*firsts, *extra]
    importlib.invalidate_caches()
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            sys.modules.pop(words[1], None)
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], vars(sys.modules["__main__"]))
        else:
            sys.argv = words
            vars(sys.modules["__main__"]).update(runpy.run_path(words[0], run_name="__main__"))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        _finish()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 130
    except BaseException:  # the interpreter prints it and exits with 1
        sys.excepthook(*sys.exc_info())
        code = 1
    _finish()
    return code & 0xFF


def _finish() -> None:
    """Do what the interpreter does before it exits."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def serve(connection: socket.socket) -> None:
    """Fork a process for each request, until the client has ended.

    The new process becomes a child of the client: its parent here exits at once, and the client adopts orphans
    (PR_SET_CHILD_SUBREAPER). Before it does anything else, it forks a twin, which serves its own requests in the same
    way. So the processes that it starts are as clean as it was itself, whatever it has done since.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1_000_000, 20)
        if not message:
            return
        between = os.fork()
        if between == 0:
            own = os.getpid()
            if os.fork() == 0:
                while os.getppid() == own:
                    time.sleep(0.0005)
                run_in_fork(Request.from_json(message), descriptors, connection)
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def main(argv: list[str]) -> None:
    global shown_memory
    os.environ.pop(PADDING, None)
    shown_memory = ShownMemory()
    (preload_bare if argv[2] == BARE else preload_package)()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies only one thread"
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(argv[1])))


if __name__ == "__main__":
    # Use the module that forks import, not a second copy of it named __main__.
    from tests.helpers import warm_process

    warm_process.main(sys.argv)
