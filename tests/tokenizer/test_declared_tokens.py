"""Control tokens that a Hugging Face folder declares outside its tokenizer.json."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tokenizer.test_folder import open_plain
from tests.tokenizer.test_spm_model import other_model
from z2all_ds.base.errors import DataError
from z2all_ds.evaluate.encoding import control_ids, text_ids
from z2all_ds.evaluate.prompts import chat_ids
from z2all_ds.tokenizer import Z2allTokenizer, import_tokenizer, load_tokenizer
from z2all_ds.tokenizer.declared_tokens import declared_tokens, read_roles

Settings = dict[str, Any]
TOOL = "<tool>"
TEXTS = (TOOL, f"a{TOOL}b", f"a {TOOL} b {TOOL}{TOOL}", f"</s>{TOOL}")
OBJECT = {"content": TOOL, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
TYPED = {**OBJECT, "__type": "AddedToken"}
DECODER = {"added_tokens_decoder": {"1": {**OBJECT, "special": True}}}
DECLARATIONS: dict[str, tuple[Settings, Settings]] = {
    "additional": ({"additional_special_tokens": [TOOL]}, {}),
    "additional objects": ({"additional_special_tokens": [TYPED]}, {}),
    "extra": ({"extra_special_tokens": ["<other>", TOOL]}, {}),
    "extra by name": ({"extra_special_tokens": {"tool_token": TOOL}}, {}),
    "extra by name, objects": ({"model_specific_special_tokens": {"tool_token": TOOL}}, {}),
    "extra and additional": ({"extra_special_tokens": ["<other>"], "additional_special_tokens": [TOOL]}, {}),
    "another role": ({"sep_token": TOOL}, {}),
    "a role of one model": ({"image_token": TYPED}, {}),
    "decoder": (DECODER, {}),
    "map": ({}, {"additional_special_tokens": [TOOL]}),
    "map, extra": ({}, {"extra_special_tokens": [OBJECT]}),
    "map, a role": ({}, {"mask_token": OBJECT}),
    "map next to a decoder": ({"added_tokens_decoder": {}}, {"additional_special_tokens": [TOOL]}),
}
"""Settings in tokenizer_config.json and in special_tokens_map.json."""


def unigram() -> Tokenizer:
    """The token is a piece of the model."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), (TOOL, -1.0), *((char, -5.0) for char in "abc </s>tol[INST]")]
    backend = Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0, byte_fallback=False))
    backend.add_special_tokens([AddedToken(name, special=True) for name in ["<unk>", "</s>"]])
    return backend


def bpe(special: bool = False) -> Tokenizer:
    """The token is an added one."""
    backend = byte_level([])
    backend.add_tokens([AddedToken(TOOL, special=special)])
    return backend


def merged() -> Tokenizer:
    """The token is made by merges."""
    return byte_level([(TOOL[:end], TOOL[end]) for end in range(1, len(TOOL))])


def byte_level(merges: list[tuple[str, str]]) -> Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return backend


BACKENDS = {"unigram": unigram, "bpe": bpe, "merged": merged}


