"""Tests of converted SentencePiece models, compared with SentencePiece itself."""

import random
import struct
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import normalizers

from tests.tokenizer.test_folder import open_plain
from tests.tokenizer.test_spm_model import other_model
from z2all_ds.base.errors import DataError
from z2all_ds.tokenizer import import_tokenizer
from z2all_ds.tokenizer.spm_backend import differences, spm_to_backend
from z2all_ds.tokenizer.spm_model import parse_spm_model
from z2all_ds.tokenizer.spm_rules import START, differing_rules, parse_rules, rule_steps

DECOMPOSED_PARTS = [
    *(
        "か\u3099",
        "ｶﾞ",
        "ﾊ\uff9f",
        "\u1112\u1161\u11ab",
        "\u1112\uffc2\u3134",
        "가\u11a8",
        "e\u0301",
        "E\u0301",
        "Ｊ\u030c",
    ),
    *(
        "I\u0307",
        "ω\u0314\u0342\u0345",
        "ﬁ\u0301",
        "\xa0\u200d",
        "👨\u200d👩",
        "E🏻",
        "\u0301",
        "\u0323",
        "\u0345",
        "\uff9e",
    ),
    *("\r", "\x01", "\x00", "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ue000", "\u0600", "क\u093c", "நொ"),
    *map(partial(unicodedata.normalize, "NFD"), ("한국어 값", "がぎ パヴ", "Việt Nam", "إسلام", "καΐ ᾧ", "İ")),
]
ODD_PARTS = [
    *(" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2003", "\x85", "\u2028", "\ufeff", "\x0c"),
    *("a", "the", "cat", "今天", "Ａ", "①", "12", "😀", "<b>", "</s>", "<x>", " the"),
    *("\u2581", " \u2581", "\u2581the", "[X]", "[x]", "［X］", "<unk>", "<0x0A>", "unk>"),
]
SYMBOLS = ["<x>", "[X]"]


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe", "normalization_rule_name": "identity"},
        {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True, "vocab_size": 340},
        {"model_type": "bpe", "user_defined_symbols": SYMBOLS},
        {"model_type": "bpe", "remove_extra_whitespaces": False, "user_defined_symbols": SYMBOLS},
        {
            "model_type": "bpe",
            "normalization_rule_name": "nfkc",
            "user_defined_symbols": ["\u2581<x>", "か", "Ａ"],
        },
        {"model_type": "bpe", "normalization_rule_name": "nfkc_cf", "user_defined_symbols": SYMBOLS},
        {"model_type": "bpe", "normalization_rule_name": "identity", "treat_whitespace_as_suffix": True},
        {
            "model_type": "bpe",
            "normalization_rule_name": "identity",
            "treat_whitespace_as_suffix": True,
            "user_defined_symbols": SYMBOLS,
        },
        {
            "model_type": "bpe",
            "normalization_rule_name": "identity",
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
        },
        {"normalization_rule_name": "identity"},
        {},
        {"byte_fallback": True, "vocab_size": 340},
        {"user_defined_symbols": SYMBOLS},
        {"normalization_rule_name": "nfkc_cf", "user_defined_symbols": SYMBOLS},
        {"normalization_rule_name": "nfkc"},
        {
            "normalization_rule_name": "nfkc_cf",
            "model_type": "bpe",
            "treat_whitespace_as_suffix": True,
            "user_defined_symbols": SYMBOLS,
        },
        {"normalization_rule_name": "nmt_nfkc_cf", "remove_extra_whitespaces": False},
    ],
)
def test_ids_of_odd_strings_equal_those_of_sentencepiece(options: dict[str, object]) -> None:
    data = other_model(**options)
    truth, backend = (
        sentencepiece.SentencePieceProcessor(model_proto=data),
        spm_to_backend(parse_spm_model(data, ""), ""),
    )
    backend.encode_special_tokens = True
    draw = random.Random(0)
    texts = ["".join(draw.choices(ODD_PARTS, k=draw.randint(1, 6))) for _ in range(2000)]
    texts += ["".join(draw.choices(ODD_PARTS + DECOMPOSED_PARTS * 2, k=draw.randint(1, 6))) for _ in range(2000)]
    if options.get("model_type") == "bpe":
        # `tokenizers` looks for the normalized form of a user-defined piece, which must not get the space of a text.
        texts = [
            text
            for text in texts
            if "".join(truth.encode(text, out_type=str)).strip("\u2581") not in [*SYMBOLS, "か", "Ａ"]
        ]
    assert len(texts) > 3800
    found = [encoded.ids for encoded in backend.encode_batch(texts, add_special_tokens=False)]
    assert [text for text, ids in zip(texts, found, strict=True) if ids != truth.encode(text)] == []


