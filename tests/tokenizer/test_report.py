import json
from pathlib import Path

import pytest

from tests.tokenizer.test_import_existing import byte_level
from z2all_ds.base.reports import print_lines, to_json
from z2all_ds.tokenizer import load_tokenizer, report_tokenizers
from z2all_ds.tokenizer.report import KINDS, describe, kind_of
from z2all_ds.tokenizer.sampling import open_sources


def test_reported_figures_match_the_tokenizers(
    small_corpus: Path, small_tokenizer: Path, small_spm: Path, tmp_path: Path
) -> None:
    from tokenizers import normalizers

    lossy = byte_level(tmp_path / "lossy.json", normalizer=normalizers.Lowercase())
    figures = report_tokenizers([small_tokenizer, small_spm, lossy], small_corpus)
    bbpe, spm, foreign = figures
    tokenizer = load_tokenizer(small_tokenizer)
    texts = [text for _, text in open_sources(small_corpus).domains["zh"].sample(10**9)]
    tokens = sum(map(len, tokenizer.encode_batch(texts)))
    assert bbpe.domains["zh"].chars_per_token == round(sum(map(len, texts)) / tokens, 4)
    assert bbpe.domains["zh"].bytes_per_token == round(sum(len(text.encode()) for text in texts) / tokens, 4)
    assert bbpe.numbers["1234567890"] == len(tokenizer.encode("1234567890"))
    assert spm.numbers["1234567890"] == 10
    assert bbpe.indentation["a second line end"] == 1
    assert bbpe.comes_back and spm.comes_back and not foreign.comes_back
    assert foreign.does_not_come_back
    assert not foreign.domains["en"].comes_back
    for one, size in ((bbpe, 1012), (spm, 2512)):
        assert one.size == sum(one.composition.values()) == size
        assert list(one.composition) == list(KINDS)
        assert one.composition["control"] == 12
    assert spm.composition["CJK"] > bbpe.composition["CJK"] > 0
    assert json.loads(to_json(figures))[0]["domains"]["zh"]["comes_back"] is True


def test_the_table_has_a_row_for_each_kind_of_figure(
    small_corpus: Path, small_tokenizer: Path, small_spm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_lines(describe(report_tokenizers([small_tokenizer, small_spm], small_corpus, 20_000)))
    shown = capsys.readouterr().out
    for word in ("zh: bytes per token", "tokens of 1234567890", "tokens that are CJK", "every text is reproduced"):
        assert word in shown


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (" the", "Latin"),
        ("été", "Latin"),
        ("天气", "CJK"),
        ("カ", "CJK"),
        ("привет", "other letters"),
        ("42", "digits"),
        ("\n    ", "whitespace"),
        ("):", "signs"),
    ],
)
def test_tokens_are_classified_by_kind_of_character(token: str, kind: str) -> None:
    assert kind_of(token.encode()) == kind
    assert kind_of("天".encode()[:2]) == "parts of characters"
