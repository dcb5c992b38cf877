"""`z2all corpus tokenize` as users type it."""

import json
from pathlib import Path

from tests.helpers.command import one_line, z2all
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.data.tokens.reading import open_token_corpus


def test_tokenize_writes_the_tokens_of_a_corpus_and_reports_them(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    arguments = ("corpus", "tokenize", small_corpus, "--tokenizer", small_tokenizer, "--out", "词 t")
    answer = z2all(*arguments, "--workers", "2", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.startswith("tokenize: ") and " tokens in " in answer.stderr
    domains = open_token_corpus(tmp_path / "词 t").domains
    raw = load_manifest(small_corpus).domains
    lines = answer.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*raw, "all"]
    for line, (name, (documents, _)) in zip(lines, raw.items(), strict=False):
        block = domains[name].open_block(0, documents)
        tokens = sum(len(block.tokens(number)) for number in range(documents))
        assert line.startswith(f"{name}: {documents:,} documents, {tokens:,} tokens, ")
        assert line.endswith(" bytes per token")

    answer = z2all(*arguments, "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == f"词 t: the tokens of all {len(load_manifest(small_corpus).shards)} shards exist\n"
    figures = json.loads(answer.stdout)
    assert {name: one["documents"] for name, one in figures["domains"].items()} == {n: raw[n][0] for n in raw}
    assert figures["total"]["tokens"] == sum(one["tokens"] for one in figures["domains"].values())


def test_invalid_arguments_are_refused_with_one_line(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    def refused(corpus: Path, tokenizer: Path, *more: str, code: int) -> str:
        return one_line(
            z2all("corpus", "tokenize", corpus, "--tokenizer", tokenizer, "--out", "t", *more, cwd=tmp_path), code
        )

    nowhere = tmp_path / "nowhere"
    assert refused(nowhere, small_tokenizer, code=3).startswith(f"DataError: {nowhere}/MANIFEST.json: no such file")
    assert refused(small_corpus, nowhere, code=3).startswith(f"DataError: tokenizer {nowhere}/tokenizer.json: no such")
    assert refused(small_corpus, small_tokenizer, "--workers", "0", code=2).startswith("ConfigError: workers 0: ")
    assert list(tmp_path.iterdir()) == []
    answer = z2all(
        "corpus", "tokenize", small_corpus, "--tokenizer", small_tokenizer, "--out", small_corpus, cwd=tmp_path
    )
    assert one_line(answer, 2).startswith(f"ConfigError: folder {small_corpus}: is a corpus of text.")
