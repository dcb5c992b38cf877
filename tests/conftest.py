"""Fixtures shared by several test folders, and the marks of tests.

Tests must not change the folders of session-scoped fixtures; copy a folder before changing it.
"""

import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

from tests.helpers import warm_python
from tests.helpers.corpora import build_small_corpus, train_small_tokenizer
from z2all_ds.base.machine import gpu_count
from z2all_ds.checkpoint import memory

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs with SIGINT ignored, and the processes under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# On a loaded machine any example may be slow. `launch/test.sh --all` selects the profile "thorough".
hypothesis.settings.register_profile("everyday", deadline=None, max_examples=30)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=100)
hypothesis.settings.load_profile("everyday")

# Several tests run at once: for tiny matrix products, threads that wait for a core cost more than they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if not gpu_count():
    # CUDA does not survive a fork.
    warm_python.use_warm_process()

IMPORTS_BY_MARK = {
    "nodes": ("node_lab", "node_launches", "docker_nodes", "slurm_lab", "nat_lab", "own_sshd"),
    "browser": ("browser", "board_page"),
    "ranks": ("training", "killed_runs", "traffic_ranks", "fed_runs", "marked"),
    "processes": ("command", "processes", "subprocess", "multiprocessing", "engines"),
}
"""A test file gets a mark if it imports one of these modules or something from it."""
SLOW_FIXTURES = {"small_corpus", "small_tokenizer"}


@cache
def marks_of(module: ModuleType) -> frozenset[str]:
    used = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values()}
    names = {str(name).rpartition(".")[2] for name in used}
    return frozenset(mark for mark, imports in IMPORTS_BY_MARK.items() if names & set(imports))


@pytest.hookimpl(wrapper=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Add the marks that follow from imports, and run the slowest files first so that all workers end together."""
    order = ("nodes", "extended", "ranks", "browser", "processes")
    places: dict[Path, int] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            found = marks_of(item.module)
            for mark in found | ({"processes"} if found or SLOW_FIXTURES & set(item.fixturenames) else set()):
                item.add_marker(mark)
        place = next((place for place, mark in enumerate(order) if item.get_closest_marker(mark)), len(order))
        places[item.path] = min(place, places.get(item.path, place))
    items.sort(key=lambda item: places[item.path])
    yield


@pytest.fixture(autouse=True)
def _inner_loop_starts_no_warm_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Starting the warm process takes ten seconds, so everyday tests that use it must have the mark `processes`."""
    before, marks = warm_python.num_forked, {mark.name for mark in request.node.iter_markers()}
    yield
    if warm_python.num_forked > before and not marks & {"processes", "extended"}:
        pytest.fail("this test starts Python processes: mark it `processes`")


@pytest.fixture(scope="session", autouse=True)
def _sweep_shared_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the in-memory snapshots that killed test runs leave behind."""
    yield
    for line, run_dir in memory.all_snapshot_folders().items():
        if run_dir.is_relative_to(tmp_path_factory.getbasetemp()):
            line.remove()


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "corpus"
    build_small_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def small_tokenizer(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "tokenizer"
    train_small_tokenizer(small_corpus, folder)
    return folder
