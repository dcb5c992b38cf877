"""Perplexity against a plain loop with transformers."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.corpus_maker import write_shard
from tests.evaluate.conftest import WINDOW_TOKENS
from z2all_ds.corpus.manifest import Manifest, write_manifest
from z2all_ds.errors import ConfigError, DataError
from z2all_ds.evaluate.perplexity import PerplexityRow, measure_perplexity, render, to_json

TEXTS = {
    # Longer than a window, one that ends exactly anywhere, one character, nothing, and control tokens spelled out.
    "code": ["def add(a, b):\n    return a + b\n" * 9, "x", "import os\n\nprint(os.getcwd())\n"],
    "zh": ["今天天气很好，我们去公园散步。" * 3, "", "<|endoftext|> 是一个记号。"],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    shards = [write_shard(folder, domain, number, texts) for number, (domain, texts) in enumerate(TEXTS.items())]
    write_manifest(folder, Manifest(1, tuple(shards)))
    return folder


def plain_loop(folder: Path, texts: list[str]) -> tuple[float, int]:
    """Nats and predicted tokens, by the loss transformers itself computes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    nats, tokens = 0.0, 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        while ids:
            window, ids = torch.tensor([ids[:WINDOW_TOKENS]]), ids[WINDOW_TOKENS:]
            if window.shape[1] > 1:
                with torch.no_grad():
                    nats += model(window, labels=window).loss.item() * (window.shape[1] - 1)
                tokens += window.shape[1] - 1
    return nats, tokens


def test_against_a_plain_loop(model_folder: Path, corpus: Path) -> None:
    rows = {row.domain: row for row in measure_perplexity(model_folder, corpus, documents_per_domain=50)}
    assert set(rows) == set(TEXTS)
    for domain, texts in TEXTS.items():
        nats, tokens = plain_loop(model_folder, texts)
        row = rows[domain]
        assert (row.documents, row.tokens) == (3, tokens)
        # Sums of fp32 losses against means of fp32 losses.
        assert row.loss == pytest.approx(nats / tokens, rel=1e-5)
        assert row.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
        size = sum(len(text.encode()) for text in texts)
        assert row.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert rows["code"].tokens > WINDOW_TOKENS  # a document was cut


def test_fewer_documents_are_the_same_ones_every_time(model_folder: Path, corpus: Path) -> None:
    first, again = (measure_perplexity(model_folder, corpus, documents_per_domain=1) for _ in range(2))
    assert first == again
    assert [row.documents for row in first] == [1, 1]
    for row in first:
        alone = [plain_loop(model_folder, [text])[1] for text in TEXTS[row.domain]]
        assert row.tokens in alone


def test_none_asked_for_is_an_error(model_folder: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"^documents=0: must be at least 1\. "):
        measure_perplexity(model_folder, corpus, documents_per_domain=0)


def test_missing_model(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no Hugging Face folder \(no config\.json\)\. Give an export"):
        measure_perplexity(tmp_path / "nowhere", corpus, 1)


def test_missing_corpus(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        measure_perplexity(model_folder, tmp_path / "nowhere", 1)
    assert "nowhere" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_printed() -> None:
    rows = [PerplexityRow("zh", 3, 12345, 2.0, math.exp(2.0), 0.75)]
    table = io.StringIO()
    render(rows, file=table)
    text = " ".join(table.getvalue().replace("│", " ").split())
    assert "zh 3 12,345 2.0000 7.39 0.7500" in text
    assert json.loads(to_json(rows)) == [
        {
            "domain": "zh",
            "documents": 3,
            "tokens": 12345,
            "loss": 2.0,
            "perplexity": math.exp(2.0),
            "bits_per_byte": 0.75,
        }
    ]
