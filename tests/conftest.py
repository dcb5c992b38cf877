"""Fixtures that several rooms share. Folders are only read by tests; copy before changing anything."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import warm_python
from tests.helpers.corpora import build_small_corpus, train_small_tokenizer
from z2all_ds.checkpoint import memory
from z2all_ds.machine import gpu_count

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background deaf to Ctrl-C, and the processes under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


if not gpu_count():
    # CUDA does not survive a fork.
    warm_python.use_warm_process()


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
