"""Tests of `train.init_from`: a run starts with the weights of a Hugging Face folder under every JSON and number of
ranks, and its first loss is the one that transformers computes on the same tokens."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import read_whole
from tests.helpers.command import one_line, z2all
from tests.helpers.llama_folders import make_llama
from tests.helpers.training import MICRO_OVERRIDES, losses, run_arguments, train
from tests.zero.engines import tiny_engine
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.llama_folder import LlamaFolder
from z2all_ds.base.vocabulary_rows import NEW, VocabularyRows
from z2all_ds.checkpoint.layout import WEIGHT
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.checkpoint.state_files import StateReader
from z2all_ds.data import PackedStream
from z2all_ds.data.run_spec import stream_spec
from z2all_ds.model import Z2allForCausalLM
from z2all_ds.model.llama_weights import LlamaWeights
from z2all_ds.tokenizer.tokenization_z2all import load_tokenizer
from z2all_ds.zero.first_weights import FirstWeights, first_weights, is_new_run, load_first_weights
from z2all_ds.zero.op_builds import prebuild
from z2all_ds.zero.state.save import save_checkpoint

JSONS = ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
SHAPES = [(name, "fp32") for name in JSONS] + [(name, "bf16") for name in ("zero1", "zero2", "zero3")]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Path) -> tuple[Path, Any]:
    """Return a Llama folder in fp32, in several files and with the tokenizer of the corpus, and its model."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    model = make_llama(folder, max_shard_size="60KB")
    shutil.copy(small_tokenizer / "tokenizer.json", folder)
    return folder, model


def whole(size: int = 1024) -> VocabularyRows:
    return VocabularyRows(list(range(size)), "id")


@pytest.mark.parametrize(("name", "precision"), SHAPES)
def test_master_weights_and_loss_equal_those_of_the_folder(
    name: str, precision: str, llama: tuple[Path, Any], tmp_path: Path
) -> None:
    """This includes bf16, where DeepSpeed by itself would create master weights from rounded weights."""
    if "offload" in name:
        prebuild(["cpu_adam"])
    folder, stock = llama
    wanted = Z2allForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said: list[str] = []
    settings = [*MICRO_OVERRIDES, f"deepspeed={name}", f"train.precision={precision}"]
    with tiny_engine("cpu", *settings) as (engine, _):
        load_first_weights(engine, FirstWeights(LlamaFolder(folder), whole()), 7, said.append)
        saved = StateReader(save_checkpoint(engine, tmp_path, 0, {}, {}, Retention(2)))
        ids = torch.randint(1024, (2, 20), generator=torch.Generator().manual_seed(1))
        engine.eval()
        with torch.no_grad():
            loss = engine(input_ids=ids[:, :-1], next_tokens=ids[:, 1:]).loss.item()
            if precision == "bf16":
                same = make_like(engine.module, wanted, torch.bfloat16)(ids[:, :-1], next_tokens=ids[:, 1:]).loss.item()
            else:
                same = stock(ids, labels=ids).loss.item()
    for parameter, weight in wanted.named_parameters():
        assert torch.equal(read_whole(saved, parameter, WEIGHT), weight), parameter
    assert loss == pytest.approx(same, rel=1e-6)
    assert said == ["weights from llama; vocabulary by id: 1024 of 1024 rows, 0 new"]


def make_like(engine_model: Any, weights: Z2allForCausalLM, dtype: torch.dtype) -> Z2allForCausalLM:
    """Return a model with the given weights and the ops of the engine's model, without DeepSpeed."""
    model = Z2allForCausalLM(weights.config, engine_model.ops).eval()
    model.load_state_dict(weights.state_dict())
    return model.to(dtype)


def test_an_extended_vocabulary_is_the_same_under_every_stage(llama: tuple[Path, Any], tmp_path: Path) -> None:
    folder, stock = llama
    rows = VocabularyRows([5, *range(1, 1024), *[NEW] * 64], "id")
    start = FirstWeights(LlamaFolder(folder), rows)
    wanted = LlamaWeights(*start, 7)
    for name in ("zero0", "zero3"):
        settings = [*MICRO_OVERRIDES, f"deepspeed={name}", "model.vocab_size=1088"]
        with tiny_engine("cpu", *settings) as (engine, _):
            load_first_weights(engine, start, 7, lambda line: None)
            saved = StateReader(save_checkpoint(engine, tmp_path / name, 0, {}, {}, Retention(2)))
        for parameter in ("lm_head.weight", "model.embed_tokens.weight"):
            found = read_whole(saved, parameter)
            assert torch.equal(found, wanted.parameter(parameter))
            assert torch.equal(found[0], stock.state_dict()[parameter][5])


# Runs started with the `z2all train` command


