"""Comparison of the key table with DeepSpeed's models: these tests fail if a version of DeepSpeed has other keys."""

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from z2all_ds.zero.ds_keys import FILLED_IN, KNOWN, NOT_HERE, REMOVED_IN_ZERO, REMOVED_TOP_LEVEL, RENAMED_IN_ZERO


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu() -> Iterator[None]:
    before = os.environ.get("DS_ACCELERATOR")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    yield
    if before is None:
        del os.environ["DS_ACCELERATOR"]


def models() -> dict[str, Any]:
    """Return DeepSpeed's pydantic model of each section, by dotted name."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def our_table(section: str) -> dict[str, Any]:
    table: Any = KNOWN
    for part in section.split("."):
        table = table[part]
    return dict(table)


def our_keys(section: str) -> set[str]:
    return set(our_table(section))


def test_keys_of_sections_with_a_pydantic_model_match_the_model() -> None:
    for section, model in models().items():
        fields = model.model_fields
        assert model.model_config["extra"] == "forbid", section
        theirs = {*fields, *(field.alias for field in fields.values() if field.alias)}
        refused = {key.rpartition(".")[2] for key in NOT_HERE if key.rpartition(".")[0] == section}
        renamed = set(RENAMED_IN_ZERO) if section == "zero_optimization" else set()
        assert refused | renamed <= theirs, section
        assert our_keys(section) == theirs - refused - renamed, section


SAMPLES = {"bool": True, "int": 2, "positive": 2, "number": 0.5, "text": "a", "texts": ["a"]}


def test_deepspeed_accepts_values_of_our_types_and_refuses_others() -> None:
    for section, model in models().items():
        for key, kind in our_table(section).items():
            if isinstance(kind, dict):
                continue
            value = kind[-1] if isinstance(kind, tuple) else SAMPLES[kind]
            names = {field.alias: name for name, field in model.model_fields.items()}
            assert str(getattr(model(**{key: value}), names.get(key, key))) == str(value), f"{section}.{key}"
            if isinstance(kind, tuple) or kind in ("int", "positive", "bool"):
                with pytest.raises(ValidationError):
                    model(**{key: "nonsense"})


def test_keys_of_sections_without_a_model_match_the_constants_of_deepspeed() -> None:
    from deepspeed.profiling import constants as profiler
    from deepspeed.runtime import constants
    from deepspeed.runtime.model_checkpointing.constants import CHECKPOINT_SERIALIZATION, CHECKPOINT_WRITER
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    assert our_keys("aio") == set(AIO_DEFAULT_DICT)
    names = [name for name in vars(profiler) if name.startswith("FLOPS_PROFILER_")]
    keys = {getattr(profiler, name) for name in names if not name.endswith(("_DEFAULT", "_FORMAT"))}
    assert our_keys("flops_profiler") == keys - {"output_file"}
    data_types = {
        constants.GRAD_ACCUM_DTYPE,
        constants.PARAM_DTYPE,
        constants.BUFFER_DTYPE,
        constants.KEEP_IN_FP32_MODULES,
    }
    assert our_keys("data_types") == data_types - {"param_dtype"}
    checkpoint = {
        constants.CHECKPOINT_TAG_VALIDATION,
        constants.LOAD_UNIVERSAL_CHECKPOINT,
        constants.USE_NODE_LOCAL_STORAGE_CHECKPOINT,
        constants.CHECKPOINT_PARALLEL_WRITE,
        CHECKPOINT_SERIALIZATION,
        CHECKPOINT_WRITER,
    }
    assert our_keys("checkpoint") == checkpoint - {"writer", "load_universal"}


def test_lists_of_removed_keys_match_those_of_deepspeed() -> None:
    from deepspeed.runtime import config

    assert set(REMOVED_TOP_LEVEL) == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(REMOVED_IN_ZERO) == set(config._REMOVED_ZERO_CONFIG_KEYS)


def test_every_top_level_key_that_deepspeed_reads_is_in_one_list() -> None:
    """The keys are recorded by a dict that DeepSpeed builds its config from."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class Asked(dict[str, Any]):
        seen: ClassVar[set[str]] = set()

        def __contains__(self, key: object) -> bool:
            self.seen.add(str(key))
            return super().__contains__(key)

        def get(self, key: str, default: Any = None) -> Any:
            self.seen.add(key)
            return super().get(key, default)

        def __copy__(self) -> "Asked":
            return Asked(self)

    DeepSpeedConfig(Asked(train_batch_size=1))
    not_here = {key for key in NOT_HERE if "." not in key}
    lists = [set(KNOWN), set(FILLED_IN), set(REMOVED_TOP_LEVEL), not_here]
    assert sum(map(len, lists)) == len(set().union(*lists)), "a key is in two lists"
    assert Asked.seen - {"bfloat16"} - set().union(*lists) == set()
