"""Z2all's config: to disk and back, to Llama and from the run config."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.model.pairs import SHAPES, tiny_config
from z2all_ds.config import ModelSection
from z2all_ds.model import Z2allConfig, Z2allForCausalLM


@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip_through_a_folder(shape: str, tmp_path: Path) -> None:
    config = tiny_config(**SHAPES[shape])
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["model_type"] == "z2all"
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is Z2allConfig
    found = again.to_dict()
    assert found.pop("_name_or_path") == str(tmp_path)  # where it was read, the one thing that is new
    assert found == {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def test_auto_model_builds_our_class() -> None:
    assert type(AutoModelForCausalLM.from_config(tiny_config())) is Z2allForCausalLM


@pytest.mark.parametrize("shape", SHAPES)
def test_to_llama_keeps_the_fields_and_drops_our_name(shape: str) -> None:
    config = tiny_config(**SHAPES[shape])
    config.architectures = ["Z2allForCausalLM"]
    llama = config.to_llama()
    assert type(llama) is LlamaConfig
    assert "z2all" not in json.dumps(llama.to_dict()).lower()
    own = ("model_type", "architectures")
    theirs, ours = ({name: value for name, value in c.to_dict().items() if name not in own} for c in (llama, config))
    assert theirs == ours
    assert llama.model_type == "llama"
    assert llama.architectures == ["LlamaForCausalLM"]


def test_read_from_a_llama_folder_it_is_a_z2all_config(tmp_path: Path) -> None:
    tiny_config().to_llama().save_pretrained(tmp_path)
    config = Z2allConfig.from_pretrained(tmp_path)
    assert config.model_type == "z2all"
    assert config.to_dict()["model_type"] == "z2all"
    assert config.hidden_size == 64


def test_from_the_run_config() -> None:
    section = ModelSection(
        vocab_size=128, hidden_size=96, num_attention_heads=6, num_key_value_heads=3, rope_theta=5e5, rms_norm_eps=2e-6
    )
    config = Z2allConfig.from_section(section, bos_token_id=3, eos_token_id=3, pad_token_id=5)
    for name, value in section.model_dump().items():
        if name != "rope_theta":
            assert getattr(config, name) == value, name
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.head_dim == 16
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, 3, 5)
