"""Tests of the choice of the optimizer and of refusals, which happen without loading torch."""

import itertools
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.helpers.command import one_line, z2all
from tests.test_import_rules import HEAVY, loaded_by
from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.sections import OptimizerSection
from z2all_ds.base.errors import CheckpointError, ConfigError
from z2all_ds.zero.ds_config import ResolvedDeepSpeed, resolve
from z2all_ds.zero.optimizers import (
    KINDS,
    OptimizerChoice,
    OptimizerSituation,
    build_optimizer,
    choose_optimizer,
)
from z2all_ds.zero.optimizers.registry import ADAMS, KIND_KEY, OptimizerKind, is_installed, require_same_states

ON_CPU = OptimizerSituation("cpu", stage=2, offload=False)
ON_GPU = OptimizerSituation("cuda", stage=2, offload=False)
OFFLOADED = OptimizerSituation("cuda", stage=2, offload=True)
BF16_WEIGHTS = OptimizerSituation("cuda", stage=2, offload=False, bf16_master=True, bf16_states=True)
BF16_JSON = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def section(kind: str, **settings: Any) -> OptimizerSection:
    return OptimizerSection.model_validate({"kind": kind, **settings})


def resolved_with(deepspeed: str, kind: str, device: str = "cpu", *overrides: str) -> ResolvedDeepSpeed:
    return resolve(load_run_config(None, [f"deepspeed={deepspeed}", f"optimizer.kind={kind}", *overrides]), 1, device)


def test_the_config_and_the_registry_know_the_same_kinds() -> None:
    assert set(get_args(OptimizerSection.model_fields["kind"].annotation)) == {"auto", *KINDS}


def test_auto_chooses_adamw_or_the_cpu_adam_for_offloaded_state() -> None:
    assert choose_optimizer(section("auto"), ON_CPU) == OptimizerChoice("adamw", "first choice", 8.0)
    assert choose_optimizer(section("auto"), ON_GPU).kind == "adamw"
    assert choose_optimizer(section("auto"), OFFLOADED) == OptimizerChoice("ds_cpu_adam", "its state is offloaded", 8.0)


def test_a_requested_kind_is_chosen() -> None:
    assert choose_optimizer(section("lion"), ON_CPU) == OptimizerChoice("lion", "requested", 4.0)


