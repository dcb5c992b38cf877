"""Tests of SentencePiece training and of the converted model, compared with SentencePiece itself."""

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.tokenizer import Z2allTokenizer, load_tokenizer, train_tokenizer
from z2all_ds.tokenizer.sampling import open_sources
from z2all_ds.tokenizer.spm import LONGEST_SENTENCE, MODEL_FILE, learn_spm, sentences


@pytest.fixture(scope="module")
def original(small_spm: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(small_spm / MODEL_FILE))


@pytest.fixture(scope="module")
def ours(small_spm: Path) -> Z2allTokenizer:
    return load_tokenizer(small_spm)


def texts_of(corpus: Path) -> Iterator[str]:
    for domain in open_sources(corpus).domains.values():
        yield from (text for _, text in domain.sample(domain.bytes))


def test_same_ids_as_sentencepiece_on_real_text(small_corpus: Path, ours: Z2allTokenizer, original: Any) -> None:
    texts = [text for text in texts_of(small_corpus) if "\u2581" not in text]
    assert len(texts) > 100
    assert ours.encode_batch(texts) == original.encode(texts)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.text(st.characters(codec="utf-8", exclude_characters="\u2581")), st.text("aein =-.\n\t中的", max_size=60)
    )
)
def test_same_ids_as_sentencepiece_on_random_text(ours: Z2allTokenizer, original: Any, text: str) -> None:
    assert ours.encode(text) == original.encode(text)


def test_the_sentencepiece_space_mark_is_not_decoded_as_a_space(ours: Z2allTokenizer, original: Any) -> None:
    text = "a\u2581b c"
    assert original.decode(original.encode(text)) == "a b c"  # SentencePiece cannot distinguish them
    assert ours.decode(ours.encode(text)) == text


def test_the_converted_vocabulary_equals_that_of_sentencepiece(small_spm: Path, original: Any) -> None:
    backend = Tokenizer.from_file(str(small_spm / "tokenizer.json"))
    assert backend.token_to_id("<unk>") == 0
    assert [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)] == list(range(1, 257))
    pieces = [original.id_to_piece(number).replace("\u2581", " ") for number in range(257, original.get_piece_size())]
    assert pieces == [backend.id_to_token(number) for number in range(257, original.get_piece_size())]
    assert not [piece for piece in pieces if len(piece) > 1 and any(char.isdigit() for char in piece.strip())]
    assert [piece for piece in pieces if piece.isspace() and len(piece) > 2]
    assert (original.bos_id(), original.eos_id(), original.pad_id(), original.unk_id()) == (-1, -1, -1, 0)


def test_the_same_text_gives_the_same_model(small_corpus: Path, small_spm: Path) -> None:
    _, data = learn_spm(texts_of(small_corpus), 2500)
    assert data == (small_spm / MODEL_FILE).read_bytes()


def test_long_lines_are_split_without_losing_text() -> None:
    text = "word " * 1000 + "\n\n" + "x" * 2500 + "\nend"
    cut = list(sentences(iter([text])))
    assert "".join(cut) == text.replace("\n", "")
    assert max(map(len, cut)) == LONGEST_SENTENCE
    assert all(line.startswith(" word") for line in cut[1:5])


def test_vocabulary_sizes_that_do_not_fit_the_text_are_refused(small_corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 257"):
        train_tokenizer(small_corpus, tmp_path / "t", 256, algorithm="spm")
    with pytest.raises(DataError, match="the bytes and characters of the text need") as caught:
        train_tokenizer(small_corpus, tmp_path / "t", 300, algorithm="spm")
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="only enough repeated text for"):
        train_tokenizer(small_corpus, tmp_path / "t", 60_000, max_bytes=60_000, algorithm="spm")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_sentencepiece_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "sentencepiece":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MachineError, match=r"pip install 'z2all_ds\[tokenizer\]'"):
        learn_spm(iter(["a"]), 2500)