def write_folder(folder: Path, backend: Tokenizer, config: Settings, tokens_map: Settings) -> Path:
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    unknown = {"unk_token": "<unk>"} if backend.token_to_id("<unk>") is not None else {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **unknown, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if tokens_map:
        (folder / "special_tokens_map.json").write_text(json.dumps(tokens_map))
    return folder


def makes(tokenizer: Z2allTokenizer, token: str = TOOL) -> bool:
    number = tokenizer.special_tokens.get(token, tokenizer._backend.token_to_id(token))
    return any(number in ids for ids in tokenizer.encode_batch([text.replace(TOOL, token) for text in TEXTS]))


@pytest.mark.parametrize("declared", DECLARATIONS)
@pytest.mark.parametrize("kind", BACKENDS)
def test_text_makes_no_declared_token_unless_asked_to(tmp_path: Path, kind: str, declared: str) -> None:
    undeclared = load_tokenizer(write_folder(tmp_path / "undeclared", BACKENDS[kind](), {}, {}))
    assert makes(undeclared)  # so the declaration is what keeps text from making it
    folder = write_folder(tmp_path / "theirs", BACKENDS[kind](), *DECLARATIONS[declared])
    ours, plain = load_tokenizer(folder), open_plain(folder)
    assert not makes(ours)
    assert ours.encode(f"a{TOOL}b", {TOOL}).count(ours.special_id(TOOL)) == 1
    assert ours.encode("abc") == undeclared.encode("abc")
    assert (ours.size, ours.special_id(TOOL)) == (undeclared.size, undeclared._backend.token_to_id(TOOL))
    assert ours.fingerprint != undeclared.fingerprint
    # everything that transformers reads as special in this folder
    control = {number for number, token in plain.added_tokens_decoder.items() if token.special}
    control |= set(plain.all_special_ids)
    assert {number for number in control if number < ours.size} <= set(ours.special_tokens.values())
    # generate, the harness and chats use transformers
    assert ours.special_id(TOOL) in control_ids(plain)
    assert [text_ids(plain, text) for text in TEXTS] == ours.encode_batch(TEXTS)
    plain.chat_template = "{% for m in messages %}{{ m['content'] }}" + TOOL + "{% endfor %}"
    for text in TEXTS:
        made = chat_ids(plain, [{"role": "user", "content": text}])
        assert made == [*ours.encode(text), ours.special_id(TOOL)]


def test_a_folder_that_needs_no_change_keeps_its_fingerprint(tmp_path: Path) -> None:
    for name, backend in (("marked", bpe(special=True)), ("none", bpe())):
        declared = {"additional_special_tokens": [TOOL if name == "marked" else "<none>"], "sep_token": "</s>"}
        folder = write_folder(tmp_path / name, backend, declared, {"mask_token": "</s>"})
        expected = hashlib.sha256((folder / "tokenizer.json").read_bytes() + b"</s>").hexdigest()
        assert load_tokenizer(folder).fingerprint == expected


@pytest.mark.parametrize("kind", BACKENDS)
def test_tokens_kept_from_text_change_the_fingerprint_whatever_declares_them(tmp_path: Path, kind: str) -> None:
    undeclared = load_tokenizer(write_folder(tmp_path / "undeclared", BACKENDS[kind](), {}, {}))
    found = set()
    for number, keys in enumerate(
        (["bos_token"], ["pad_token"], ["unk_token"], ["bos_token", "cls_token"], ["x_token"])
    ):
        folder = write_folder(tmp_path / str(number), BACKENDS[kind](), dict.fromkeys(keys, TOOL), {})
        assert not makes(load_tokenizer(folder))
        found.add(load_tokenizer(folder).fingerprint)
    assert len(found) == 1 and undeclared.fingerprint not in found


def test_a_role_that_frees_a_token_for_text_changes_the_fingerprint(tmp_path: Path) -> None:
    backend = bpe(special=True)
    backend.add_tokens([AddedToken("<s>")])  # without a named one, this is the begin of text
    default = load_tokenizer(write_folder(tmp_path / "default", backend, {}, {}))
    other = load_tokenizer(write_folder(tmp_path / "other", backend, {"bos_token": TOOL}, {}))
    assert (makes(default, "<s>"), makes(other, "<s>")) == (False, True)
    assert default.fingerprint != other.fingerprint


def test_an_end_of_text_without_its_mark_keeps_its_fingerprint(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "theirs", bpe(), {"eos_token": TOOL}, {})
    expected = hashlib.sha256((folder / "tokenizer.json").read_bytes() + TOOL.encode()).hexdigest()
    assert load_tokenizer(folder).fingerprint == expected


def test_a_declared_token_of_merges_with_a_prefix_is_kept_from_text(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "##b": 1, "ab": 2, "##c": 3, "abc": 4, "</s>": 5}
    merges = [("a", "##b"), ("ab", "##c")]
    backend = Tokenizer(models.BPE(vocabulary, merges, continuing_subword_prefix="##"))
    backend.add_special_tokens(["</s>"])
    assert load_tokenizer(write_folder(tmp_path / "plain", backend, {}, {})).encode("ab") == [2]
    folder = write_folder(tmp_path / "theirs", backend, {"cls_token": "ab"}, {})
    assert load_tokenizer(folder).encode_batch(["ab", "abc"]) == [[0, 1], [0, 1, 3]]


def test_whatever_a_broken_folder_raises_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise Exception("Token `ab` out of vocabulary")  # as `tokenizers` does

    folder = write_folder(tmp_path / "theirs", bpe(), {}, {})
    monkeypatch.setattr("z2all_ds.tokenizer.tokenization_z2all.text_only", broken)
    for open_folder in (load_tokenizer, lambda folder: import_tokenizer(folder, tmp_path / "out", as_is=True)):
        with pytest.raises(DataError, match=r"tokenizer\.json: does not work \(Token `ab` out of vocabulary\)"):
            open_folder(folder)


def test_a_folder_as_transformers_saves_it_declares_its_tokens(tmp_path: Path) -> None:
    opened = PreTrainedTokenizerFast(tokenizer_object=bpe(), eos_token="</s>", extra_special_tokens=[TOOL])
    opened.save_pretrained(str(tmp_path))
    assert declared_tokens(tmp_path) == {"</s>", TOOL}
    assert not makes(load_tokenizer(tmp_path))


def test_values_of_the_wrong_type_declare_nothing(tmp_path: Path) -> None:
    wrong: list[Any] = [None, 5, True, TOOL, [TOOL], {"content": 5}, {"content": [TOOL]}, "", "t", "\ud800x", {}]
    for number, value in enumerate(wrong):
        config = {
            "additional_special_tokens": value if value != [TOOL] else [[TOOL]],
            "extra_special_tokens": [value] if value != TOOL else TOOL,
            "added_tokens_decoder": {"1": value, "2": {"content": value, "special": True if value != TOOL else "yes"}},
            "sep_token": value if value != TOOL else None,
            "tools": [TOOL],
        }
        folder = write_folder(tmp_path / str(number), bpe(), config, config)
        assert declared_tokens(folder) == {"</s>"}
        assert read_roles(folder) == {"eos_token": "</s>"}
        assert load_tokenizer(folder).encode("tool")
    for content in (b"[]", b'"x"', b"5"):
        (folder / "special_tokens_map.json").write_bytes(content)
        assert declared_tokens(folder) == {"</s>"}
    for content in (b"{", b"\xff", b"[" * 100_000):
        (folder / "special_tokens_map.json").write_bytes(content)
        with pytest.raises(DataError, match=r"special_tokens_map\.json: not readable"):
            load_tokenizer(folder)


def test_a_declared_byte_is_still_text(tmp_path: Path) -> None:
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    folder = write_folder(tmp_path / "bytes", backend, {"additional_special_tokens": ["<0x0A>"]}, {})
    assert load_tokenizer(folder).encode("a\n") == [2, 3 + 10]
    control = control_ids(open_plain(folder))
    assert (1 in control, 3 + 10 in control) == (True, False)


def test_the_name_of_a_byte_is_a_control_token_of_models_without_bytes(tmp_path: Path) -> None:
    backend = bpe()
    backend.add_tokens([AddedToken("<0x0A>")])
    folder = write_folder(tmp_path / "theirs", backend, {"additional_special_tokens": ["<0x0A>"]}, {})
    assert not makes(load_tokenizer(folder), "<0x0A>")
    assert load_tokenizer(folder).special_id("<0x0A>") in control_ids(open_plain(folder))
    assert text_ids(open_plain(folder), "a<0x0A>") == load_tokenizer(folder).encode("a<0x0A>")


@pytest.mark.parametrize("declared", DECLARATIONS)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("as_is", [False, True])
def test_an_import_keeps_the_declarations(tmp_path: Path, as_is: bool, kind: str, declared: str) -> None:
    folder = write_folder(tmp_path / "theirs", BACKENDS[kind](), *DECLARATIONS[declared])
    import_tokenizer(folder, tmp_path / "out", as_is=as_is)
    theirs, ours = load_tokenizer(folder), load_tokenizer(tmp_path / "out")
    assert ours.special_id(TOOL) == theirs.special_id(TOOL)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    plain = open_plain(tmp_path / "out")
    assert [text_ids(plain, text) for text in TEXTS] == ours.encode_batch(TEXTS)
    if as_is:
        assert ours.fingerprint == theirs.fingerprint
        assert plain.eos_token_id == ours.eot_id


def test_another_end_of_documents_replaces_that_of_both_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "theirs", bpe(), {}, {"eos_token": "</s>", "sep_token": TOOL, "x": "\ud800"})
    import_tokenizer(folder, tmp_path / "out", eos=TOOL)
    assert open_plain(tmp_path / "out").eos_token == TOOL
    assert load_tokenizer(tmp_path / "out").roles["eos_token"] == TOOL


