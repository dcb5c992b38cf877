"""Tests for loading models from folders, runs and checkpoints; broken ones raise one-line errors."""

import json
import logging
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MptConfig,
)
from transformers.utils import logging as transformers_logging

from tests.helpers.checkpoints import checkpoint_of
from z2all_ds.base.errors import CheckpointError, ConfigError, DataError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.retention import remove
from z2all_ds.evaluate.generate import Generator, Sampling
from z2all_ds.evaluate.loading import LoadedModel, load_model
from z2all_ds.evaluate.perplexity_rank import PerplexitySettings, measure_share
from z2all_ds.evaluate.probe_runs import ask_model
from z2all_ds.evaluate.probes import FormatProbe
from z2all_ds.evaluate.texts import open_texts

ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the default is bf16")


def logits(loaded: LoadedModel) -> torch.Tensor:
    ids = torch.arange(40, device=loaded.device).reshape(2, 20)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    with torch.no_grad():
        found: torch.Tensor = loaded.model(ids, attention_mask=mask).logits
    return found[mask.bool()]


def test_a_hugging_face_folder_is_loaded_for_evaluation(loaded: LoadedModel, model_folder: Path) -> None:
    assert not loaded.model.training
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {loaded.device.type}
    assert loaded.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert loaded.tokenizer.decode(loaded.tokenizer("你好")["input_ids"]) == "你好"
    assert (loaded.label, loaded.step, loaded.max_tokens) == (str(model_folder), None, 48)


@ON_A_CPU
def test_a_bf16_folder_is_loaded_in_fp32_on_a_cpu_by_default(
    loaded: LoadedModel, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bf16"
    load_model(model_folder).model.to(torch.bfloat16).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    for asked, wanted in (("auto", torch.float32), ("bf16", torch.bfloat16)):
        assert {parameter.dtype for parameter in load_model(folder, asked).model.parameters()} == {wanted}


@ON_A_CPU
def test_a_run_and_its_export_have_equal_logits(run: RunFolder, exported: Path, small_tokenizer: Path) -> None:
    from_run, from_export = load_model(run.root), load_model(exported)
    assert torch.equal(logits(from_run), logits(from_export))
    assert (from_run.label, from_run.step) == (f"{run.root} step 9", 9)
    assert from_run.max_tokens == from_export.max_tokens
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for config in ("config", "generation_config"):
            values = [getattr(getattr(one.model, config), name) for one in (from_run, from_export)]
            assert values[0] == values[1]
    text = "今天 <|endoftext|> def"
    assert from_run.tokenizer(text)["input_ids"] == from_export.tokenizer(text)["input_ids"]


@ON_A_CPU
def test_one_checkpoint_of_a_run_can_be_loaded(run: RunFolder) -> None:
    earlier, latest = load_model(checkpoint_of(run, 7)), load_model(checkpoint_of(run, 9))
    assert (earlier.step, earlier.label) == (7, f"{run.root} step 7")
    assert torch.equal(logits(latest), logits(load_model(run.root)))
    assert not torch.equal(logits(earlier), logits(latest))
    rounded = load_model(checkpoint_of(run, 9), "bf16")
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.bfloat16}
    assert rounded.model.model.rotary_emb.inv_freq.dtype == torch.float32
    # bf16 has 8 significant bits: logits of a few tenths differ by a few thousandths.
    torch.testing.assert_close(logits(rounded).float(), logits(latest), rtol=0.05, atol=0.01)


def test_a_damaged_checkpoint_is_skipped_or_refused(run: RunFolder, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(run.root, root)
    newest = checkpoint_of(RunFolder(root), 9)
    (newest / "state" / "rank_00001.safetensors").write_bytes(b"junk")
    assert load_model(root).step == 7
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors has 4 bytes"):
        load_model(newest)
    assert remove(newest)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_model(newest)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "nonesuch"}'),
        ("generation_config.json", '{"bos_token_id": "<s>"}'),
        ("model.safetensors", "junk"),
        ("model.safetensors", None),
        ("tokenizer.json", "{"),
    ],
)
def test_a_broken_folder_is_refused(model_folder: Path, tmp_path: Path, name: str, content: str | None) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model_folder, folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert message.startswith(f"model {folder}: does not load (")
    assert message.endswith("Use a complete copy.")
    assert "\n" not in message


