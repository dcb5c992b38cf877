"""The lines at the start and at the end of a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.training import run_arguments
from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.corpus import Executor
from z2all_ds.corpus.adopt import adopt_corpus
from z2all_ds.data.data_plan import open_documents
from z2all_ds.data.tokens.tokenizing import tokenize_corpus
from z2all_ds.ops.registry import OpChoice
from z2all_ds.train.inputs import check_data
from z2all_ds.train.summary import end_lines, estimated_tokens, ops_lines, start_lines, tokens_of


def test_the_start_shows_parameters_tokens_per_step_and_epochs(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    run = load_run_config(None, run_arguments(tmp_path / "run", small_corpus, small_tokenizer))
    data = check_data(run, 2, beat=lambda: None)
    assert data.counted == data.documents.domains.keys()
    shares = {"code": 0.5, "zh": 0.5}
    sizes = {name: tokens_of(one, data.tokenizer, name in data.counted) for name, one in data.documents.domains.items()}
    folder, model, step, corpus = start_lines(run, 2, run_stages(run), [shares], data)
    assert folder == f"run folder {tmp_path / 'run'}"
    assert model.startswith("model: ") and model.endswith(" parameters")
    product = "ranks 2 x micro-batch 2 x accumulation 2 x length 32 = 256"
    assert step == f"tokens per step: {product}; 12 steps: 3,072"
    epochs = ", ".join(f"{name} {1536 / sizes[name]:.2g}" for name in shares)
    assert corpus == f"corpus: about {sum(sizes.values()):,.0f} tokens; epochs that the run reads, about: {epochs}"


def test_numbers_of_epochs_have_no_exponent(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    run = load_run_config(None, run_arguments(tmp_path / "run", small_corpus, small_tokenizer, "train.steps=1000000"))
    *_, corpus = start_lines(run, 2, run_stages(run), [{"code": 1.0}], check_data(run, 2))
    assert re.fullmatch(r"code \d,\d{3}", corpus.rpartition(": ")[2])


def test_the_tokens_of_small_and_of_tokenized_corpora_are_counted(tmp_path: Path, small_tokenizer: Path) -> None:
    corpus = uneven_corpus(tmp_path / "corpus")
    run = load_run_config(None, run_arguments(tmp_path / "run", corpus, small_tokenizer))
    tokenizer, documents, *_ = check_data(run, 1)
    (domain,) = documents.domains.values()
    exact = int(domain.token_counts().sum())
    assert tokens_of(domain, tokenizer, is_counted=True) == exact
    assert tokens_of(domain, tokenizer, is_counted=False) == estimated_tokens(domain, tokenizer)
    tokenize_corpus(corpus, small_tokenizer, tmp_path / "tokens", workers=1)
    (tokens,) = open_documents(tmp_path / "tokens", tokenizer).domains.values()
    assert tokens_of(tokens, tokenizer, is_counted=True) == exact


@pytest.mark.parametrize("has_text_bytes", [True, False])
def test_the_estimate_of_a_domain_is_near_its_tokens_if_its_first_document_is_long(
    tmp_path: Path, small_tokenizer: Path, has_text_bytes: bool
) -> None:
    run = load_run_config(None, run_arguments(tmp_path / "run", uneven_corpus(tmp_path / "c"), small_tokenizer))
    tokenizer, documents, *_ = check_data(run, 1)
    (domain,) = documents.domains.values()
    exact, long = int(domain.token_counts().sum()), int(domain.token_counts()[0])
    if has_text_bytes:
        assert 0.8 < estimated_tokens(domain, tokenizer) / exact < 1.25
    else:  # as in corpora of earlier versions
        domain.text_bytes = None
        assert 0.8 < estimated_tokens(domain, tokenizer) / (exact - long) < 1.25


def uneven_corpus(folder: Path) -> Path:
    """Write a corpus of one long document and many short ones, and return its folder."""
    texts = ["a long book about many words. " * 2000, *(f"short note {number} is here." for number in range(1000))]
    folder.mkdir()
    (folder / "books.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    adopt_corpus(folder, executor=Executor(1))
    return folder


def test_ops_are_one_line_on_a_cpu_unless_they_were_asked_for() -> None:
    choices = [
        OpChoice("attention", "sdpa", "packed: needs a GPU"),
        OpChoice("rope", "torch", "requested"),
        OpChoice("swiglu", "torch", "triton: needs a GPU"),
    ]
    wanted = {"attention": "auto", "rope": "torch", "swiglu": "auto"}
    assert list(ops_lines(choices, wanted, is_cpu=True)) == [
        "op rope: torch (requested)",
        "ops on the CPU: attention sdpa, swiglu torch",
    ]
    assert len(list(ops_lines(choices, wanted, is_cpu=False))) == 3


def test_the_end_shows_the_lowest_losses_the_folder_and_the_next_command(tmp_path: Path) -> None:
    run, folder = load_run_config(), RunFolder(tmp_path / "my run")
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": 4.0, "validation_loss": 4.25, "bad_records_of_web": 2},
        {"step": 3, "loss": None, "bad_records_of_web": 1, "bad_records_of_a b": 1},
        {"step": 4, "loss": 4.5, "validation_loss": 4.5},
    ]
    lines = list(end_lines(run, folder, records, "done"))
    quoted = f"'{folder.root}'"
    assert lines == [
        "lowest loss 4.0000 at step 2",
        "lowest validation loss 4.2500 at step 2",
        "bad records skipped, counted in every epoch: web 3, a b 1",
        f"run folder {folder.root}; next: z2all export {quoted}, or z2all board {quoted}",
    ]
    assert list(end_lines(run, folder, [], "requeue")) == [f"run folder {folder.root}; the same command resumes it"]
    measured = load_run_config(None, ["checkpoint.at_end=false", "train.steps=20"])
    assert list(end_lines(measured, folder, [], "done")) == []