@pytest.mark.parametrize("file", ["config", "map"])
def test_a_replaced_end_of_documents_is_not_made_by_text(tmp_path: Path, file: str) -> None:
    backend = bpe()
    backend.add_tokens([AddedToken("<end>")])
    settings = {"eos_token": {**OBJECT, "content": "<end>"}, "additional_special_tokens": [TOOL]}
    config, tokens_map = (settings, {}) if file == "config" else ({"eos_token": "<end>"}, settings)
    import_tokenizer(write_folder(tmp_path / "theirs", backend, config, tokens_map), tmp_path / "out", eos="</s>")
    ours, plain = load_tokenizer(tmp_path / "out"), open_plain(tmp_path / "out")
    assert (ours.roles["eos_token"], plain.eos_token) == ("</s>", "</s>")
    for token in ("<end>", TOOL):
        assert not makes(ours, token)
        assert ours.special_id(token) in control_ids(plain)
    assert text_ids(plain, "a<end>") == ours.encode("a<end>")


@pytest.mark.parametrize("as_is", [False, True])
def test_a_sentencepiece_model_with_declarations_is_imported(tmp_path: Path, as_is: bool) -> None:
    pieces = ["<x>", "\u2581<y>"]
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(other_model(user_defined_symbols=pieces))
    import_tokenizer(folder, tmp_path / "before", as_is=as_is)
    assert makes(load_tokenizer(tmp_path / "before"), "<x>")
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": pieces}))
    import_tokenizer(folder, tmp_path / "out", as_is=as_is)
    ours = load_tokenizer(tmp_path / "out")
    for token in ("<x>", " <y>"):
        assert ours.special_id(token) == load_tokenizer(tmp_path / "before")._backend.token_to_id(token)
        assert not makes(ours, token)