def first_batch_loss(model: Any, run: RunConfig, tokenizer: Path) -> float:
    """Return the loss that transformers computes on the samples of the first step, for each packed document alone."""
    stream = iter(PackedStream(stream_spec(run), load_tokenizer(tokenizer)))
    total, count = 0.0, 0
    for _ in range(run.train.global_batch):
        sample = next(stream)
        _, lengths = sample["document_ids"].unique_consecutive(return_counts=True)
        with torch.no_grad():
            parts = [model(ids[None]).logits[0] for ids in sample["input_ids"].split(lengths.tolist())]
        logits = torch.cat(parts)
        counted = sample["next_tokens"] >= 0
        found = torch.nn.functional.cross_entropy(logits[counted], sample["next_tokens"][counted], reduction="sum")
        total, count = total + found.double().item(), count + int(counted.sum())
    return total / count


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_the_first_loss_of_two_ranks_is_that_of_the_folder(
    name: str, llama: tuple[Path, Any], small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    folder, stock = llama
    settings = (f"deepspeed={name}", f"train.init_from={folder}", "train.steps=2", "checkpoint.every_steps=1")
    answer = train(tmp_path / "run", small_corpus, small_tokenizer, *settings)
    assert answer.returncode == 0, answer.stderr
    assert "weights from llama; vocabulary by id: 1024 of 1024 rows, 0 new" in answer.stderr + answer.stdout
    run = load_run_config(None, run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *settings))
    assert losses(tmp_path / "run")[0] == pytest.approx(first_batch_loss(stock, run, small_tokenizer), rel=1e-6)
    # A resumed run does not need the folder and does not mention it.
    gone = [*settings[:1], "train.init_from=/nowhere", "train.steps=3", "schedule.allow_jump=true"]
    answer = train(tmp_path / "run", small_corpus, small_tokenizer, *gone)
    assert answer.returncode == 0, answer.stderr
    assert "resumed from step_00000002" in answer.stderr + answer.stdout
    assert "weights from" not in answer.stderr + answer.stdout


def test_unsuitable_folders_are_refused_before_ranks_start(
    llama: tuple[Path, Any], small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    folder, _ = llama

    def refused(*overrides: str) -> str:
        arguments = run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *overrides)
        return one_line(z2all("train", "--ranks", "2", *arguments, cwd=tmp_path), 2)

    assert "no such folder" in refused("train.init_from=nowhere")
    line = refused(f"train.init_from={folder}", "model.num_key_value_heads=1")
    assert line.endswith("llama/config.json of train.init_from has 2. Set model.num_key_value_heads=2.")
    assert not (tmp_path / "run").exists()


# Checks before the start


@pytest.fixture
def settle(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def run_with(*overrides: str) -> RunConfig:
        return load_run_config(None, run_arguments(tmp_path / "run", small_corpus, small_tokenizer, *overrides))

    return run_with


def test_vocabulary_rows_are_matched_by_comparing_the_tokenizers(
    llama: tuple[Path, Any], settle: Callable[..., RunConfig], tmp_path: Path
) -> None:
    folder, _ = llama
    size = load_tokenizer(folder).size
    assert size < 1024
    for overrides, taken, how in (
        ([], 1024, "by id"),
        (["model.vocab_size=1088"], 1024, "by id"),
        ([f"model.vocab_size={size}"], size, "by id"),
    ):
        found = first_weights(settle(f"train.init_from={folder}", *overrides), "auto")
        assert found is not None
        assert len(found.rows.rows) - found.rows.num_new == taken and how in found.rows.words()
    without = tmp_path / "without"
    shutil.copytree(folder, without)
    (without / "tokenizer.json").unlink()
    found = first_weights(settle(f"train.init_from={without}"), "never")
    assert found is not None and found.rows.by == "unknown"
    with pytest.raises(ConfigError, match=r"no tokenizer.json to tell which are used"):
        first_weights(settle(f"train.init_from={without}", f"model.vocab_size={size}"), "auto")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    swapped = text.replace('"!": ', '"?!": ', 1)
    assert swapped != text
    (other / "tokenizer.json").write_text(swapped, encoding="utf-8")
    found = first_weights(settle(f"train.init_from={other}"), "auto")
    assert found is not None and found.rows.by == "text"
    assert found.rows.num_new == 1024 - size + 1  # padding rows, and the row of "!"


def test_the_folder_is_checked_only_for_new_runs(settle: Callable[..., RunConfig], tmp_path: Path) -> None:
    run = settle("train.init_from=/nowhere")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000003"
    checkpoint.mkdir(parents=True)
    assert is_new_run(run, "auto")  # that checkpoint is incomplete
    (checkpoint / "MANIFEST.json").write_text("{}")
    assert not is_new_run(run, "auto") and not is_new_run(run, str(checkpoint)) and is_new_run(run, "never")
    assert first_weights(run, "auto") is None
    with pytest.raises(ConfigError, match="no such folder"):
        first_weights(run, "never")
    assert first_weights(settle(), "never") is None
