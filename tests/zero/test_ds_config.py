"""Tests of the effective DeepSpeed JSON: values filled in, settings refused, notes reported."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z2all_ds.base.config import RunConfig, anchored, load_run_config
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.resources import resource_dir
from z2all_ds.zero.ds_config import EffectiveDtypes, accumulation_steps, nvme_folder, resolve
from z2all_ds.zero.ds_json import load_ds_json

SHIPPED = sorted(path.stem for path in resource_dir("ds_configs").glob("*.json"))

BF16_STAGE_1 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def write(folder: Path, content: Any) -> str:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def run_with(ds_json: str, *overrides: str) -> RunConfig:
    return load_run_config(None, [f"deepspeed={ds_json}", "train.global_batch=16", "train.micro_batch=2", *overrides])


def test_the_expected_jsons_are_shipped() -> None:
    fit_one_gpu = {"zero0", "zero1", "zero1_fp16", "zero2", "zero3", "zero3_hpz"}
    assert fit_one_gpu | {"zero2_offload", "zero3_offload", "zero3_offload_param", "zero3_nvme"} == set(SHIPPED)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_json_resolves(name: str, device: str) -> None:
    on_disk = load_ds_json(name)
    resolved = resolve(run_with(name), world_size=2, device_type=device)
    assert resolved.stage == int(name[4])
    assert resolved.offload_optimizer == ("offload" in name or "nvme" in name)
    assert resolved.accumulation == 4
    asked = next((dtype for dtype in ("bf16", "fp16") if on_disk.get(dtype, {}).get("enabled")), "fp32")
    assert resolved.dtype == (asked if device == "cuda" else "fp32")
    for dtype in ("bf16", "fp16"):
        assert resolved.config.get(dtype, {}).get("enabled", False) == (resolved.dtype == dtype)
    assert resolved.config["train_batch_size"] == 16
    assert resolved.config["train_micro_batch_size_per_gpu"] == 2
    assert resolved.config["gradient_accumulation_steps"] == 4
    assert resolved.config["gradient_clipping"] == 1.0
    if name == "zero3_nvme":
        resolved.config["zero_optimization"]["offload_optimizer"].pop("nvme_path")
    assert resolved.config["zero_optimization"] == on_disk["zero_optimization"]
    sixteen = resolved.dtype != "fp32"
    assert resolved.config.get("data_types") == ({"grad_accum_dtype": "fp32"} if sixteen else None)
    assert resolved.config.get("communication_data_type") == ("fp32" if sixteen else None)
    assert resolved.dtypes == EffectiveDtypes(resolved.dtype, "fp32", "fp32", "fp32")
    notes = []
    if device == "cpu" and asked != "fp32":
        notes += [f"precision: fp32, not {asked}: this is a CPU (train.precision=bf16 forces bf16)"]
    assert list(resolved.notes) == notes


@pytest.mark.parametrize(
    ("precision", "device", "dtype"),
    [("fp32", "cuda", "fp32"), ("bf16", "cpu", "bf16"), ("auto", "cpu", "fp32"), ("auto", "cuda", "bf16")],
)
def test_precision_depends_on_setting_and_device(precision: str, device: str, dtype: str) -> None:
    resolved = resolve(run_with("zero2", f"train.precision={precision}"), 1, device)
    assert resolved.dtype == dtype
    assert ("bf16" in resolved.config) == (dtype == "bf16")
    assert bool(resolved.notes) == (precision == "auto" and device == "cpu")  # an automatic choice is reported


def test_bf16_gradients_are_accumulated_in_fp32() -> None:
    assert resolve(run_with("zero2"), 1, "cuda").config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in resolve(run_with("zero2"), 8, "cuda").config  # one micro-batch per step, no accumulation
    assert "data_types" not in resolve(run_with("zero2"), 1, "cpu").config  # already fp32


def test_the_accumulation_dtype_of_the_json_is_kept(tmp_path: Path) -> None:
    mine = write(tmp_path, {**BF16_STAGE_1, "data_types": {"grad_accum_dtype": "bf16"}})
    assert resolve(run_with(mine), 1, "cuda").config["data_types"] == {"grad_accum_dtype": "bf16"}


def test_other_bf16_settings_of_the_json_are_kept(tmp_path: Path) -> None:
    mine = write(tmp_path, {**BF16_STAGE_1, "bf16": {"enabled": False, "immediate_grad_update": True}})
    resolved = resolve(run_with(mine, "train.precision=bf16"), 1, "cuda")
    assert resolved.config["bf16"] == {"enabled": True, "immediate_grad_update": True}


def test_fp16_of_the_json_is_used_on_a_gpu_but_not_on_a_cpu(tmp_path: Path) -> None:
    mine = write(tmp_path, {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    assert resolve(run_with(mine), 8, "cuda").dtype == "fp16"
    assert "fp16" not in resolve(run_with(mine), 8, "cpu").config


@pytest.mark.parametrize(("precision", "device"), [("bf16", "cuda"), ("bf16", "cpu")])
def test_bf16_at_stage_0_is_refused(precision: str, device: str) -> None:
    with pytest.raises(ConfigError, match=r"^bf16 with ZeRO stage 0: .*Use zero1, or precision fp32\.$"):
        resolve(run_with("zero0", f"train.precision={precision}"), 1, device)


def test_fp16_at_stage_0_is_refused(tmp_path: Path) -> None:
    """DeepSpeed wraps fp16 at stage 0 in the same optimizer as bf16."""
    with pytest.raises(ConfigError, match=r"^fp16 with ZeRO stage 0: "):
        resolve(run_with(write(tmp_path, {"fp16": {"enabled": True}})), 1, "cuda")


def test_the_default_stage_is_0(tmp_path: Path) -> None:
    mine = write(tmp_path, {"bf16": {"enabled": True}})
    assert resolve(run_with(mine), 1, "cpu").stage == 0
    with pytest.raises(ConfigError, match="bf16 with ZeRO stage 0"):
        resolve(run_with(mine), 1, "cuda")


def test_gradient_clipping_is_always_set() -> None:
    assert resolve(run_with("zero1", "train.gradient_clipping=0"), 1, "cpu").config["gradient_clipping"] == 0


def test_offload_optimizer_null_means_no_offload(tmp_path: Path) -> None:
    mine = write(tmp_path, {"zero_optimization": {"stage": 2, "offload_optimizer": None}})
    assert resolve(run_with(mine), 1, "cpu").offload_optimizer is False


def test_resolving_twice_gives_equal_results_and_does_not_change_the_file(tmp_path: Path) -> None:
    mine = write(tmp_path, BF16_STAGE_1)
    before = Path(mine).read_bytes()
    assert resolve(run_with(mine), 1, "cuda") == resolve(run_with(mine), 1, "cuda")
    assert Path(mine).read_bytes() == before


@given(micro_batch=st.integers(1, 8), micro_batches=st.integers(1, 60), world_size=st.integers(1, 70))
def test_accumulation_steps_fill_the_global_batch_exactly(
    micro_batch: int, micro_batches: int, world_size: int
) -> None:
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


BF16_MASTER = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({}, 2, "compute bf16, accumulation fp32, communication fp32, master weights fp32"),
        ({}, 1, "compute bf16, accumulation fp32, communication none, master weights fp32"),
        # One micro-batch per rank and step: there is no accumulation.
        ({}, 8, "compute bf16, accumulation bf16, communication bf16, master weights fp32"),
        (
            {"communication_data_type": "bf16"},
            2,
            "compute bf16, accumulation fp32, communication bf16, master weights fp32",
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            2,
            "compute bf16, accumulation bf16, communication bf16, master weights fp32",
        ),
        ({"bf16": BF16_MASTER}, 2, "compute bf16, accumulation fp32, communication fp32, master weights bf16"),
        (
            {"fp16": {"enabled": True}, "bf16": {}},
            2,
            "compute fp16, accumulation fp32, communication fp32, master weights fp32",
        ),
        ({"bf16": {}}, 2, "compute fp32, accumulation fp32, communication fp32, master weights fp32"),
    ],
)
def test_effective_dtypes_of_stage_2(tmp_path: Path, changes: dict[str, Any], ranks: int, expected: str) -> None:
    mine = write(tmp_path, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, **changes})
    assert str(resolve(run_with(mine, "optimizer.kind=adamw_bf16"), ranks, "cuda").dtypes) == expected


def test_bf16_at_stage_1_has_fp32_master_weights_and_communication(tmp_path: Path) -> None:
    mine = write(tmp_path, {**BF16_STAGE_1, "bf16": BF16_MASTER})
    resolved = resolve(run_with(mine), 1, "cuda")
    assert resolved.dtypes == EffectiveDtypes("bf16", "fp32", "none", "fp32")
    assert resolved.config["communication_data_type"] == "fp32"  # otherwise fp32 gradients would be rounded needlessly


def test_a_16_bit_accumulation_dtype_is_dropped_in_fp32_runs(tmp_path: Path) -> None:
    mine = write(tmp_path, {**BF16_STAGE_1, "data_types": {"grad_accum_dtype": "bf16", "buffer_dtype": "fp32"}})
    resolved = resolve(run_with(mine), 2, "cpu")
    assert resolved.config["data_types"] == {"buffer_dtype": "fp32"}
    assert resolved.dtypes == EffectiveDtypes("fp32", "fp32", "fp32", "fp32")


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_a_hierarchical_partition_size_must_divide_the_number_of_ranks(ranks: int) -> None:
    run = load_run_config(None, ["deepspeed=zero3_hpz", "train.global_batch=30", "train.micro_batch=2"])
    with pytest.raises(ConfigError) as caught:
        resolve(run, ranks, "cpu")
    assert str(caught.value) == (
        f"zero_hpz_partition_size=2 in zero3_hpz: must divide the number of ranks, {ranks}."
        " Start a multiple of 2 ranks, or use zero3."
    )


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"aio": {"use_gds": True}}, "aio.use_gds"),
    ],
)
def test_keys_that_need_a_gpu_are_refused_on_a_cpu(tmp_path: Path, content: dict[str, Any], key: str) -> None:
    mine = write(tmp_path, content)
    with pytest.raises(ConfigError, match=rf"^{key} in .*: needs a GPU: "):
        resolve(run_with(mine), 1, "cpu")
    assert resolve(run_with(mine), 1, "cuda").stage == content.get("zero_optimization", {}).get("stage", 0)


def nvme_paths(run: RunConfig) -> list[str]:
    zero = resolve(run, 2, "cpu").config["zero_optimization"]
    return [zero[what]["nvme_path"] for what in ("offload_optimizer", "offload_param") if what in zero]


def test_default_and_configured_folders_for_offload_to_disk(tmp_path: Path) -> None:
    """The default is inside the run folder; in `train.nvme_folder` every run has its own subfolder; a path set in the
    JSON is kept."""
    run_dir = f"run_dir={tmp_path}/runs/a"
    assert nvme_paths(run_with("zero3_nvme", run_dir)) == [f"{tmp_path}/runs/a/nvme"]
    fast = [nvme_folder(run_with("zero3_nvme", d, "train.nvme_folder=/fast")) for d in (run_dir, f"{run_dir}/a")]
    assert [folder.parent for folder in fast] == [Path("/fast")] * 2
    assert fast[0].name.startswith("a-") and fast[1].name.startswith("a-") and fast[0] != fast[1]
    assert nvme_paths(run_with("zero3_nvme", run_dir, "train.nvme_folder=/fast")) == [str(fast[0])]
    both = {"device": "nvme", "nvme_path": "/mine"}
    mine = write(tmp_path, {"zero_optimization": {"stage": 3, "offload_optimizer": both, "offload_param": both}})
    assert nvme_paths(run_with(mine, run_dir, "train.nvme_folder=/fast")) == ["/mine"] * 2


def test_a_relative_nvme_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert anchored(run_with("zero3_nvme", "train.nvme_folder=fast")).train.nvme_folder == f"{tmp_path}/fast"
    assert anchored(run_with("zero3_nvme")).train.nvme_folder is None