def with_rules(charsmap: bytes) -> bytes:
    model = sentencepiece_model_pb2.ModelProto.FromString(other_model(normalization_rule_name="identity"))
    model.normalizer_spec.precompiled_charsmap = charsmap
    return model.SerializeToString()


def test_all_rules_of_a_model_apply_except_those_of_new_scripts() -> None:
    for name in ("nmt_nfkc", "nfkc_cf"):
        model = parse_spm_model(other_model(normalization_rule_name=name), "")
        steps = normalizers.Sequence([normalizers.Prepend(START), *rule_steps(model.charsmap)])
        rules = parse_rules(model.charsmap)
        assert rules["か\u3099"] == "が" and rules["\u1112\u1161\u11ab"] == "한"
        differing = {key for key, _ in differing_rules(model.charsmap)}
        assert all(ord(char) > 0x105D1 for key in differing for char in key if char not in "\u0307")
        some = [key for key in random.Random(1).sample(sorted(rules), 2000) if key not in differing]
        assert [key for key in some if steps.normalize_str(key) != START + rules[key]] == []


def with_own_rules(folder: Path, rules: str, **options: object) -> bytes:
    """Return a model with rules like "61 62\\t78": "ab" becomes "x"."""
    (folder / "rules.tsv").write_text(rules)
    return other_model(normalization_rule_name="", normalization_rule_tsv=str(folder / "rules.tsv"), **options)


def test_rules_that_are_not_from_unicode_apply(tmp_path: Path) -> None:
    rules = "61 62\t78\n41\t61\n2E 2E 2E\t2026\n60 60\t22\n"  # "ab" to "x", "A" to "a", "..." to "…", "``" to a quote
    for options in ({}, {"user_defined_symbols": SYMBOLS}, {"model_type": "bpe", "user_defined_symbols": SYMBOLS}):
        data = with_own_rules(tmp_path, rules, **options)
        assert not any("normalization rules" in warning for warning in differences(parse_spm_model(data, "")))
        truth, backend = (
            sentencepiece.SentencePieceProcessor(model_proto=data),
            spm_to_backend(parse_spm_model(data, ""), ""),
        )
        draw = random.Random(2)
        parts = [
            "ab",
            "a",
            "b",
            "A",
            "Ab",
            ".",
            "..",
            "...",
            "`",
            "``",
            "\u0301",
            " ",
            "the",
            "<x>",
            "\ufdd0",
            "\ufddd",
        ]
        texts = ["".join(["a", *draw.choices(parts, k=draw.randint(1, 8))]) for _ in range(1000)]
        assert [
            text for text in texts if backend.encode(text, add_special_tokens=False).ids != truth.encode(text)
        ] == []


def test_rules_that_compete_give_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = with_own_rules(tmp_path, "61 62\t78\n62 63\t79\n")  # "ab" to "x", "bc" to "y"
    expected = "1 of its normalization rules have no effect here"
    (warning,) = differences(parse_spm_model(data, ""))
    assert warning.startswith(expected) and warning.endswith("U+0062 U+0063")
    (tmp_path / "a.model").write_bytes(data)
    assert warning in import_tokenizer(tmp_path / "a.model", tmp_path / "out").warnings
    assert f"warning: a.model: {expected}" in capfd.readouterr().err


