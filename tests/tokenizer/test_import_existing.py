import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tokenizer.test_folder import open_plain
from tests.tokenizer.test_spm_model import other_model
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.tokenizer import SPECIAL_TOKENS, import_tokenizer, load_tokenizer
from z2all_ds.tokenizer.import_existing import find_file, parse_special_ids, place_special_tokens
from z2all_ds.tokenizer.spm import MODEL_FILE

TEXT = "Hello, wörld! 今天 def f(x):\n    return x  # <|endoftext|>"


def byte_level(path: Path, **parts: Any) -> Path:
    """Write a byte-level BPE tokenizer.json with one control token that is not ours; `parts` replace its components."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT] * 20, trainer)
    backend.add_special_tokens(["<|theirs|>"])
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.save(str(path))
    return path


def test_control_tokens_are_placed_after_the_vocabulary(tmp_path: Path) -> None:
    theirs = Tokenizer.from_file(str(byte_level(tmp_path / "tokenizer.json")))
    report = import_tokenizer(tmp_path / "tokenizer.json", tmp_path / "out")
    size = theirs.get_vocab_size()
    assert report.text_vocab_size == size
    assert report.warnings == []
    assert report.special_ids == {name: size + place for place, name in enumerate(SPECIAL_TOKENS)}
    ours, plain = load_tokenizer(tmp_path / "out"), open_plain(tmp_path / "out")
    assert ours.encode(TEXT) == theirs.encode(TEXT).ids
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert plain.encode(TEXT, split_special_tokens=True) == ours.encode(TEXT)
    assert ours.special_id("<|theirs|>") == theirs.token_to_id("<|theirs|>")
    assert ours.encode_bytes(b"\xff") and ours.decode_bytes(ours.encode_bytes(b"a\xff")) == b"a\xff"
    assert len(plain) == ours.size == size + 12
    assert import_tokenizer(tmp_path / "tokenizer.json", tmp_path / "out") == report  # the existing folder is reused
    with pytest.raises(ConfigError, match="something else"):
        import_tokenizer(tmp_path / "tokenizer.json", tmp_path / "out", special_start=500)


def test_a_gap_before_the_control_tokens_is_filled_with_reserved_tokens(tmp_path: Path, small_spm: Path) -> None:
    report = import_tokenizer(
        small_spm / MODEL_FILE, tmp_path / "out", special_start=3000, special_ids={"<|tool|>": 3050}
    )
    assert report.special_ids["<|PAD|>"] == 3006
    assert (report.text_vocab_size, report.size) == (2500, 3051)
    ours, plain = load_tokenizer(tmp_path / "out"), open_plain(tmp_path / "out")
    assert ours.special_id("<|tool|>") == 3050
    assert (plain.pad_token_id, plain.convert_tokens_to_ids("<|tool|>"), len(plain)) == (3006, 3050, 3051)
    assert ours.decode([2777]) == plain.decode([2777]) == "<|reserved_2777|>"
    trained = load_tokenizer(small_spm)
    assert ours.encode(TEXT) == trained.encode(TEXT)
    assert (tmp_path / "out" / MODEL_FILE).read_bytes() == (small_spm / MODEL_FILE).read_bytes()
    plain.save_pretrained(str(tmp_path / "again"))
    assert open_plain(tmp_path / "again").encode(f"a{TEXT}") == plain.encode(f"a{TEXT}")


def test_existing_control_tokens_keep_their_ids(tmp_path: Path, small_tokenizer: Path) -> None:
    report = import_tokenizer(small_tokenizer, tmp_path / "out", special_ids={"<|tool|>": 1020})
    assert report.special_ids == {name: 1000 + place for place, name in enumerate(SPECIAL_TOKENS)}
    assert report.size == 1021


@pytest.mark.parametrize(
    ("given", "start", "message"),
    [
        (
            {"<|PAD|>": 3},
            None,
            r"special <|PAD|>=3: ids 0 to 9 are used by the tokenizer. Choose 10 or more.",
        ),
        ({}, 9, "special start 9: ids 0 to 9 are used"),
        ({"<|PAD|>": 20, "<|x|>": 20}, None, "has the same id"),
        ({"t3": 12}, None, "special t3=12: the tokenizer already has it as 3"),
    ],
)
def test_colliding_special_ids_are_refused(given: dict[str, int], start: int | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place_special_tokens({f"t{n}": n for n in range(10)}, given, start)
    assert message in str(caught.value)


def test_special_ids_are_parsed_from_the_command_line() -> None:
    assert parse_special_ids(["<|PAD|>=64006", "a=b=3"]) == {"<|PAD|>": 64006, "a=b": 3}
    for given in (["<|PAD|>"], ["=3"], ["x=-1"], ["x=1.5"], ["x=1", "x=2"], ["x=" + "9" * 5000]):
        with pytest.raises(ConfigError, match="special"):
            parse_special_ids(given)


def test_special_ids_may_be_existing_given_or_assigned() -> None:
    placed = place_special_tokens({"<|PAD|>": 0, "a": 1}, {"<|CLS|>": 4}, None)
    assert placed["<|PAD|>"] == 0 and placed["<|CLS|>"] == 4
    assert sorted(placed.values()) == [0, *range(2, 13)]


def test_a_vocabulary_with_gaps_is_imported(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json")
    rules = json.loads(path.read_text("utf-8"))
    rules["added_tokens"] = []
    last = max(rules["model"]["vocab"], key=rules["model"]["vocab"].get)
    rules["model"]["vocab"][last] += 5
    path.write_text(json.dumps(rules), "utf-8")
    report = import_tokenizer(path, tmp_path / "out")
    assert report.text_vocab_size == rules["model"]["vocab"][last] + 1
    assert load_tokenizer(tmp_path / "out").decode(load_tokenizer(tmp_path / "out").encode(TEXT)) == TEXT


def test_ids_that_would_need_billions_of_reserved_tokens_are_refused(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json")
    rules = json.loads(path.read_text("utf-8"))
    last = max(rules["model"]["vocab"], key=rules["model"]["vocab"].get)
    rules["model"]["vocab"][last] = 4_000_000_000
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(rules), "utf-8")
    with pytest.raises(DataError, match="with ids up to 4,000,000,000"):
        import_tokenizer(damaged, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"special <\|PAD\|>=4000000000: ids 0 to \d+ are used by the tokenizer"):
        import_tokenizer(path, tmp_path / "out", special_ids={"<|PAD|>": 4_000_000_000})
    with pytest.raises(ConfigError, match=r"special .*=4000000000: ids 0 to"):
        import_tokenizer(path, tmp_path / "out", special_start=4_000_000_000)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": normalizers.NFKC()}, "becomes '今天的天气真不错,我们出去走走。'"),
        ({"normalizer": normalizers.Lowercase()}, "becomes 'the quick brown fox"),
        ({"post_processor": None}, r"it put <\|theirs\|> around every text"),
    ],
)
def test_a_lossy_tokenizer_gives_a_warning_or_in_strict_mode_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], parts: dict[str, Any], message: str
) -> None:
    size = Tokenizer.from_file(str(byte_level(tmp_path / "x.json"))).token_to_id("<|theirs|>")
    if "post_processor" in parts:
        template = processors.TemplateProcessing(single="<|theirs|> $A", special_tokens=[("<|theirs|>", size)])
        parts = {"post_processor": template}
    path = byte_level(tmp_path / "tokenizer.json", **parts)
    with pytest.raises(DataError, match=message):
        import_tokenizer(path, tmp_path / "out", strict=True)
    assert not (tmp_path / "out").exists()
    report = import_tokenizer(path, tmp_path / "out")
    assert len(report.warnings) == 1
    assert "warning: tokenizer.json" in capfd.readouterr().err
    with pytest.raises(DataError, match=message):
        import_tokenizer(path, tmp_path / "out", strict=True)
    assert open_plain(tmp_path / "out").encode("a b") == load_tokenizer(tmp_path / "out").encode("a b")


def test_strict_mode_also_checks_a_tokenizer_as_it_is(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json", normalizer=normalizers.Lowercase())
    with pytest.raises(DataError, match="becomes 'the quick brown fox"):
        import_tokenizer(path, tmp_path / "out", strict=True, eos="<|theirs|>")
    assert not (tmp_path / "out").exists()
    assert len(import_tokenizer(path, tmp_path / "out", eos="<|theirs|>").warnings) == 1
    with pytest.raises(DataError, match="becomes 'the quick brown fox"):
        import_tokenizer(path, tmp_path / "out", strict=True, eos="<|theirs|>")


def test_truncation_and_padding_are_turned_off(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json")
    backend = Tokenizer.from_file(str(path))
    backend.enable_truncation(5)
    backend.enable_padding(length=8)
    backend.save(str(path))
    import_tokenizer(path, tmp_path / "out")
    ours = load_tokenizer(tmp_path / "out")
    assert ours.decode(ours.encode(TEXT)) == TEXT


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_imported_sentencepiece_models_keep_their_ids(tmp_path: Path, kind: str) -> None:
    """Holds for SentencePiece's defaults: leading space, NFKC, no byte fallback, and its own <s> and </s>."""
    data = other_model(model_type=kind, user_defined_symbols=["<x>"])
    (tmp_path / "tokenizer.model").write_bytes(data)
    report = import_tokenizer(tmp_path, tmp_path / "out")
    assert "not reproduced exactly" in report.warnings[0]
    ours, original = load_tokenizer(tmp_path / "out"), sentencepiece.SentencePieceProcessor(model_proto=data)
    for text in ("the cat sat", "then  Ａ ran ", "今天 number 42", "a", "the<x>"):
        assert ours.encode(text) == original.encode(text), text
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert ours.special_id("</s>") == original.eos_id()
    assert original.eos_id() not in ours.encode("a </s> b")
    with pytest.raises(DataError, match="raw bytes with this tokenizer"):
        ours.encode_bytes(b"a")


