import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from z2all_ds.base.errors import DataError
from z2all_ds.tokenizer.spm import MODEL_FILE
from z2all_ds.tokenizer.spm_model import PieceKind, parse_spm_model


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
