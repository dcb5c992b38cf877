"""Tests of the checks of a DeepSpeed JSON: every refusal is one line with key, rule and fix."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.resources import resource_dir
from z2all_ds.zero import ds_json
from z2all_ds.zero.ds_json import load_ds_json
from z2all_ds.zero.ds_keys import FILLED_IN, NOT_HERE, REMOVED_IN_ZERO, REMOVED_TOP_LEVEL, RENAMED_IN_ZERO

SHIPPED = sorted(path.stem for path in resource_dir("ds_configs").glob("*.json"))


def write(folder: Path, content: Any) -> str:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def refusal(folder: Path, content: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_ds_json(write(folder, content))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def nested(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return dict(value)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_jsons_pass_the_checks(name: str) -> None:
    on_disk = json.loads((resource_dir("ds_configs") / f"{name}.json").read_text(encoding="utf-8"))
    assert load_ds_json(name) == on_disk


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("bfloat16", "bf16"),
        ("wall_clock_breakdwn", "wall_clock_breakdown"),
    ],
)
def test_a_typo_names_the_nearest_top_level_key(tmp_path: Path, typo: str, meant: str) -> None:
    assert refusal(tmp_path, {typo: {}}) == (
        f"{typo} in mine.json: DeepSpeed has no such top-level key and would ignore it. Did you mean {meant}?"
    )


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("zero_optimization.overlap_com", "overlap_comm"),
        ("zero_optimization.stage3_max_live_params", "stage3_max_live_parameters"),
        ("zero_optimization.offload_optimizer.pin_memmory", "pin_memory"),
        ("zero_optimization.offload_param.devise", "device"),
        ("bf16.enable", "enabled"),
        ("fp16.inital_scale_power", "initial_scale_power"),
        ("data_types.grad_acum_dtype", "grad_accum_dtype"),
        ("aio.blocksize", "block_size"),
        ("comms_logger.prof_al", "prof_all"),
        ("flops_profiler.profile_steps", "profile_step"),
        ("timers.throughput.enable", "enabled"),
    ],
)
def test_a_typo_in_a_section_names_the_nearest_key_of_the_section(tmp_path: Path, typo: str, meant: str) -> None:
    section = typo.rpartition(".")[0]
    assert refusal(tmp_path, nested(typo, 1)) == (
        f"{typo} in mine.json: DeepSpeed has no such key in {section}. Did you mean {section}.{meant}?"
    )


def test_an_unknown_key_without_a_similar_one_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, {"qqqqqq": 1}).endswith("would ignore it. Remove it.")
    assert refusal(tmp_path, {"aio": {"qqqqqq": 1}}).endswith("no such key in aio. Remove it.")


@pytest.mark.parametrize("key", FILLED_IN)
def test_keys_that_the_run_config_sets_are_refused(tmp_path: Path, key: str) -> None:
    expected = f"{key} in mine.json: the run config sets it ({FILLED_IN[key]}). Remove it from the JSON."
    assert refusal(tmp_path, {key: 1}) == expected


@pytest.mark.parametrize("key", NOT_HERE)
def test_unsupported_keys_are_refused_with_the_reason(tmp_path: Path, key: str) -> None:
    assert refusal(tmp_path, nested(key, 1)) == f"{key} in mine.json: cannot be used here: {NOT_HERE[key]}. Remove it."


def test_keys_that_deepspeed_removed_or_renamed_are_refused(tmp_path: Path) -> None:
    removed = [*REMOVED_TOP_LEVEL, *(f"zero_optimization.{key}" for key in REMOVED_IN_ZERO)]
    for key in removed:
        assert refusal(tmp_path, nested(key, 1)) == f"{key} in mine.json: DeepSpeed no longer has it. Remove it."
    for key, now in RENAMED_IN_ZERO.items():
        assert refusal(tmp_path, {"zero_optimization": {key: True}}).endswith(f"has renamed it. Use {now}.")


@pytest.mark.parametrize(
    "dotted",
    ["zero_optimization.reduce_bucket_size", "zero_optimization.offload_optimizer.device", "bf16.enabled", "bf16"],
)
def test_the_value_auto_is_refused(tmp_path: Path, dotted: str) -> None:
    assert refusal(tmp_path, nested(dotted, "auto")) == (
        f'{dotted}="auto" in mine.json: DeepSpeed itself does not support auto. Set a value.'
    )


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be one JSON object"),
        ('{"bf16": {"enabled": true}, "bf16": {}}', "bf16 in mine.json: is set twice"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "enabled in mine.json: is set twice"),
        ({"bf16": True}, "bf16=true in mine.json: must be a JSON object"),
        ({"bf16": None}, "bf16=null in mine.json: must be a JSON object"),
        ({"zero_optimization": 2}, "zero_optimization=2 in mine.json: must be a JSON object"),
        (nested("zero_optimization.stage", "two"), 'zero_optimization.stage="two" in mine.json: must be 0, 1, 2 or 3'),
        (nested("zero_optimization.stage", "2"), 'zero_optimization.stage="2" in mine.json: must be 0, 1, 2 or 3'),
        (nested("zero_optimization.stage", True), "zero_optimization.stage=true in mine.json: must be 0, 1, 2 or 3"),
        (nested("zero_optimization.stage", 4), "zero_optimization.stage=4 in mine.json"),
        (nested("bf16.enabled", "true"), 'bf16.enabled="true" in mine.json: must be true or false. Remove the quotes.'),
        (nested("bf16.enabled", 1), "bf16.enabled=1 in mine.json: must be true or false"),
        (nested("aio.block_size", "1e6"), 'aio.block_size="1e6" in mine.json: must be a whole number, 1 or more'),
        (nested("zero_optimization.reduce_bucket_size", 0.5), "must be a whole number, 1 or more"),
        (nested("zero_optimization.sub_group_size", -1), "must be a whole number, 0 or more"),
        (nested("zero_optimization.offload_param.device", "gpu"), "must be none, cpu or nvme"),
        (nested("data_types.grad_accum_dtype", "float"), "must be fp32, fp16 or bf16"),
        (nested("communication_data_type", "int8"), "must be fp32, fp16 or bf16"),
        (nested("comms_logger.prof_ops", "all_reduce"), "must be a list of strings"),
        ('{"fp16": {"loss_scale": Infinity}}', "must be a number, 0 or more"),
    ],
)
def test_malformed_json_is_refused_in_one_line(tmp_path: Path, content: Any, named: str) -> None:
    assert named in refusal(tmp_path, content)


def test_integers_may_have_an_exponent(tmp_path: Path) -> None:
    content = '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": null}}'
    assert load_ds_json(write(tmp_path, content))["zero_optimization"]["reduce_bucket_size"] == 500_000_000


ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 in mine.json: both are enabled"),
        (nested(f"{ZERO}.offload_optimizer.device", "cpu"), "offload_optimizer at stage 0"),
        (
            {ZERO: {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device=nvme at stage 2 in mine.json: only stage 3 writes to a disk",
        ),
        ({ZERO: {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param at stage 2"),
        ({ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio=0.5 at stage 2"),
        ({ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}}, "ratio=1.5"),
        ({ZERO: {"stage": 2, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size=2 at stage 2"),
        (
            {ZERO: {"stage": 2}, "prescale_gradients": True},
            "prescale_gradients or gradient_predivide_factor at stage 2",
        ),
        ({ZERO: {"stage": 3}, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor at stage 3"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op=sum"),
        ({ZERO: {"stage": 1, "allgather_bucket_size": 200000001}}, "allgather_bucket_size=200000001"),
        (nested("bf16.bf16_master_weights_and_grads", True), "bf16.bf16_master_weights_and_grads at stage 0"),
        ({ZERO: {"stage": 1}, "bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states in mine.json"),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
            "data_types.grad_accum_dtype=fp16 with bf16",
        ),
        ({"fp16": {"enabled": True}, "communication_data_type": "bf16"}, "communication_data_type=bf16 with fp16"),
        (
            {ZERO: {"stage": 2}, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            "fp16.fp16_master_weights_and_grads",
        ),
    ],
)
def test_invalid_combinations_are_refused(tmp_path: Path, content: Any, named: str) -> None:
    assert named in refusal(tmp_path, content)


@pytest.mark.parametrize(
    "content",
    [
        {"bf16": {"enabled": True}, "fp16": {"enabled": False}},
        {ZERO: {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        {ZERO: {"stage": 1}, "prescale_gradients": True},
        {ZERO: {"stage": 2, "reduce_scatter": False}, "gradient_predivide_factor": 2},
        {ZERO: {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": None}},
        {"bf16": {"enabled": True}, "communication_data_type": "bf16"},
    ],
)
def test_similar_valid_combinations_are_accepted(tmp_path: Path, content: Any) -> None:
    assert load_ds_json(write(tmp_path, content)) == content


def test_an_unknown_name_lists_the_shipped_jsons() -> None:
    with pytest.raises(ConfigError) as caught:
        load_ds_json("zero9")
    for name in SHIPPED:
        assert name in str(caught.value)


def test_a_json_is_checked_without_importing_torch_or_deepspeed() -> None:
    code = "import sys; from z2all_ds.zero.ds_json import load_ds_json; load_ds_json('zero3_nvme')"
    heavy = "print([name for name in ('torch', 'deepspeed') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "mine.json")
    monkeypatch.setattr(ds_json, "find_named_file", lambda *_: tmp_path / "mine.json")  # replaced since
    with pytest.raises(ConfigError, match=r"cannot be read \(not a regular file"):
        load_ds_json("mine.json")
