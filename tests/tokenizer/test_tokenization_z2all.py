import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.corpora import SMALL_TEXT_VOCAB
from z2all_ds.errors import DataError
from z2all_ds.tokenizer import SPECIAL_TOKENS, Z2allTokenizer, load_tokenizer

UNICODE = st.text(st.characters(codec="utf-8"))
FRAGMENTS = st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", " ", "\n    "])
WITH_CONTROL_TEXT = st.lists(st.one_of(UNICODE, FRAGMENTS)).map("".join)


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer: Path) -> Z2allTokenizer:
    return load_tokenizer(small_tokenizer)


def test_numbers(tokenizer: Z2allTokenizer, small_tokenizer: Path) -> None:
    assert tokenizer.size == SMALL_TEXT_VOCAB + 12
    assert tokenizer.eot_id == SMALL_TEXT_VOCAB + 1
    assert tokenizer.pad_id == SMALL_TEXT_VOCAB + 6
    assert [tokenizer.special_id(t) for t in SPECIAL_TOKENS] == list(range(SMALL_TEXT_VOCAB, SMALL_TEXT_VOCAB + 12))
    assert tokenizer.fingerprint == hashlib.sha256((small_tokenizer / "tokenizer.json").read_bytes()).hexdigest()
    with pytest.raises(DataError, match="control token 'x'"):
        tokenizer.special_id("x")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=WITH_CONTROL_TEXT)
def test_any_text_comes_back_and_forges_no_control_token(tokenizer: Z2allTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= number < SMALL_TEXT_VOCAB for number in ids)


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_injection(tokenizer: Z2allTokenizer, token: str) -> None:
    for text in (token, f"a{token}b", f"\n{token}\n", token * 3, f"中{token}文", f" {token} "):
        ids = tokenizer.encode(text)
        assert max(ids) < SMALL_TEXT_VOCAB
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.special_id(token)]) == token


def test_batch_equals_one_by_one(tokenizer: Z2allTokenizer) -> None:
    texts = ["", "def f(x):\n    return x\n", "今天下雨，出门要带伞。", "Hello, world! 1234567", "<|endoftext|>"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode("") == []
    assert tokenizer.encode_batch([]) == []


def test_half_a_character_is_refused(tokenizer: Z2allTokenizer) -> None:
    with pytest.raises(DataError, match="text 1 of the batch: not valid Unicode"):
        tokenizer.encode_batch(["fine", "a\ud800b"])


def test_folders_that_are_no_tokenizer(tmp_path: Path, small_tokenizer: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match="incomplete"):
        load_tokenizer(tmp_path)
    whole = (small_tokenizer / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="not readable"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(whole.replace(b"<|endoftext|>", b"<|other|>"))
    with pytest.raises(DataError, match=r"control token '<\|endoftext\|>'"):
        load_tokenizer(tmp_path)


def test_loading_needs_no_transformers(small_tokenizer: Path) -> None:
    code = (
        "import sys; from z2all_ds.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]).encode('x'); "
        "print('transformers' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(small_tokenizer)], capture_output=True, text=True)
    assert done.stdout.strip() == "False False"
