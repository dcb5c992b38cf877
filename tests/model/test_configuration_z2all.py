"""Z2allConfig: saving and loading, conversion to Llama, from the run config, and from and to the original Z2all."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

from tests.model.pairs import SHAPES, tiny_config
from tests.model.test_rotary import ROPES
from z2all_ds.base.accounting import count_parameters
from z2all_ds.base.config.sections import ModelSection
from z2all_ds.base.errors import ConfigError
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.model.configuration_z2all import ORIGINAL_NAMES, OWN_FIELDS, feed_forward_width

OWN = {"dropout1": 0.1, "dropout2": 0.2, "residual_in_fp32": True}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_config_is_saved_and_loaded_unchanged(shape: str, tmp_path: Path) -> None:
    config = tiny_config(**SHAPES[shape], **OWN)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert written["model_type"] == "z2all"
    assert {name: written[name] for name in OWN} == OWN
    assert not ORIGINAL_NAMES.keys() & written.keys()
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is Z2allConfig
    found = again.to_dict()
    assert found.pop("_name_or_path") == str(tmp_path)  # the folder it was read from, the only new field
    assert found == {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def test_auto_model_builds_z2all_for_causal_lm() -> None:
    assert type(AutoModelForCausalLM.from_config(tiny_config())) is Z2allForCausalLM


def test_a_deep_copy_is_equal_and_independent() -> None:
    config = tiny_config(**OWN)
    again = copy.deepcopy(config)
    assert again == config
    again.dropout1, again.rope_theta = 0.5, 5e5
    assert (config.dropout1, config.rope_theta) == (0.1, 10000.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_to_llama_keeps_llamas_fields_and_drops_those_of_z2all(shape: str) -> None:
    config = tiny_config(**SHAPES[shape], **OWN, attention_dropout=0.3)
    config.architectures = ["Z2allForCausalLM"]
    llama = config.to_llama()
    assert type(llama) is LlamaConfig
    assert "z2all" not in json.dumps(llama.to_dict()).lower()
    own = ("model_type", "architectures", *OWN_FIELDS)
    theirs, ours = ({name: value for name, value in c.to_dict().items() if name not in own} for c in (llama, config))
    assert theirs == ours
    assert not OWN_FIELDS.keys() & llama.to_dict().keys()
    assert llama.model_type == "llama"
    assert llama.architectures == ["LlamaForCausalLM"]


def save_as_ours(folder: Path) -> Path:
    tiny_config().save_pretrained(folder)
    return folder


def test_a_llama_folder_is_read_as_a_z2all_config_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_config().to_llama().save_pretrained(tmp_path)
    transformers_logging.enable_propagation()  # otherwise caplog captures nothing
    try:
        with caplog.at_level(logging.WARNING):
            config = Z2allConfig.from_pretrained(tmp_path)
            assert caplog.text == ""
            LlamaConfig.from_pretrained(save_as_ours(tmp_path / "ours"))
            assert "model of type `z2all`" in caplog.text  # the warning that must not appear above
    finally:
        transformers_logging.disable_propagation()
    assert config.model_type == "z2all"
    assert config.to_dict()["model_type"] == "z2all"
    assert config.hidden_size == 64
    assert {name: getattr(config, name) for name in OWN_FIELDS} == OWN_FIELDS


def test_a_config_from_the_run_config_has_its_values() -> None:
    section = ModelSection(
        vocab_size=128,
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        rope_theta=5e5,
        rms_norm_eps=2e-6,
        attention_bias=True,
        attention_dropout=0.3,
        rope_scaling={"rope_type": "dynamic", "factor": 2.0},
        **OWN,
    )
    config = Z2allConfig.from_section(section, bos_token_id=3, eos_token_id=3, pad_token_id=5)
    for name, value in section.model_dump().items():
        if not name.startswith("rope"):
            assert getattr(config, name) == value, name
    assert config.rope_parameters == {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}
    assert config.head_dim == 16
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, 3, 5)
    assert section.rope_scaling == {"rope_type": "dynamic", "factor": 2.0}


@st.composite
def sections(draw: st.DrawFn) -> ModelSection:
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    return ModelSection(
        vocab_size=draw(st.integers(8, 300)),
        hidden_size=heads * 2 * draw(st.integers(1, 8)),
        intermediate_size=draw(st.integers(1, 200)),
        num_hidden_layers=draw(st.integers(1, 5)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attention_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(sections())
def test_the_run_config_counts_the_parameters_of_the_model(section: ModelSection) -> None:
    with torch.device("meta"):
        model = Z2allForCausalLM(Z2allConfig.from_section(section))
    assert count_parameters(section.shape).total == sum(p.numel() for p in model.parameters())


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^pad_token_id=128: the tokenizer has more ids than vocab_size=128\."):
        Z2allConfig.from_section(ModelSection(vocab_size=128), bos_token_id=3, pad_token_id=128)


ORIGIN: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_dim": 48,
    "n_layers": 3,
    "n_heads": 6,
    "n_kv_heads": 2,
    "max_seq_len": 77,
}
IN_LLAMAS_NAMES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 77,
}


def test_original_names_work_as_arguments_and_attributes() -> None:
    config = Z2allConfig(**ORIGIN)
    for name, value in IN_LLAMAS_NAMES.items():
        assert getattr(config, name) == value
        assert config.to_dict()[name] == value
    for name, value in ORIGIN.items():
        assert getattr(config, name) == value
    assert config.head_dim == 8  # from the given sizes, not from Llama's defaults
    assert not ORIGINAL_NAMES.keys() & config.to_dict().keys()
    config.max_seq_len = 99
    assert config.max_position_embeddings == 99
    config.num_hidden_layers = 5
    assert config.n_layers == 5
    assert Z2allConfig(n_heads=16, n_kv_heads=None).num_key_value_heads == 16


def test_two_names_of_one_size_must_agree() -> None:
    assert Z2allConfig(hidden_dim=64, hidden_size=64).hidden_size == 64
    with pytest.raises(ConfigError, match=r"^hidden_dim=64 and hidden_size=32: are two names of one size\."):
        Z2allConfig(hidden_dim=64, hidden_size=32)


@pytest.mark.parametrize("rope", ROPES)
def test_conversion_to_the_original_config_and_back_changes_nothing(rope: str) -> None:
    config = tiny_config(rope_parameters={**ROPES[rope], "rope_theta": 5e5}, pad_token_id=7, attention_bias=True, **OWN)
    origin = config.to_origin()
    assert (origin["hidden_dim"], origin["n_layers"], origin["n_heads"], origin["n_kv_heads"]) == (64, 2, 4, 2)
    assert (origin["max_seq_len"], origin["rope_theta"], origin["dropout1"]) == (64, 5e5, 0.1)
    assert not set(ORIGINAL_NAMES.values()) & origin.keys()
    if rope == "dynamic":
        assert origin["rope_scaling"] == {"type": "dynamic", "factor": 2.0}
    json.dumps(origin)
    assert Z2allConfig.from_origin(origin).to_dict() == config.to_dict()


def test_fields_missing_in_an_original_config_get_its_defaults() -> None:
    config = Z2allConfig.from_origin({"hidden_dim": 2048, "n_heads": 32})
    assert (config.intermediate_size, config.num_hidden_layers, config.vocab_size) == (5632, 32, 64000)
    assert (config.rms_norm_eps, config.residual_in_fp32, config.num_key_value_heads) == (1e-5, True, 32)


def test_a_folder_with_an_original_config_loads(tmp_path: Path) -> None:
    """The original file has its own names, no feed-forward width, and kernel settings, which are dropped."""
    fields = {**ORIGIN, "model_type": "z2all", "intermediate_size": None, "multiple_of": 32, "rope_interleaved": False}
    fields |= {"use_flash": True, "auto_map": {"AutoConfig": "configuration_z2all.Z2allConfig"}, "rope_theta": 5e5}
    fields |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is Z2allConfig
    assert config.intermediate_size == 128
    assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert not {"use_flash", "auto_map", "multiple_of", "rope_interleaved"} & config.to_dict().keys()


@pytest.mark.parametrize(
    ("hidden", "multiple", "width"), [(4096, 256, 11008), (2048, 256, 5632), (48, 1, 128), (3, 8, 8)]
)
def test_feed_forward_width_is_rounded_up_to_the_multiple(hidden: int, multiple: int, width: int) -> None:
    assert feed_forward_width(hidden, multiple) == width


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"head_dim": 32}, "head_dim=32"), ({"mlp_bias": True}, "mlp_bias=True"), ({"hidden_act": "gelu"}, "hidden_act")],
)
def test_features_that_the_original_lacks_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tiny_config(**changes).to_origin()


def test_old_and_new_rope_fields_give_the_same_config() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    old = tiny_config(rope_theta=5e5, rope_scaling=scaling)
    new = tiny_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert old.to_dict() == new.to_dict()
    assert scaling == {"type": "linear", "factor": 2.0}  # the caller's dict is not modified
    assert old.rope_theta == 5e5
    old.rope_theta = 1e6
    assert old.rope_parameters["rope_theta"] == 1e6
    assert tiny_config(rope_scaling=None, rope_theta=7.0).rope_parameters == {"rope_type": "default", "rope_theta": 7.0}


def test_a_dropout_of_none_means_zero() -> None:
    config = tiny_config(attention_dropout=None, dropout1=None)
    assert (config.attention_dropout, config.dropout1) == (0.0, 0.0)


def test_a_llama_folder_with_old_rope_fields_loads(tmp_path: Path) -> None:
    """transformers 4 wrote Llama 3.1 folders with these fields; LlamaConfig reads the same values."""
    scaling = {**ROPES["llama3"]}
    fields = {**IN_LLAMAS_NAMES, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert Z2allConfig.from_pretrained(tmp_path).rope_parameters == {**scaling, "rope_theta": 5e5}
    assert LlamaConfig.from_pretrained(tmp_path).rope_parameters == {**scaling, "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_attention_heads": 7}, "num_attention_heads=7: must divide hidden_size=64. Change one of the two."),
        ({"n_heads": 7, "num_attention_heads": 7}, "num_attention_heads=7: must divide hidden_size=64."),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=4."),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: must be a whole number above 0."),
        ({"hidden_size": 36}, "head_dim=9 (hidden_size=36, num_attention_heads=4): rotary positions rotate pairs"),
        ({"head_dim": 5}, "head_dim=5 (hidden_size=64, num_attention_heads=4): rotary positions rotate pairs"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be a whole number above 0."),
        ({"vocab_size": -5}, "vocab_size=-5: must be a whole number above 0."),
        ({"intermediate_size": 8.5}, "intermediate_size=8.5: must be a whole number above 0."),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2': must be a whole number above 0."),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0: must be a whole number above 0."),
        ({"hidden_size": True}, "hidden_size=True: must be a whole number above 0."),
        ({"dropout1": 1.0}, "dropout1=1.0: must be at least 0 and below 1."),
        ({"dropout2": -0.1}, "dropout2=-0.1: must be at least 0 and below 1."),
        ({"attention_dropout": "x"}, "attention_dropout='x': must be at least 0 and below 1."),
        ({"residual_in_fp32": "yes"}, "residual_in_fp32='yes': must be True or False."),
        ({"pad_token_id": 61}, "pad_token_id=61: is not a row of vocab_size=61."),
        ({"rope_interleaved": True}, "rope_interleaved=True: Z2all rotates halves, as Llama does."),
        ({"rope_theta": 0}, "rope_theta=0: must be a number above 0."),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: linear scaling needs factor."),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "rope_scaling.factor=0.5: must be at least 1."),
        (
            {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2}},
            "head_dim=2: dynamic scaling has no effect with a single pair.",
        ),
    ],
)
def test_invalid_values_are_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config(**changes)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
