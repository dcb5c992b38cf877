"""Fixtures for a small tokenizer of each algorithm, trained once per test session."""

from pathlib import Path

import pytest

from tests.helpers.corpora import SMALL_TEXT_VOCAB
from z2all_ds.tokenizer import Z2allTokenizer, load_tokenizer, train_tokenizer

SMALL_SPM_VOCAB = 2500
TEXT_VOCAB = {"bbpe": SMALL_TEXT_VOCAB, "spm": SMALL_SPM_VOCAB}


@pytest.fixture(scope="session")
def small_spm(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "spm"
    train_tokenizer(small_corpus, folder, SMALL_SPM_VOCAB, algorithm="spm")
    return folder


@pytest.fixture(scope="session", params=["bbpe", "spm"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def folder(algorithm: str, small_tokenizer: Path, small_spm: Path) -> Path:
    return {"bbpe": small_tokenizer, "spm": small_spm}[algorithm]


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Z2allTokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def text_vocab(algorithm: str) -> int:
    return TEXT_VOCAB[algorithm]
