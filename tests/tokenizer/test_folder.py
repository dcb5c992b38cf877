"""Tests of a tokenizer folder loaded with plain transformers, without this package and without remote code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.tokenizer.test_tokenization_z2all import WITH_CONTROL_TEXT
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.corpus import load_manifest, parse_record
from z2all_ds.tokenizer import SPECIAL_TOKENS, Z2allTokenizer, load_tokenizer, train_tokenizer
from z2all_ds.tokenizer.folder import check_writable, read_recipe

CHAT = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "Hi"}]
CHAT_TEXT = "<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>assistant\n"


def open_plain(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), **options)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return open_plain(folder)


def real_texts(corpus: Path) -> list[str]:
    texts = []
    for shard in load_manifest(corpus).shards:
        with open(corpus / shard.path, "rb") as stream:
            texts += [parse_record(line, "x").content[:4000] for line, _ in zip(stream, range(12), strict=False)]
    return texts


def test_transformers_gives_the_same_ids_as_this_package_on_real_text(
    plain: Any, tokenizer: Z2allTokenizer, small_corpus: Path
) -> None:
    texts = real_texts(small_corpus)
    assert len(texts) > 40
    assert plain(texts)["input_ids"] == tokenizer.encode_batch(texts)
    assert [plain.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert len(plain) == tokenizer.size


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=WITH_CONTROL_TEXT)
def test_every_string_is_reproduced(plain: Any, tokenizer: Z2allTokenizer, text: str) -> None:
    assert plain.decode(plain.encode(text)) == text
    ids = plain.encode(text, split_special_tokens=True)
    assert plain.decode(ids) == text
    assert ids == tokenizer.encode(text)


WITHOUT_THIS_PACKAGE = """
import json, sys
sys.modules["z2all_ds"] = None  # importing it fails
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
texts = json.loads(sys.stdin.read())
ids = tokenizer(texts)["input_ids"]
chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
print(json.dumps([ids, [tokenizer.decode(one) for one in ids], tokenizer.padding_side, tokenizer.pad_token_id, chat]))
"""


def test_the_folder_loads_in_a_process_without_this_package(
    folder: Path, tokenizer: Z2allTokenizer, small_corpus: Path, tmp_path: Path
) -> None:
    texts = real_texts(small_corpus)
    command = [sys.executable, "-c", WITHOUT_THIS_PACKAGE, str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, input=json.dumps(texts), capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    ids, backs, side, pad, chat = json.loads(done.stdout)
    assert ids == tokenizer.encode_batch(texts)
    assert backs == texts
    assert (side, pad) == ("right", tokenizer.pad_id)
    assert chat == "<|im_start|>user\nx<|im_end|>\n"


def test_save_pretrained_keeps_the_ids(
    plain: Any, tokenizer: Z2allTokenizer, small_corpus: Path, tmp_path: Path
) -> None:
    plain.save_pretrained(str(tmp_path))
    again = open_plain(tmp_path)
    texts = [*real_texts(small_corpus), "a<|endoftext|>b"]
    assert again(texts)["input_ids"] == plain(texts)["input_ids"]
    assert again.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [tokenizer.special_id(t) for t in SPECIAL_TOKENS]
    assert again.padding_side == plain.padding_side == "right"
    assert again.chat_template == plain.chat_template
    assert again.all_special_tokens == plain.all_special_tokens
    assert load_tokenizer(tmp_path).encode_batch(texts) == tokenizer.encode_batch(texts)


def test_shorter_texts_are_padded_on_the_right(plain: Any, tokenizer: Z2allTokenizer) -> None:
    padded = plain(["a", "a b c d e f g"], padding=True)
    assert padded["input_ids"][0][-1] == tokenizer.pad_id
    assert padded["attention_mask"][0][0] == 1 and padded["attention_mask"][0][-1] == 0


def test_split_special_tokens_decides_whether_control_tokens_in_text_are_recognized(
    plain: Any, folder: Path, tokenizer: Z2allTokenizer
) -> None:
    """The table in docs/tokenizer.md is correct."""
    text = "a<|endoftext|>b"
    as_text = tokenizer.encode(text)
    as_control = [*tokenizer.encode("a"), tokenizer.eot_id, *tokenizer.encode("b")]
    assert plain.encode(text) == as_control == tokenizer.encode(text, "all")
    assert plain.encode(text, split_special_tokens=True) == as_text
    assert plain([text, text], split_special_tokens=True)["input_ids"] == [as_text, as_text]
    assert plain.encode(text) == as_control  # the setting of a call does not persist
    safe = open_plain(folder, split_special_tokens=True)
    assert safe.encode(text) == as_text
    assert safe.encode(text, split_special_tokens=False) == as_control
    assert safe.encode(text) == as_text


def test_a_safe_by_default_folder_encodes_control_tokens_as_text(small_corpus: Path, tmp_path: Path) -> None:
    train_tokenizer(small_corpus, tmp_path / "t", 300, max_bytes=50_000, safe_by_default=True)
    ours, safe = load_tokenizer(tmp_path / "t"), open_plain(tmp_path / "t")
    text = "a<|endoftext|>b"
    assert safe.encode(text) == ours.encode(text)
    safe.save_pretrained(str(tmp_path / "again"))
    assert open_plain(tmp_path / "again").encode(text) == ours.encode(text)
    # The template's own tokens become text too, unless the call says otherwise.
    chat = safe.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert chat == ours.encode(CHAT_TEXT)
    opened = safe.apply_chat_template(
        CHAT, add_generation_prompt=True, tokenizer_kwargs={"split_special_tokens": False}
    )["input_ids"]
    assert opened == ours.encode(CHAT_TEXT, "all")
    with pytest.raises(ConfigError, match="something else"):
        train_tokenizer(small_corpus, tmp_path / "t", 300, max_bytes=50_000)


def test_special_token_roles_and_the_chat_template(plain: Any, tokenizer: Z2allTokenizer) -> None:
    names = (plain.bos_token, plain.eos_token, plain.pad_token, plain.unk_token)
    assert names == ("<|beginoftext|>", "<|endoftext|>", "<|PAD|>", "<|UNK|>")
    assert plain.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == CHAT_TEXT
    ids = plain.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer.encode(CHAT_TEXT, "all")
    assert ids.count(tokenizer.special_id("<|im_start|>")) == 3
    assert plain.decode(ids, skip_special_tokens=True) == "user\n你好\nassistant\nHi\nassistant\n"


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_chat_message_cannot_forge_a_control_token(plain: Any, token: str) -> None:
    import jinja2

    for message in ({"role": "user", "content": f"x{token}"}, {"role": token, "content": "x"}):
        with pytest.raises(jinja2.TemplateError, match="must not contain the control token"):
            plain.apply_chat_template([message], tokenize=False)


def test_next_to_a_llama_config_the_ids_are_the_same(
    plain: Any, folder: Path, small_corpus: Path, tmp_path: Path
) -> None:
    """An exported model folder has a config.json of type llama; it must not change the splitting."""
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    texts = real_texts(small_corpus)
    assert open_plain(model)(texts)["input_ids"] == plain(texts)["input_ids"]


def test_a_folder_built_with_different_settings_is_refused(tmp_path: Path, small_tokenizer: Path) -> None:
    assert read_recipe(small_tokenizer, {"algorithm": "bbpe"})["text_vocab_size"] == 1000
    for wanted in ({"algorithm": "spm"}, {"unheard": 1}):
        with pytest.raises(ConfigError, match="something else"):
            read_recipe(small_tokenizer, wanted)
    with pytest.raises(ConfigError, match="something else"):
        read_recipe(tmp_path, {})


def test_folders_that_cannot_be_written_are_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"file is a file"):
        check_writable(tmp_path / "file" / "deep" / "t")
    check_writable(tmp_path / "new" / "deep" / "t")
    assert not (tmp_path / "new").exists()
    with pytest.raises(MachineError, match="not writable"):
        check_writable(Path("/proc/t"))


def test_a_fifo_instead_of_the_recipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "training.json")
    with pytest.raises(ConfigError, match="contains something else"):
        read_recipe(tmp_path, {})
