"""Fixtures that several subpackages share, and the marks of tests.

Folders of session-scoped fixtures are only read by tests; copy before changing anything.
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
from z2all_ds.checkpoint import memory
from z2all_ds.machine import gpu_count

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background deaf to Ctrl-C, and the processes under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# On a loaded machine any example may take long.
hypothesis.settings.register_profile("z2all", deadline=None)
hypothesis.settings.load_profile("z2all")

# Several tests run at once, and threads of tiny products that wait for a core cost more than they calculate.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if not gpu_count():
    # CUDA does not survive a fork.
    warm_python.use_warm_process()

HELPERS_BY_MARK = {
    "nodes": ("node_lab", "node_launches", "docker_nodes", "slurm_lab", "nat_lab", "own_sshd"),
    "browser": ("browser", "board_page"),
    "ranks": ("training", "killed_runs", "traffic_ranks", "fed_runs", "marked"),
}
"""A test file has a mark if it imports from one of these helpers: what it starts takes seconds."""


@cache
def marks_of(module: ModuleType) -> tuple[str, ...]:
    used = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values()}
    return tuple(
        mark
        for mark, helpers in HELPERS_BY_MARK.items()
        if any(f"tests.helpers.{helper}" in used for helper in helpers)
    )


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marks that follow from imports. Files that take longest go first, so that all workers end together."""
    order = ("nodes", "extended", "ranks", "browser")
    places: dict[Path, int] = {}
    for item in items:
        for mark in marks_of(item.module) if isinstance(item, pytest.Function) else ():
            item.add_marker(mark)
        place = next((place for place, mark in enumerate(order) if item.get_closest_marker(mark)), len(order))
        places[item.path] = min(place, places.get(item.path, place))
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(scope="session", autouse=True)
def _sweep_shared_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs that are killed leave their snapshots, and nobody will go on from those of tests."""
    yield
    for line, run_dir in memory.all_here().items():
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
