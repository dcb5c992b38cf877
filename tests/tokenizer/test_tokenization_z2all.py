import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.corpora import SMALL_TEXT_VOCAB
from z2all_ds.base.errors import DataError
from z2all_ds.tokenizer import SPECIAL_TOKENS, Z2allTokenizer, load_tokenizer
from z2all_ds.tokenizer.tokenization_z2all import parse_tokenizer_json, read_roles

UNICODE = st.text(st.characters(codec="utf-8"))
FRAGMENTS = st.sampled_from(
    [*SPECIAL_TOKENS, "<|", "|>", " ", "\n    ", "\u2581", " \u2581", "<0x0A>", "<unk>", "中文", "\r\n", "\x00"]
)
WITH_CONTROL_TEXT = st.lists(st.one_of(UNICODE, FRAGMENTS)).map("".join)
KEEP = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_control_tokens_get_the_ids_after_the_text_vocabulary(
    tokenizer: Z2allTokenizer, folder: Path, text_vocab: int
) -> None:
    assert tokenizer.size == text_vocab + 12
    assert tokenizer.eot_id == text_vocab + 1
    assert tokenizer.pad_id == text_vocab + 6
    assert [tokenizer.special_id(token) for token in SPECIAL_TOKENS] == list(range(text_vocab, text_vocab + 12))
    assert list(tokenizer.special_tokens) == list(SPECIAL_TOKENS)
    assert tokenizer.fingerprint == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    with pytest.raises(DataError, match="control token 'x'"):
        tokenizer.special_id("x")


@KEEP
@given(text=WITH_CONTROL_TEXT)
def test_any_text_is_reproduced_and_gives_no_control_token(
    tokenizer: Z2allTokenizer, text_vocab: int, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= number < text_vocab for number in ids)
    assert tokenizer.encode_bytes(text.encode()) == ids
    assert tokenizer.decode_bytes(ids) == text.encode()


@KEEP
@given(data=st.one_of(st.binary(), st.lists(st.one_of(st.binary(max_size=3), UNICODE.map(str.encode))).map(b"".join)))
def test_any_bytes_are_reproduced(tokenizer: Z2allTokenizer, text_vocab: int, data: bytes) -> None:
    ids = tokenizer.encode_bytes(data)
    assert tokenizer.decode_bytes(ids) == data
    assert all(0 <= number < text_vocab for number in ids)


def test_every_single_byte_and_broken_utf8_are_reproduced(tokenizer: Z2allTokenizer) -> None:
    for byte in range(256):
        assert tokenizer.decode_bytes(tokenizer.encode_bytes(bytes([byte]))) == bytes([byte])
    broken = "好".encode()[:2] + b"\xff" + "好".encode()
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(broken)) == broken
    assert tokenizer.decode(tokenizer.encode_bytes(broken)).endswith("好")
    assert tokenizer.encode_bytes(b"") == []
    assert tokenizer.decode_bytes([tokenizer.eot_id]) == b"<|endoftext|>"
    with pytest.raises(DataError, match="token id 999999"):
        tokenizer.decode_bytes([999999])


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_control_tokens_in_text_are_encoded_as_text(tokenizer: Z2allTokenizer, text_vocab: int, token: str) -> None:
    for text in (token, f"a{token}b", f"\n{token}\n", token * 3, f"中{token}文", f" {token} "):
        ids = tokenizer.encode(text)
        assert max(ids) < text_vocab
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.special_id(token)]) == token


@KEEP
@given(
    parts=st.lists(st.one_of(UNICODE, st.sampled_from(SPECIAL_TOKENS))),
    allowed=st.sets(st.sampled_from(SPECIAL_TOKENS)),
)
def test_only_allowed_special_tokens_are_recognized_in_text(
    tokenizer: Z2allTokenizer, text_vocab: int, parts: list[str], allowed: set[str]
) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text, allowed_special=allowed)
    assert tokenizer.decode(ids) == text
    found = [number for number in ids if number >= text_vocab]
    opened = {tokenizer.special_id(token): token for token in allowed}
    assert set(found) <= opened.keys()
    assert len(found) == sum(text.count(token) for token in allowed)  # no token overlaps another
    if not found:
        assert ids == tokenizer.encode(text)
    every = tokenizer.encode(text, allowed_special="all")
    assert every == tokenizer.encode(text, allowed_special=set(SPECIAL_TOKENS))
    if any(token in text for token in SPECIAL_TOKENS):
        with pytest.raises(DataError):
            tokenizer.encode(text, allowed_special="none_raise")
    else:
        assert tokenizer.encode(text, allowed_special="none_raise") == ids == every


