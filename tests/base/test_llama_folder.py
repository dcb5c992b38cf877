"""A Llama folder read without torch: its model settings, its files, and the errors for invalid folders."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from tests.helpers.command import one_line, z2all
from tests.helpers.llama_folders import MICRO_SHAPE, make_llama
from z2all_ds.base.config.sections import ModelSection
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.llama_folder import LlamaFolder
from z2all_ds.base.vocabulary_rows import tokens_in

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_llama(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    make_llama(folder, max_shard_size="60KB", tie_word_embeddings=True, attention_bias=True)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    shutil.copytree(llama, tmp_path / "copy")
    return tmp_path / "copy"


def change_config(folder: Path, **changes: Any) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))


def refusal(look: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        look()
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


def look_at(folder: Path) -> None:
    LlamaFolder(folder).require_tensors()


def refusal_or_none(folder: Path) -> str | None:
    try:
        look_at(folder)
    except ConfigError as error:
        return str(error)
    return None


def test_complete_folders_are_accepted(llama: Path, sharded: Path) -> None:
    assert [refusal_or_none(folder) for folder in (llama, sharded)] == [None, None]
    section = ModelSection(**{**MICRO_SHAPE, "vocab_size": 7, "initializer_range": 1})
    LlamaFolder(llama).require_same_model(section)  # raises if a folder is refused


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {**LLAMA3, "rope_theta": 5e5},
        {"rope_type": "linear", "factor": 2.0},
    ],
)
def test_the_model_section_of_a_folder_matches_the_folder(rope: dict[str, Any], tmp_path: Path) -> None:
    make_llama(tmp_path, rope_parameters={"rope_theta": 1e4, **rope}, tie_word_embeddings=True, rms_norm_eps=1e-6)
    folder = LlamaFolder(tmp_path)
    section = ModelSection(**folder.model_fields)
    folder.require_same_model(section)
    assert (section.rope_theta, section.rms_norm_eps) == (rope.get("rope_theta", 1e4), 1e-6)
    wanted = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    assert section.rope_scaling == wanted and section.tie_word_embeddings


def test_configs_of_transformers_4_are_read(copy: Path) -> None:
    change_config(copy, rope_parameters=None, rope_theta=7e4, rope_scaling={"type": "linear", "factor": 4.0})
    fields = LlamaFolder(copy).model_fields
    assert (fields["rope_theta"], fields["rope_scaling"]) == (7e4, {"rope_type": "linear", "factor": 4.0})
    change_config(copy, rope_scaling=None, num_key_value_heads=None)
    assert LlamaFolder(copy).model_fields["rope_scaling"] is None
    assert LlamaFolder(copy).model_fields["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("hidden_size", 64, "32"),
        ("intermediate_size", 96, "88"),
        ("num_hidden_layers", 3, "2"),
        ("num_attention_heads", 8, "4"),
        ("num_key_value_heads", 4, "2"),
        ("rope_theta", 5e5, "10000.0"),
        ("rms_norm_eps", 1e-6, "1e-05"),
        ("tie_word_embeddings", True, "false"),
        ("attention_bias", True, "false"),
        ("rope_scaling", LLAMA3, "null"),
    ],
)
def test_a_different_model_setting_is_refused_with_the_override_to_use(
    setting: str, value: Any, shown: str, llama: Path
) -> None:
    section = ModelSection(**{**MICRO_SHAPE, setting: value})
    line = refusal(lambda: LlamaFolder(llama).require_same_model(section))
    assert line.startswith(f"model.{setting}={json.dumps(value)}: ")
    assert line.endswith(f"has {shown}. Set model.{setting}={shown}.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, "its model_type is mistral. Only Llama folders"),
        ({"hidden_act": "gelu"}, "its hidden_act is gelu"),
        ({"mlp_bias": True}, "its mlp_bias is True"),
        ({"quantization_config": {"bits": 4}}, "its quantization_config is"),
        ({"head_dim": 16}, "its head_dim is 16"),
        ({"hidden_size": "32"}, "hidden_size='32'"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight should be [32] and is no such tensor"),
        ({"vocab_size": 1025}, "embed_tokens.weight should be [1025, 32] and is F32 of [1024, 32]"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type=longrope"),
    ],
)
def test_unsupported_models_and_wrong_tensor_shapes_are_refused(
    changes: dict[str, Any], words: str, copy: Path
) -> None:
    change_config(copy, **changes)
    line = refusal(lambda: look_at(copy))
    assert words in line and line.startswith("train.init_from=")


def test_missing_and_broken_files_are_refused(copy: Path, sharded: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(lambda: look_at(tmp_path / "nothing"))
    weights = copy / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    assert "model.safetensors is no valid safetensors file" in refusal(lambda: look_at(copy))
    weights.write_bytes(b"\xff" * 100)
    assert "model.safetensors is no valid safetensors file" in refusal(lambda: look_at(copy))
    weights.unlink()
    assert "it has no model.safetensors" in refusal(lambda: look_at(copy))
    (copy / "config.json").write_text("{")
    assert "its config.json cannot be read" in refusal(lambda: look_at(copy))
    (copy / "config.json").unlink()
    assert "it has no config.json" in refusal(lambda: look_at(copy))
    torn = tmp_path / "torn"
    shutil.copytree(sharded, torn)
    first = min(torn.glob("*.safetensors"))
    first.unlink()
    number = len(list(torn.glob("*.safetensors"))) + 1
    assert f"1 of {number} files of its index are missing ({first.name})" in refusal(lambda: look_at(torn))


def test_tokens_equal_the_vocabulary_read_by_transformers(small_tokenizer: Path, copy: Path) -> None:
    assert LlamaFolder(copy).tokens is None
    shutil.copy(small_tokenizer / "tokenizer.json", copy)
    assert LlamaFolder(copy).tokens == AutoTokenizer.from_pretrained(small_tokenizer).get_vocab()
    unigram = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0]]}, "added_tokens": [{"id": 2, "content": "<s>"}]}
    assert tokens_in(unigram) == {"<unk>": 0, "a": 1, "<s>": 2}


def test_config_from_hf_prints_the_model_section(llama: Path, tmp_path: Path) -> None:
    answer = z2all("config", "--from-hf", llama, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    (tmp_path / "run.yaml").write_text(answer.stdout)
    assert yaml.safe_load(answer.stdout)["model"]["intermediate_size"] == 88
    whole = yaml.safe_load(z2all("config", "--config", "run.yaml", "train.sequence_length=64", cwd=tmp_path).stdout)
    LlamaFolder(llama).require_same_model(ModelSection(**whole["model"]))
    assert "--from-hf=" in one_line(z2all("config", "--from-hf", tmp_path, cwd=tmp_path), 2)


def test_checking_a_folder_imports_neither_torch_nor_transformers(llama: Path) -> None:
    code = "import sys; from z2all_ds.base.llama_folder import LlamaFolder; LlamaFolder(sys.argv[1]).require_tensors();"
    code += "sys.exit(bool({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code, str(llama)]).returncode == 0


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"its config\.json cannot be read \(.*not a regular file"):
        LlamaFolder(tmp_path)
