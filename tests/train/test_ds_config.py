"""From a DeepSpeed JSON to the one that runs: what is filled in, what is refused, and what is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.config import RunConfig, load_run_config
from z2all_ds.errors import ConfigError
from z2all_ds.resources import resource_dir
from z2all_ds.train.ds_config import FILLED_IN, KNOWN_TOP_LEVEL, accumulation_steps, load_ds_json, resolve

SHIPPED = sorted(path.stem for path in resource_dir("ds_configs").glob("*.json"))

BF16_STAGE_1 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def write(folder: Path, content: Any) -> str:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def run_with(ds_json: str, *overrides: str) -> RunConfig:
    return load_run_config(None, [f"deepspeed={ds_json}", "train.global_batch=16", "train.micro_batch=2", *overrides])


def test_the_shipped_jsons_are_these() -> None:
    assert {"zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"} <= set(SHIPPED)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_json_resolves(name: str, device: str) -> None:
    on_disk = load_ds_json(name)
    resolved = resolve(run_with(name), world_size=2, device_type=device)
    assert resolved.stage == int(name[4])
    assert resolved.offload_optimizer == ("offload" in name)
    assert resolved.accumulation == 4
    bf16_asked = on_disk["bf16"]["enabled"]
    assert resolved.dtype == ("bf16" if device == "cuda" and bf16_asked else "fp32")
    assert resolved.config.get("bf16", {}).get("enabled", False) == (resolved.dtype == "bf16")
    assert resolved.config["train_batch_size"] == 16
    assert resolved.config["train_micro_batch_size_per_gpu"] == 2
    assert resolved.config["gradient_accumulation_steps"] == 4
    assert resolved.config["gradient_clipping"] == 1.0
    assert resolved.config["zero_optimization"] == on_disk["zero_optimization"]
    if device == "cpu" and bf16_asked:
        assert resolved.notes == ("precision: fp32, not bf16: this is a CPU (train.precision=bf16 forces bf16)",)
    else:
        assert resolved.notes == ()


@pytest.mark.parametrize(
    ("precision", "device", "dtype"),
    [("fp32", "cuda", "fp32"), ("bf16", "cpu", "bf16"), ("auto", "cpu", "fp32"), ("auto", "cuda", "bf16")],
)
def test_precision(precision: str, device: str, dtype: str) -> None:
    resolved = resolve(run_with("zero2", f"train.precision={precision}"), 1, device)
    assert resolved.dtype == dtype
    assert ("bf16" in resolved.config) == (dtype == "bf16")
    assert bool(resolved.notes) == (precision == "auto" and device == "cpu")  # a choice of ours is said


def test_accumulation_in_bf16_is_fp32() -> None:
    assert resolve(run_with("zero2"), 1, "cuda").config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in resolve(run_with("zero2"), 8, "cuda").config  # one micro-batch: nothing accumulates
    assert "data_types" not in resolve(run_with("zero2"), 1, "cpu").config  # fp32 already


def test_own_accumulation_dtype_is_kept(tmp_path: Path) -> None:
    mine = write(tmp_path, {**BF16_STAGE_1, "data_types": {"grad_accum_dtype": "bf16"}})
    assert resolve(run_with(mine), 1, "cuda").config["data_types"] == {"grad_accum_dtype": "bf16"}


def test_own_bf16_settings_are_kept(tmp_path: Path) -> None:
    mine = write(tmp_path, {**BF16_STAGE_1, "bf16": {"enabled": False, "immediate_grad_update": True}})
    resolved = resolve(run_with(mine, "train.precision=bf16"), 1, "cuda")
    assert resolved.config["bf16"] == {"enabled": True, "immediate_grad_update": True}


def test_fp16_on_a_gpu_as_the_json_says(tmp_path: Path) -> None:
    mine = write(tmp_path, {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    assert resolve(run_with(mine), 8, "cuda").dtype == "fp16"
    assert "fp16" not in resolve(run_with(mine), 8, "cpu").config


@pytest.mark.parametrize(("precision", "device"), [("bf16", "cuda"), ("bf16", "cpu")])
def test_bf16_at_stage_0_is_refused(precision: str, device: str) -> None:
    with pytest.raises(ConfigError, match=r"^bf16 with ZeRO stage 0: .*Use zero1, or precision fp32\.$"):
        resolve(run_with("zero0", f"train.precision={precision}"), 1, device)


def test_without_a_stage_it_is_stage_0(tmp_path: Path) -> None:
    mine = write(tmp_path, {"bf16": {"enabled": True}})
    assert resolve(run_with(mine), 1, "cpu").stage == 0
    with pytest.raises(ConfigError, match="bf16 with ZeRO stage 0"):
        resolve(run_with(mine), 1, "cuda")


def test_clipping_is_always_said() -> None:
    assert resolve(run_with("zero1", "train.gradient_clipping=0"), 1, "cpu").config["gradient_clipping"] == 0


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("bfloat16", "bf16"),
        ("wall_clock_breakdwn", "wall_clock_breakdown"),
    ],
)
def test_typo_names_the_nearest_key(tmp_path: Path, typo: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_ds_json(write(tmp_path, {typo: {}}))
    assert str(caught.value) == (
        f"{typo} in mine.json: DeepSpeed knows no such top-level key and would ignore it. Did you mean {meant}?"
    )


def test_key_like_nothing_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^qqqqqq in mine\.json: .* Remove it\.$"):
        load_ds_json(write(tmp_path, {"qqqqqq": 1}))


@pytest.mark.parametrize("key", FILLED_IN)
def test_what_the_run_config_decides_may_not_stand_in_the_json(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_ds_json(write(tmp_path, {key: 1}))
    assert str(caught.value) == (
        f"{key} in mine.json: the run config decides it ({FILLED_IN[key]}). Remove it from the JSON."
    )
    assert key not in KNOWN_TOP_LEVEL


@pytest.mark.parametrize(
    ("content", "dotted"),
    [
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "zero_optimization.reduce_bucket_size"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "auto"}}},
            "zero_optimization.offload_optimizer.device",
        ),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled"),
        ({"bf16": "auto"}, "bf16"),
    ],
)
def test_auto_is_refused_by_its_place(tmp_path: Path, content: dict[str, Any], dotted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_ds_json(write(tmp_path, content))
    assert str(caught.value) == f'{dotted}="auto" in mine.json: DeepSpeed alone does not know auto. Write the value.'


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", r"not valid JSON"),
        ("[1]", r"must be one JSON object"),
        ({"bf16": True}, r"^bf16=true in mine\.json: must be a JSON object"),
        ({"zero_optimization": 2}, r"^zero_optimization=2 in mine\.json: must be a JSON object"),
        (
            {"zero_optimization": {"stage": "two"}},
            r'^zero_optimization\.stage="two" in mine\.json: must be 0, 1, 2 or 3',
        ),
        ({"zero_optimization": {"stage": 4}}, r"^zero_optimization\.stage=4 in mine\.json"),
    ],
)
def test_malformed_json_is_one_line(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        load_ds_json(write(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_offload_written_as_null_is_none(tmp_path: Path) -> None:
    mine = write(tmp_path, {"zero_optimization": {"stage": 2, "offload_optimizer": None}})
    assert resolve(run_with(mine), 1, "cpu").offload_optimizer is False


def test_unknown_name_lists_the_shipped() -> None:
    with pytest.raises(ConfigError) as caught:
        load_ds_json("zero9")
    for name in SHIPPED:
        assert name in str(caught.value)


def test_resolving_twice_gives_the_same_and_leaves_the_file(tmp_path: Path) -> None:
    mine = write(tmp_path, BF16_STAGE_1)
    before = Path(mine).read_bytes()
    assert resolve(run_with(mine), 1, "cuda") == resolve(run_with(mine), 1, "cuda")
    assert Path(mine).read_bytes() == before


@given(micro_batch=st.integers(1, 8), micro_batches=st.integers(1, 60), world_size=st.integers(1, 70))
def test_batch_triangle(micro_batch: int, micro_batches: int, world_size: int) -> None:
    global_batch = micro_batch * micro_batches
    if micro_batches % world_size == 0:
        assert accumulation_steps(global_batch, micro_batch, world_size) * micro_batch * world_size == global_batch
        return
    with pytest.raises(ConfigError) as caught:
        accumulation_steps(global_batch, micro_batch, world_size)
    message = str(caught.value)
    assert message.startswith(
        f"train.global_batch={global_batch}: must be a multiple of train.micro_batch × ranks"
        f" = {micro_batch} × {world_size}."
    )
    listed = [int(n) for n in message.rpartition("ranks may be ")[2].rstrip(".").split(", ")]
    assert listed == [n for n in range(1, micro_batches + 1) if micro_batches % n == 0]
    for ranks in listed:
        assert accumulation_steps(global_batch, micro_batch, ranks) * micro_batch * ranks == global_batch