def test_missing_or_mismatched_weights_are_refused(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    part = weights.pop(name)
    for shape, words in ((None, "is missing"), ((32, 64), r"has the shape \[32, 64\], not \[64, 32\]")):
        content = weights if shape is None else {**weights, name: part.reshape(shape)}
        save_file(content, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(DataError, match=rf"^model .*: weight {name} {words}\. Use a complete copy\.$"):
            load_model(tmp_path)


def test_unused_weights_are_named_printably(
    model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {name: torch.zeros(2) for name in ("evil\x1b]0;PWNED\x07name", "other")}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    verbosity = transformers_logging.get_verbosity()
    # The handler of transformers writes to the stderr of its first use.
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    transformers_logging.add_handler(handler)
    try:
        load_model(tmp_path)
    finally:
        transformers_logging.remove_handler(handler)
    assert not records and transformers_logging.get_verbosity() == verbosity
    said = r"the weight evil\x1b]0;PWNED\x07name (and 1 more)"
    assert f"warning: model {tmp_path}: its config.json does not use {said}\n" in capfd.readouterr().err
    load_model(tmp_path, quiet=True)
    assert capfd.readouterr().err == ""


def test_tied_weights_are_not_missing(loaded: LoadedModel, tmp_path: Path) -> None:
    config = deepcopy(loaded.model.config)
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(tmp_path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_generation_settings_of_the_folder_are_ignored(loaded: LoadedModel, model_folder: Path, tmp_path: Path) -> None:
    """Only the token ids of generation_config.json are used."""
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    end = loaded.tokenizer.eos_token_id
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.1,
        "min_p": 0.9,
        "typical_p": 0.1,
        "epsilon_cutoff": 0.05,
    }
    settings |= {
        "epsilon_cutoff": 0.05,
        "num_beams": 3,
        "num_return_sequences": 2,
        "no_repeat_ngram_size": 1,
        "min_new_tokens": 12,
    }
    settings |= {"stop_strings": ["a"], "return_dict_in_generate": True, "eos_token_id": [end, 7]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    other = load_model(tmp_path)
    assert other.model.generation_config.eos_token_id == [end, 7]
    other.model.generation_config.eos_token_id = end
    probe = FormatProbe(name="a", prompt="今天", starts_with="x", matches="x")
    for how in (Sampling(max_new_tokens=12), Sampling(max_new_tokens=12, temperature=1.0, seed=3)):
        texts = [[a.text for a in Generator(one, how).answer_all(["今天", "def"])] for one in (loaded, other)]
        assert texts[0] == texts[1]
    answers = [ask_model(one, [probe], 8).answers["a"].details["answer"] for one in (loaded, other)]
    assert answers[0] == answers[1]


def test_the_maximum_length_is_found_under_all_its_config_names(loaded: LoadedModel, tmp_path: Path) -> None:
    sizes = {"vocab_size": 1024, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    for config, longest in (
        (GPT2Config(n_positions=40), 40),
        (MptConfig(max_seq_len=41), 41),
        (BloomConfig(seq_length=42), 42),
        (LlavaConfig(text_config=LlamaConfig(max_position_embeddings=43)), 43),
    ):
        assert replace(loaded, model=SimpleNamespace(config=config)).max_tokens == longest
    bloom = replace(loaded, model=BloomForCausalLM(BloomConfig(**sizes)).to(loaded.device).eval())
    assert bloom.known_max_tokens is None
    with pytest.raises(ConfigError, match=r"config\.json does not state .*\. Add max_position_embeddings to it"):
        list(Generator(bloom, Sampling()).answer_all(["今天"]))
    (tmp_path / "a.txt").write_text("今天天气很好。" * 20, encoding="utf-8")
    domains = open_texts(tmp_path / "a.txt", None)
    answer = measure_share(bloom, domains, PerplexitySettings("", window=16), 0, 1, lambda _: None)
    assert answer.window == 16 and answer.sums["a"].nats > 0


def test_invalid_paths_and_dtypes_are_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not a Hugging Face folder \(no config\.json\), run folder or checkpoint"):
        load_model(tmp_path)
    with pytest.raises(DataError, match=r"no such folder\. Use an export"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"^dtype int3: no such dtype\. Known: auto, fp32, bf16, fp16\.$"):
        load_model(model_folder, "int3")