def test_a_folder_of_an_earlier_conversion_is_not_reused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(other_model())
    report = import_tokenizer(tmp_path / "tokenizer.model", tmp_path / "out")
    assert import_tokenizer(tmp_path / "tokenizer.model", tmp_path / "out") == report
    recipe = json.loads((tmp_path / "out" / "training.json").read_text("utf-8"))
    del recipe["conversion"]  # as version 1 wrote it, which gave other ids
    (tmp_path / "out" / "training.json").write_text(json.dumps(recipe), "utf-8")
    with pytest.raises(ConfigError, match="something else"):
        import_tokenizer(tmp_path / "tokenizer.model", tmp_path / "out")


def test_files_that_are_not_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "b.model").write_bytes(b"hello")
    for name, message in [
        ("a.json", "not readable"),
        ("folder", "it has no tokenizer"),
        ("b.model", "not a SentencePiece model"),
        ("none", "no such file"),
    ]:
        with pytest.raises(DataError, match=message):
            import_tokenizer(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_may_hold_its_tokenizer_under_another_name(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = byte_level(folder / "bpe-v2.json")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert find_file(folder) == path
    (folder / "spiece.model").write_bytes(b"")
    with pytest.raises(DataError, match=r"it has 2 tokenizers: spiece\.model, bpe-v2\.json"):
        find_file(folder)
    (folder / "spiece.model").unlink()
    (folder / "bpe-v2.json").unlink()
    (folder / "vocabulary").write_bytes(other_model())
    assert import_tokenizer(folder / "vocabulary", tmp_path / "out").special_ids["<|PAD|>"]