def test_text_that_gets_other_ids_gives_a_warning() -> None:
    def warnings(**options: object) -> list[str]:
        return differences(parse_spm_model(other_model(**{"normalization_rule_name": "identity", **options}), ""))

    alone = "a text that consists only of a user-defined piece such as '[X]' gets no additional space"
    assert warnings(user_defined_symbols=["[X]"]) == []
    assert warnings(user_defined_symbols=["[X]"], model_type="bpe") == [alone]
    changed = "text that its rules turn into ' a b' becomes the user-defined piece 'a  b'"
    assert changed in warnings(user_defined_symbols=["a\u2581\u2581b"], model_type="bpe")
    marked = "a literal U+2581 of the user-defined piece '\u2581<x>' is removed from texts like a space"
    assert warnings(user_defined_symbols=["\u2581<x>"], normalization_rule_name="nmt_nfkc")[-1] == marked
    runs = "runs of ' ' that can be divided in several ways may be divided in another one"
    assert warnings(user_defined_symbols=["\u2581\u2581", "\u2581" * 4]) == [runs]
    model = sentencepiece_model_pb2.ModelProto.FromString(other_model(normalization_rule_name="identity"))
    for piece in model.pieces:
        piece.piece = piece.piece.replace("u", "é") if piece.type == 1 else piece.piece  # "<" remains in a piece "</"
    model.pieces.add(piece="<u", score=-3.0)
    (warning,) = differences(parse_spm_model(model.SerializeToString(), ""))
    assert warning == "a spelled-out '<unk>' becomes that token, since not all of its characters are known"


def test_the_exported_folder_gives_the_ids_of_sentencepiece_in_transformers(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "unigram": {"byte_fallback": True, "vocab_size": 340, "user_defined_symbols": SYMBOLS},
        "cut": {"normalization_rule_name": "nfkc_cf", "user_defined_symbols": SYMBOLS},
        "bpe": {"model_type": "bpe", "normalization_rule_name": "identity"},
    }
    for name, options in cases.items():
        data = other_model(**options)
        (tmp_path / f"{name}.model").write_bytes(data)
        import_tokenizer(tmp_path / f"{name}.model", tmp_path / name, as_is=True)
        truth, plain = sentencepiece.SentencePieceProcessor(model_proto=data), open_plain(tmp_path / name)
        draw = random.Random(1)
        texts = ["".join(draw.choices(ODD_PARTS, k=draw.randint(1, 6))) for _ in range(500)]
        found = plain(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert [text for text, ids in zip(texts, found, strict=True) if ids != truth.encode(text)] == [], name


def test_a_user_defined_piece_is_not_composed_with_a_mark_after_it() -> None:
    data = other_model(user_defined_symbols=["<x>", "か", "[X]"], normalization_rule_name="nfkc_cf")
    truth = sentencepiece.SentencePieceProcessor(model_proto=data)
    backend = spm_to_backend(parse_spm_model(data, ""), "")
    for text in ("a <x>\u0338", "aか\u3099", "a>\u0338か\u3099き\u3099", "a[X] b"):
        assert backend.encode(text, add_special_tokens=False).ids == truth.encode(text), text


def test_a_user_defined_piece_that_the_rules_remove_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    model = parse_spm_model(other_model(model_type="bpe", user_defined_symbols=["<x>", "\u2581\u2581"]), "")
    with pytest.raises(DataError, match=r"tokenizer x\.model: its rules remove the user-defined piece '  ' from texts"):
        spm_to_backend(model, "tokenizer x.model")
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_user_defined_piece_with_a_literal_space_is_in_no_text(kind: str) -> None:
    """SentencePiece searches for pieces after writing spaces as U+2581. Its rules still do not change the piece."""
    data = other_model(model_type=kind, user_defined_symbols=["THE cat"], normalization_rule_name="nfkc_cf")
    truth, model = sentencepiece.SentencePieceProcessor(model_proto=data), parse_spm_model(data, "")
    backend, piece = spm_to_backend(model, ""), [piece.text for piece in model.pieces].index("THE cat")
    for text in ("THE cat", "the cat", "a THE cat THE cat THE", "aTHE catsat", "THE\u2581cat"):
        assert backend.encode(text, add_special_tokens=False).ids == truth.encode(text), text
        assert piece not in truth.encode(text)
    assert backend.get_vocab_size() == truth.vocab_size()


def test_damaged_rules_are_refused() -> None:
    # Each node has itself as all its children.
    units = [256 << 10, *[0] * 256, *(label << 10 | label for label in range(1, 256))]
    loop = struct.pack("<513I", 2048, *units) + b"a\0"
    for charsmap in (b"x", struct.pack("<I", 400) + b"1234", loop):
        with pytest.raises(DataError, match=r"x\.model: its normalization rules are damaged"):
            spm_to_backend(parse_spm_model(with_rules(charsmap), ""), "x.model")
