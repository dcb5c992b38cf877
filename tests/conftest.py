"""Fixtures that several rooms share. Both are folders that tests only read; copy before changing anything."""

import signal
from pathlib import Path

import pytest

from tests.helpers.corpora import build_small_corpus, train_small_tokenizer

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background deaf to Ctrl-C, and the processes under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
