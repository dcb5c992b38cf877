import io
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

from z2all_ds.base.errors import DataError
from z2all_ds.tokenizer import import_tokenizer
from z2all_ds.tokenizer.spm import MODEL_FILE
from z2all_ds.tokenizer.spm_model import PieceKind, differences, parse_spm_model, spm_to_backend
from z2all_ds.tokenizer.spm_rules import START, differing_rules, parse_rules, rule_steps


def other_model(**options: object) -> bytes:
    written = io.BytesIO()
    lines = [f"the cat number {n} sat on the mat, then Ａ ran 今天 <b>/</b>" for n in range(500)]
    settings: dict[str, Any] = {
        "vocab_size": 70,
        "model_type": "unigram",
        "hard_vocab_limit": False,
        "minloglevel": 2,
        **options,
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=written, **settings)
    return written.getvalue()


@pytest.mark.parametrize("options", [{}, {"model_type": "bpe", "normalization_rule_name": "identity"}])
def test_models_are_parsed_exactly_as_by_protobuf(small_spm: Path, options: dict[str, object]) -> None:
    for data in ((small_spm / MODEL_FILE).read_bytes(), other_model(user_defined_symbols=["<x>"], **options)):
        model = parse_spm_model(data, "x")
        truth = sentencepiece_model_pb2.ModelProto.FromString(data)
        assert [(p.text, p.score, int(p.kind)) for p in model.pieces] == [
            (p.piece, p.score, p.type) for p in truth.pieces
        ]
        assert model.kind == {1: "unigram", 2: "bpe"}[truth.trainer_spec.model_type]
        rules = truth.normalizer_spec
        assert model.charsmap == rules.precompiled_charsmap
        assert model.add_dummy_prefix == rules.add_dummy_prefix
        assert model.remove_extra_whitespaces == rules.remove_extra_whitespaces
        assert model.space_after_word == truth.trainer_spec.treat_whitespace_as_suffix
    assert PieceKind.USER_DEFINED in {piece.kind for piece in model.pieces}


def test_files_that_are_not_sentencepiece_models_are_refused(small_spm: Path) -> None:
    whole = (small_spm / MODEL_FILE).read_bytes()
    for data in (b"", b"hello", whole[:1000], b"\x0b", b"\xff" * 40, b'{"version": "1.0"}'):
        with pytest.raises(DataError, match="not a SentencePiece model"):
            parse_spm_model(data, "tokenizer x.model")


def test_a_long_piece_is_refused() -> None:
    model = sentencepiece_model_pb2.ModelProto()
    model.pieces.add(piece="a" * 300_000, score=0.0)
    with pytest.raises(DataError, match=r"x\.model: not a SentencePiece model \(piece 0 has 300,0.. of at most 512"):
        parse_spm_model(model.SerializeToString(), "tokenizer x.model")


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
]


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe", "normalization_rule_name": "identity"},
        {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True, "vocab_size": 340},
        {"model_type": "bpe", "user_defined_symbols": ["<x>"]},
        {"model_type": "bpe", "remove_extra_whitespaces": False, "user_defined_symbols": ["<x>"]},
        {"model_type": "bpe", "normalization_rule_name": "identity", "treat_whitespace_as_suffix": True},
        {"normalization_rule_name": "identity"},
        {},
        {"normalization_rule_name": "nfkc"},
        {"normalization_rule_name": "nfkc_cf", "model_type": "bpe", "treat_whitespace_as_suffix": True},
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
    # `tokenizers` looks for the normalized form of a user-defined piece, which must not get the space before a text.
    texts = [text for text in texts if text.strip(" \t\r\n\u00a0\u3000\u2003\x85\u2028\ufeff\x0c\x01\u200d") != "<x>"]
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


def test_rules_that_are_not_from_unicode_give_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules.tsv").write_text("61 62\t78\n41\t61\n")  # "ab" to "x", "A" to "a"
    data = other_model(normalization_rule_name="", normalization_rule_tsv=str(tmp_path / "rules.tsv"))
    expected = "1 of its normalization rules have no effect here"
    (warning,) = differences(parse_spm_model(data, ""))
    assert warning.startswith(expected) and warning.endswith("U+0061 U+0062")
    (tmp_path / "a.model").write_bytes(data)
    assert warning in import_tokenizer(tmp_path / "a.model", tmp_path / "out").warnings
    assert f"warning: a.model: {expected}" in capfd.readouterr().err


def test_user_defined_pieces_that_differ_give_a_warning() -> None:
    model = parse_spm_model(other_model(normalization_rule_name="nfkc_cf", user_defined_symbols=["[X]"]), "")
    found = differences(model)
    assert "a text that consists only of a user-defined piece such as '[X]' gets no additional space" in found
    assert "text that its rules turn into '[x]' becomes the user-defined piece '[X]'" in found


def test_a_user_defined_piece_is_not_composed_with_a_mark_after_it() -> None:
    data = other_model(user_defined_symbols=["<x>", "か", "[X]"], normalization_rule_name="nfkc_cf")
    truth = sentencepiece.SentencePieceProcessor(model_proto=data)
    backend = spm_to_backend(parse_spm_model(data, ""), "")
    for text in ("a <x>\u0338", "aか\u3099", "a>\u0338か\u3099き\u3099", "a[X] b"):
        assert backend.encode(text, add_special_tokens=False).ids == truth.encode(text), text


def test_a_user_defined_piece_that_the_rules_remove_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    model = parse_spm_model(other_model(user_defined_symbols=["<x>", "  "]), "")
    with pytest.raises(DataError, match=r"tokenizer x\.model: its rules remove the user-defined piece '  ' from texts"):
        spm_to_backend(model, "tokenizer x.model")
    assert "panicked" not in capfd.readouterr().err


def test_damaged_rules_are_refused() -> None:
    # Each node has itself as all its children.
    units = [256 << 10, *[0] * 256, *(label << 10 | label for label in range(1, 256))]
    loop = struct.pack("<513I", 2048, *units) + b"a\0"
    for charsmap in (b"x", struct.pack("<I", 400) + b"1234", loop):
        with pytest.raises(DataError, match=r"x\.model: its normalization rules are damaged"):
            spm_to_backend(parse_spm_model(with_rules(charsmap), ""), "x.model")
