"""Tests for perplexity, compared with plain loops over transformers models."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.corpus_maker import write_shard
from tests.evaluate.conftest import WINDOW_TOKENS
from tests.helpers.marked import marked, new_mark
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.reports import print_lines, to_json
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.corpus.manifest import Manifest, write_manifest
from z2all_ds.evaluate.loading import LoadedModel
from z2all_ds.evaluate.perplexity import (
    ModelPerplexity,
    PerplexityRow,
    describe,
    measure_in_ranks,
    measure_perplexity,
)
from z2all_ds.evaluate.perplexity_rank import PerplexitySettings, Sums, measure_share
from z2all_ds.evaluate.texts import open_texts

TEXTS = {
    # Texts longer than a window, a single character, an empty text, and the name of a control token.
    "code": ["def add(a, b):\n    return a + b\n" * 9, "x", "import os\n\nprint(os.getcwd())\n"],
    "zh": ["今天天气很好，我们去公园散步。" * 6, "", "<|endoftext|> 是一个记号。"],
}
Loop = Callable[[Path, list[str]], tuple[float, int]]
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the default is bf16, and the loops are fp32"
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> PerplexitySettings:
    folder = tmp_path_factory.mktemp("texts")
    shards = [write_shard(folder, domain, number, texts) for number, (domain, texts) in enumerate(TEXTS.items())]
    write_manifest(folder, Manifest(1, tuple(shards)))
    return PerplexitySettings(str(folder))


def ignore(amount: float, note: str = "") -> None:
    """Ignore progress."""


def opened(folder: Path) -> tuple[AutoModelForCausalLM, AutoTokenizer]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def sliding_loop(folder: Path, texts: list[str], window: int, stride: int, bos: bool = False) -> tuple[float, int]:
    """Return nats and predicted tokens, one window at a time, from the loss that transformers computes."""
    model, tokenizer = opened(folder)
    nats, tokens = 0.0, 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_tensors="pt").input_ids.long()
        if bos:
            ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], dim=1)
        previous_end = 0
        for begin in range(0, ids.shape[1], stride):
            end = min(begin + window, ids.shape[1])
            labels = ids[:, begin:end].clone()
            labels[:, : previous_end - begin] = -100
            count = (labels[:, 1:] != -100).sum().item()
            if count:
                with torch.no_grad():
                    nats += model(ids[:, begin:end], labels=labels).loss.item() * count
                tokens += count
            previous_end = end
            if end == ids.shape[1]:
                break
    return nats, tokens


def packed_loop(folder: Path, texts: list[str], window: int) -> tuple[float, int]:
    model, tokenizer = opened(folder)
    row: list[int] = []
    for text in texts:
        row += [*tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids, tokenizer.eos_token_id]
    nats = 0.0
    for start in range(0, len(row) - 1, window):
        piece = torch.tensor(row[start : start + window + 1])
        with torch.no_grad():
            logits = model(piece[None, :-1]).logits[0]
        nats -= logits.log_softmax(-1).gather(1, piece[1:, None]).sum().item()
    return nats, len(row) - 1


def check(measured: ModelPerplexity, loop: Loop, folder: Path) -> None:
    """Compare every domain and the total with the loop."""
    total_nats, total_tokens = 0.0, 0
    for row, (domain, texts) in zip(measured.domains, TEXTS.items(), strict=True):
        nats, tokens = loop(folder, texts)
        assert (row.domain, row.documents, row.tokens) == (domain, 3, tokens)
        assert row.loss == pytest.approx(nats / tokens, rel=1e-5)
        assert row.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
        total_nats, total_tokens = total_nats + nats, total_tokens + tokens
    assert (measured.all.documents, measured.all.tokens) == (6, total_tokens)
    assert measured.all.loss == pytest.approx(total_nats / total_tokens, rel=1e-5)


@pytest.mark.parametrize(("window", "stride"), [(None, None), (16, None), (24, 5), (WINDOW_TOKENS, 40)])
def test_documents_in_windows_equal_a_plain_loop(
    model_folder: Path, settings: PerplexitySettings, window: int | None, stride: int | None
) -> None:
    (measured,) = measure_perplexity([model_folder], replace(settings, window=window, stride=stride, batch=3))
    length = window or WINDOW_TOKENS
    check(measured, lambda folder, texts: sliding_loop(folder, texts, length, stride or length - 1), model_folder)
    assert measured.domains[0].tokens > 2 * length  # a document was cut


def test_packed_documents_equal_a_plain_loop(model_folder: Path, settings: PerplexitySettings) -> None:
    """Documents are packed in the order in which they are read."""
    (measured,) = measure_perplexity([model_folder], replace(settings, packed=True, window=20))
    taken = {domain.name: list(domain.read(0, 1)) for domain in open_texts(settings.data, None)}
    assert {name: sorted(texts) for name, texts in taken.items()} == {n: sorted(t) for n, t in TEXTS.items()}
    loop = {tuple(TEXTS[name]): texts for name, texts in taken.items()}
    check(measured, lambda folder, texts: packed_loop(folder, loop[tuple(texts)], 20), model_folder)


def test_figures_per_byte_and_per_character(model_folder: Path, settings: PerplexitySettings) -> None:
    """The whole text is predicted after a begin-of-text token, so all its bytes count."""
    (measured,) = measure_perplexity([model_folder], replace(settings, bos="yes"))
    window = WINDOW_TOKENS
    check(measured, lambda folder, texts: sliding_loop(folder, texts, window, window - 1, bos=True), model_folder)
    for row in measured.domains:
        texts = TEXTS[row.domain]
        assert (row.bytes, row.characters) == (sum(len(text.encode()) for text in texts), sum(map(len, texts)))
        assert row.loss is not None
        nats = row.loss * row.tokens
        assert row.bits_per_byte == pytest.approx(nats / math.log(2) / row.bytes)
        assert row.bits_per_character == pytest.approx(nats / math.log(2) / row.characters)
        assert row.perplexity_per_byte == pytest.approx(math.exp(nats / row.bytes))
        assert row.perplexity_per_character == pytest.approx(math.exp(nats / row.characters))
    (without,) = measure_perplexity([model_folder], replace(settings, bos="no"))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for row in without.domains:
        texts = [text for text in TEXTS[row.domain] if text]
        firsts = [tokenizer(text[:9], split_special_tokens=True).input_ids[0] for text in texts]
        # In this tokenizer each character of a token represents one byte; 今 is split after its second byte.
        first_bytes = sum(map(len, tokenizer.convert_ids_to_tokens(firsts)))
        first_characters = sum(len(tokenizer.decode([first])) for first in firsts)
        assert row.bytes == sum(len(text.encode()) for text in texts) - first_bytes
        assert row.characters == sum(map(len, texts)) - first_characters


@pytest.mark.parametrize("packed", [False, True])
def test_the_batch_size_changes_only_rounding(model_folder: Path, settings: PerplexitySettings, packed: bool) -> None:
    one, seven = (
        measure_perplexity([model_folder], replace(settings, batch=batch, packed=packed, window=16))[0]
        for batch in (1, 7)
    )
    for alone, together in zip([*one.domains, one.all], [*seven.domains, seven.all], strict=True):
        assert (alone.tokens, alone.bytes) == (together.tokens, together.bytes)
        assert together.loss == pytest.approx(alone.loss, rel=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_the_sums_of_three_ranks_add_up_to_those_of_one(
    loaded: LoadedModel, settings: PerplexitySettings, packed: bool
) -> None:
    asked, domains = replace(settings, packed=packed, window=16), open_texts(settings.data, None)
    whole = measure_share(loaded, domains, asked, 0, 1, ignore).sums
    shares = [measure_share(loaded, domains, asked, rank, 3, ignore).sums for rank in range(3)]
    for name, alone in whole.items():
        together = sum((share[name] for share in shares), Sums())
        assert replace(together, nats=0.0) == replace(alone, nats=0.0)
        assert together.nats == pytest.approx(alone.nats, rel=1e-6)
        assert max(share[name].tokens for share in shares) < alone.tokens


@pytest.mark.parametrize("packed", [False, True])
def test_progress_adds_up_to_the_bytes_of_the_text(
    loaded: LoadedModel, settings: PerplexitySettings, packed: bool
) -> None:
    """The time left follows from it, so it also moves within a domain."""
    asked, domains = replace(settings, packed=packed, window=16, batch=1), open_texts(settings.data, None)
    for rank in range(2):
        advances: list[float] = []
        sums = measure_share(loaded, domains, asked, rank, 2, advances.append).sums.values()
        assert min(advances) >= 0
        assert sum(advances) == pytest.approx(sum(one.bytes for one in sums))
        assert max(advances) < sum(advances) / 4


@pytest.fixture
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mark = new_mark()
    for name, value in mark.items():
        monkeypatch.setenv(name, value)
    yield
    assert not marked(mark)


@pytest.mark.extended
@pytest.mark.usefixtures("no_process_is_left")
def test_two_processes_give_the_same_figures_as_one(model_folder: Path, settings: PerplexitySettings) -> None:
    one, two = (measure_perplexity([model_folder], settings, ranks)[0] for ranks in (1, 2))
    for alone, together in zip([*one.domains, one.all], [*two.domains, two.all], strict=True):
        assert (together.documents, together.tokens, together.bytes) == (alone.documents, alone.tokens, alone.bytes)
        assert together.loss == pytest.approx(alone.loss, rel=1e-6)


@pytest.mark.extended
@pytest.mark.usefixtures("no_process_is_left")
def test_an_error_in_a_rank_is_raised_in_the_parent(model_folder: Path, settings: PerplexitySettings) -> None:
    with pytest.raises(ConfigError, match="window=99: must be from 2 to"):
        measure_in_ranks(str(model_folder), replace(settings, window=99), 1, ignore)


def test_a_run_and_its_export_give_equal_figures(run: RunFolder, exported: Path, settings: PerplexitySettings) -> None:
    of_run, of_export = measure_perplexity([run.root, exported], settings)
    assert (of_run.model, of_run.step) == (f"{run.root} step 9", 9)
    assert of_run.domains == of_export.domains
    check(of_run, lambda folder, texts: sliding_loop(folder, texts, WINDOW_TOKENS, WINDOW_TOKENS - 1), exported)


def test_a_limited_number_of_documents_is_the_same_every_time(model_folder: Path, settings: PerplexitySettings) -> None:
    asked = replace(settings, documents=1)
    first, again = (measure_perplexity([model_folder], asked)[0] for _ in range(2))
    assert first == again
    assert [row.documents for row in first.domains] == [1, 1]


@pytest.mark.parametrize("setting", ["documents", "batch", "ranks"])
def test_invalid_numbers_are_refused(model_folder: Path, settings: PerplexitySettings, setting: str) -> None:
    changes: dict[str, Any] = {} if setting == "ranks" else {setting: -1}
    asked = replace(settings, **changes)
    with pytest.raises(ConfigError, match=rf"^{setting}=-1: must be "):
        measure_perplexity([model_folder], asked, ranks=-1 if setting == "ranks" else 1)


def test_a_tokenizer_of_another_model_is_refused(
    small_tokenizer: Path, settings: PerplexitySettings, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(small).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(small_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="has only 300"):
        measure_perplexity([tmp_path], settings)


def test_the_printed_table_and_the_json(settings: PerplexitySettings, capsys: pytest.CaptureFixture[str]) -> None:
    row = PerplexityRow.of("[b]zh", Sums(3, 12345, 2 * 12345, 30000, 10000))
    models = [
        ModelPerplexity(name, None, 48, 47, False, [row, PerplexityRow.of("空", Sums(1))], row) for name in ("a", "b")
    ]
    print_lines(describe(models))
    text = " ".join(capsys.readouterr().out.split())
    assert "[b]zh a 3 12,345 2.0000 7.39 2.277 11.811 1.1873 3.5620 [b]zh b 3 12,345" in text
    assert "空 a 1 0 - - - - - -" in text
    assert "b: windows of 48 tokens, at least 1 of context where available; first token not counted" in text
    content = json.loads(to_json({"question": settings, "models": models}))
    assert content["question"]["data"] == settings.data
    assert [one["model"] for one in content["models"]] == ["a", "b"]
    assert content["models"][0]["domains"][1]["loss"] is None
    assert content["models"][0]["all"]["perplexity"] == pytest.approx(math.exp(2))