def test_disallowed_and_unknown_special_tokens_are_refused(tokenizer: Z2allTokenizer) -> None:
    a, b, end = tokenizer.encode("a"), tokenizer.encode("b"), tokenizer.eot_id
    assert tokenizer.encode("a<|endoftext|>b", {"<|endoftext|>"}) == [*a, end, *b]
    assert tokenizer.encode("a<|endoftext|>b", {"<|PAD|>"}) == tokenizer.encode("a<|endoftext|>b")
    texts = ["", "a<|endoftext|>", "b", "<|endoftext|><|endoftext|>"]
    assert tokenizer.encode_batch(texts, "all") == [[], [*a, end], b, [end, end]]
    with pytest.raises(DataError, match=r"^text 1 of the batch, character 1, '<\|endoftext\|>': the text contains"):
        tokenizer.encode_batch(texts, "none_raise")
    with pytest.raises(DataError, match=r"control token '<\|other\|>'"):
        tokenizer.encode("a", {"<|other|>"})
    with pytest.raises(DataError, match=r"To allow one token, write \{'<\|endoftext\|>'\}"):
        tokenizer.encode("a", "<|endoftext|>")


def test_a_batch_gives_the_same_ids_as_single_texts(tokenizer: Z2allTokenizer) -> None:
    texts = ["", "def f(x):\n    return x\n", "今天下雨，出门要带伞。", "Hello, world! 1234567", "<|endoftext|>"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode("") == []
    assert tokenizer.encode_batch([]) == []


def test_a_copy_in_a_worker_process_encodes_control_tokens_as_text_too(tokenizer: Z2allTokenizer) -> None:
    text = "a <|endoftext|> b"
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == tokenizer.encode(text)


def test_a_lone_surrogate_is_refused(tokenizer: Z2allTokenizer) -> None:
    with pytest.raises(DataError, match="text 1 of the batch: not valid Unicode"):
        tokenizer.encode_batch(["fine", "a\ud800b"])


def test_folders_without_a_valid_tokenizer_are_refused(tmp_path: Path, small_tokenizer: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match="incomplete"):
        load_tokenizer(tmp_path)
    whole = (small_tokenizer / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="not readable"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(whole.replace(b"<|endoftext|>", b"<|other|>"))
    with pytest.raises(DataError, match="no end-of-text token"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(small_tokenizer).size == SMALL_TEXT_VOCAB + 12


def test_loading_imports_neither_transformers_nor_torch(folder: Path) -> None:
    code = (
        "import sys; from z2all_ds.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]).encode('x'); "
        "print(*{'transformers', 'torch', 'sentencepiece', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "")


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: not readable \(.*not a regular file"):
        read_roles(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_a_normalizer_that_lengthens_texts_without_end_is_refused(nested: bool) -> None:
    rule: dict[str, Any] = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    rules: list[dict[str, Any]] = [{"type": "Sequence", "normalizers": [rule] * 4}] * 2 if nested else [rule] * 8
    token = {"id": 0, "content": "a", "single_word": False, "lstrip": False, "rstrip": False}
    content = {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": rules},
        "added_tokens": [{**token, "normalized": True, "special": False}],  # normalized as the file is read
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }
    text = json.dumps(content)
    for data in (text, text.replace("Replace", "\\u0052eplace")):
        with pytest.raises(DataError, match=r"x: not readable \(its normalizer can make a text 1e\+16 times longer"):
            parse_tokenizer_json(data.encode(), "x", "")
    rules[:] = [rule, {"type": "Prepend", "prepend": "b" * 2000}]
    assert parse_tokenizer_json(json.dumps(content).encode(), "x", "").normalizer.normalize_str("a") == "b" * 2000 + (
        "a" * 100
    )