@pytest.mark.parametrize(
    ("kind", "situation", "rule"),
    [
        ("ds_fused_adam", ON_CPU, "needs a GPU, the model is on cpu"),
        ("apex_adam", ON_CPU, "needs a GPU, the model is on cpu"),
        ("ds_cpu_adam", ON_GPU, "needs offload_optimizer in the DeepSpeed JSON, as in zero2_offload"),
        ("ds_cpu_adam", ON_CPU, "needs offload_optimizer in the DeepSpeed JSON, as in zero2_offload"),
        *((kind, OFFLOADED, "offloads the state, which only ds_cpu_adam supports") for kind in ("adamw", "adamw_bf16")),
        *((kind, OFFLOADED, "offloads the state, which only ds_cpu_adam supports") for kind in ("lion", "adafactor")),
        ("ds_fused_adam", OFFLOADED, "offloads the state, which only ds_cpu_adam supports"),
        ("adamw_8bit", OFFLOADED, "offloads the state, which only ds_cpu_adam supports"),
    ],
)
def test_refusals_list_the_kinds_that_can_run(kind: str, situation: OptimizerSituation, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_optimizer(section(kind), situation)
    message = str(caught.value)
    assert message.startswith(f"optimizer.kind={kind}: ") and rule in message
    able = message.rpartition("one of ")[2].rstrip(".").split(", ")
    assert kind not in able
    for other in able:
        assert choose_optimizer(section(other), situation).kind == other
    assert ("ds_cpu_adam" in able) == situation.offload


def test_bf16_settings_that_deepspeed_would_refuse_late_are_refused_early() -> None:
    half = OptimizerSituation("cuda", stage=2, offload=False, bf16_master=True)
    with pytest.raises(ConfigError, match=r"need bf16\.bf16_optimizer_states=true in the DeepSpeed JSON"):
        choose_optimizer(section("adamw_bf16"), half)
    both = OptimizerSituation("cuda", stage=2, offload=True, bf16_master=True, bf16_states=True)
    with pytest.raises(ConfigError, match=r"remove bf16\.bf16_optimizer_states from.*Change the DeepSpeed JSON\."):
        choose_optimizer(section("ds_cpu_adam"), both)


def test_the_reason_mentions_lost_bf16_updates() -> None:
    lost = "updates below 1/256 of a bf16 weight are lost, adamw_bf16 keeps them"
    assert choose_optimizer(section("auto"), BF16_WEIGHTS).reason == f"first choice; {lost}"
    assert choose_optimizer(section("adamw_bf16"), BF16_WEIGHTS).reason == "requested"


@pytest.mark.parametrize(
    ("kind", "settings", "situation", "stated"),
    [
        ("adamw", {}, ON_GPU, 8),
        ("adamw", {}, BF16_WEIGHTS, 4),
        ("ds_cpu_adam", {}, OFFLOADED, 8),
        ("adamw_bf16", {}, ON_GPU, 4),
        ("adamw_bf16", {"rounding": "kahan"}, BF16_WEIGHTS, 6),
        ("adamw_bf16", {"rounding": "stochastic"}, BF16_WEIGHTS, 4),
        ("adamw_8bit", {}, ON_GPU, 2.03125),
        ("lion", {}, ON_GPU, 4),
        ("adafactor", {}, ON_GPU, 4),
        ("adafactor", {}, OptimizerSituation("cuda", stage=0, offload=False), 0),
    ],
)
def test_stated_state_bytes_per_parameter(
    kind: str, settings: dict[str, Any], situation: OptimizerSituation, stated: float
) -> None:
    assert KINDS[kind].state_bytes_per_parameter(situation, section(kind, **settings)) == stated


def test_the_description_of_adafactor_mentions_flat_partitions() -> None:
    assert "which cannot be factored" in KINDS["adafactor"].description


def test_libraries_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfthere" / "optim").mkdir(parents=True)
    (tmp_path / "halfthere" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed("halfthere") and not is_installed("halfthere.optim")
    (tmp_path / "halfthere" / "optim" / "__init__.py").touch()
    assert is_installed("halfthere.optim")
    kind = OptimizerKind("mine", "", lambda situation, section: 0.0, libraries=("nowhere", "halfthere.optim"))
    assert kind.why_not(ON_GPU) is None
    kind = OptimizerKind("mine", "", lambda situation, section: 0.0, libraries=("no", "not.here", "bitsandbytes"))
    assert kind.why_not(ON_CPU) == "no and not.here not installed; pip install 'z2all_ds[gpu]'"


def test_a_plan_for_another_machine_does_not_need_the_library() -> None:
    run = load_run_config(None, ["deepspeed=zero2", "optimizer.kind=apex_adam"])
    with pytest.raises(ConfigError, match=r"apex\.optimizers not installed"):
        resolve(run, 1, "cuda")
    assert resolve(run, 1, "cuda", elsewhere=True).optimizer.kind == "apex_adam"


# Effects on the resolved DeepSpeed config


@pytest.mark.parametrize("kind", ["adamw_bf16", "lion", "adafactor"])
def test_optimizers_unknown_to_deepspeed_are_allowed_in_its_config(kind: str) -> None:
    resolved = resolved_with("zero2", kind)
    assert resolved.config["zero_allow_untested_optimizer"] is True
    assert f"zero_allow_untested_optimizer: true: {kind} is unknown to DeepSpeed, but tested here" in resolved.notes
    assert resolved.optimizer.kind == kind
    assert "zero_allow_untested_optimizer" not in resolved_with("zero0", kind).config  # only ZeRO requires it


def test_optimizers_known_to_deepspeed_do_not_change_its_config() -> None:
    assert resolved_with("zero2", "adamw").config == resolved_with("zero2", "auto").config
    assert "zero_allow_untested_optimizer" not in resolved_with("zero2", "auto").config
    assert resolved_with("zero3_offload", "auto").optimizer.kind == "ds_cpu_adam"


def test_bf16_weights_are_read_from_the_json(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    content = {"bf16": BF16_JSON, "zero_optimization": {"stage": 2}}
    mine.write_text(json.dumps(content))
    assert resolved_with(str(mine), "adamw_bf16", "cuda").optimizer.state_bytes_per_parameter == 6
    assert resolved_with(str(mine), "adamw_bf16", "cpu").optimizer.state_bytes_per_parameter == 4  # fp32 on a CPU
    # At stage 1 with fp32 accumulation, DeepSpeed uses an optimizer with fp32 master weights.
    mine.write_text(json.dumps({**content, "zero_optimization": {"stage": 1}}))
    assert resolved_with(str(mine), "adamw_bf16", "cuda").optimizer.state_bytes_per_parameter == 4


def test_an_invalid_combination_is_refused_before_the_run_folder_is_created(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    data = [f"data.corpus={small_corpus}", f"data.tokenizer={small_tokenizer}", f"run_dir={tmp_path}/run"]
    answer = z2all("train", "deepspeed=zero2_offload", "optimizer.kind=lion", *data, cwd=tmp_path)
    line = one_line(answer, ConfigError.exit_code)
    assert "optimizer.kind=lion: the DeepSpeed JSON offloads the state, which only ds_cpu_adam supports." in line
    assert not (tmp_path / "run").exists()


def test_choosing_an_optimizer_does_not_load_torch() -> None:
    code = (
        "from z2all_ds.base.config import load_run_config\nfrom z2all_ds.zero.ds_config import resolve\n"
        "for kind in ('lion', 'adamw_bf16', 'adafactor'):\n"
        "    resolve(load_run_config(None, [f'optimizer.kind={kind}']), 1, 'cuda')\n"
        "from z2all_ds.zero.optimizers import KINDS, OptimizerSituation\n"
        "for kind in KINDS.values(): kind.why_not(OptimizerSituation('cuda', 2, False))"
    )
    assert not loaded_by(code) & HEAVY


# Resuming from the state of another kind of optimizer


def test_all_adams_are_registered_kinds() -> None:
    assert set(KINDS) > ADAMS


def test_only_adams_with_the_same_moments_resume_from_each_other() -> None:
    for saved, here in itertools.product(KINDS, KINDS):
        if saved == here or {saved, here} <= ADAMS:
            require_same_states(saved, here)
            continue
        with pytest.raises(CheckpointError) as caught:
            require_same_states(saved, here)
        assert str(caught.value) == (
            f"the checkpoint's optimizer is {saved}: this run uses {here}, which has an incompatible optimizer state."
            f" Set optimizer.kind={saved}, or export the checkpoint and start a new run."
        )


# Building


@pytest.mark.parametrize("kind", ["adamw", "adamw_bf16", "lion", "adafactor"])
def test_settings_reach_the_optimizer(kind: str) -> None:
    settings = section(kind, lr=0.5, betas=(0.8, 0.9), eps=1e-3)
    weights = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    groups = [{"params": [weights[0]], "weight_decay": 0.25}, {"params": [weights[1]], "weight_decay": 0.0}]
    optimizer = build_optimizer(choose_optimizer(settings, ON_CPU), groups, settings)
    for group, decay in zip(optimizer.param_groups, (0.25, 0.0), strict=True):
        assert (group["lr"], group["weight_decay"], group[KIND_KEY]) == (0.5, decay, kind)
        if "betas" in group:
            assert group["betas"] == (0.8, 0.9)
        if kind.startswith("adamw"):
            assert group["eps"] == 1e-3
    assert KIND_KEY not in groups[0]


def test_the_rounding_setting_reaches_the_optimizer() -> None:
    settings = section("adamw_bf16", rounding="stochastic")
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = build_optimizer(choose_optimizer(settings, ON_CPU), [{"params": [weight]}], settings)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert "compensation" not in optimizer.state[weight]
