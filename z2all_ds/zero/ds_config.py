"""Builds the effective DeepSpeed JSON from a DeepSpeed JSON and the run config. Pure; does not import DeepSpeed.

DeepSpeed's keys are set only in the JSON (`ds_json.py` reads and checks it). Settings of the run config are filled in
here: batch sizes, clipping, precision on a CPU, dtypes of gradients, the folder of an offload to disk.
"""

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.paths import expanded
from z2all_ds.zero.ds_json import load_ds_json, offload_device, zero_section
from z2all_ds.zero.optimizers import KINDS, OptimizerChoice, OptimizerSituation, choose_optimizer

OFFLOADS = ("offload_optimizer", "offload_param")
NEEDS_GPU = {
    "zero_quantized_weights": "its kernels require CUDA",
    "zero_quantized_nontrainable_weights": "its kernels require CUDA",
    "zero_quantized_gradients": "its kernels require CUDA",
    "aio.use_gds": "the GPU reads the disk directly",
}
"""Keys (without a dot: keys of zero_optimization) and why they cannot be used on a CPU."""


@dataclass(frozen=True)
class EffectiveDtypes:
    """The dtypes that DeepSpeed 0.19 really uses for the resolved JSON."""

    compute: str
    """Weights, activations and the gradients of one micro-batch."""
    accumulation: str
    """Sums of gradients over micro-batches."""
    communication: str
    """Sums of gradients over ranks; `none` on one rank."""
    master: str
    """Weights that the optimizer updates."""

    def __str__(self) -> str:
        return (
            f"compute {self.compute}, accumulation {self.accumulation}, communication {self.communication},"
            f" master weights {self.master}"
        )


@dataclass(frozen=True)
class ResolvedDeepSpeed:
    """The arguments for `deepspeed.initialize`, and the values derived from them."""

    config: dict[str, Any]
    name: str
    stage: int
    dtype: str
    """Compute dtype: fp32, bf16 or fp16."""
    dtypes: EffectiveDtypes
    accumulation: int
    """Micro-batches per optimizer step per rank."""
    offload_optimizer: bool
    optimizer: OptimizerChoice
    """The selected optimizer and the reason."""
    notes: tuple[str, ...]
    """Log lines: differences from the JSON, with reasons."""


def resolve(run: RunConfig, world_size: int, device_type: str, elsewhere: bool = False) -> ResolvedDeepSpeed:
    """Fill in the settings of the run config and choose the precision for this device. `elsewhere`: plan for another
    machine, so that the libraries installed here do not matter."""
    config = load_ds_json(run.deepspeed)
    notes: list[str] = []
    stage = int(zero_section(config).get("stage") or 0)
    _check_ranks_and_device(config, run.deepspeed, world_size, device_type)
    accumulation = accumulation_steps(run.train.global_batch, run.train.micro_batch, world_size)
    for of_stage in run_stages(run):
        accumulation_steps(of_stage.global_batch, of_stage.micro_batch, world_size)

    asked = next((d for d in ("bf16", "fp16") if config.get(d, {}).get("enabled")), "fp32")
    dtype = asked
    if run.train.precision != "auto":
        dtype = run.train.precision
    elif device_type == "cpu" and asked != "fp32":
        dtype = "fp32"
        notes.append(f"precision: fp32, not {asked}: this is a CPU (train.precision=bf16 forces bf16)")
    if dtype != "fp32" and stage == 0:
        # DeepSpeed's wrapper creates the optimizer states by a real step with zero gradients: before the first step the
        # master weights have decayed once and Adam's bias correction is one step ahead (losses differ by 4e-2 from
        # plain torch, 3e-4 from a reference that does the same). Micro-batches are summed in bf16; fp32 sums raise.
        raise ConfigError(
            f"{dtype} with ZeRO stage 0", "DeepSpeed trains this mix inaccurately", "Use zero1, or precision fp32."
        )
    for name in ("bf16", "fp16"):
        if dtype == name:
            config[name] = {**config.get(name, {}), "enabled": True}
        else:
            config.pop(name, None)
    _fill_in_gradient_dtypes(config, stage, dtype, accumulation, world_size)
    _fill_in_nvme_path(config, run)
    config["train_batch_size"] = run.train.global_batch
    config["train_micro_batch_size_per_gpu"] = run.train.micro_batch
    config["gradient_accumulation_steps"] = accumulation
    # Always set: DeepSpeed's default is 1.0.
    config["gradient_clipping"] = run.train.gradient_clipping
    # DeepSpeed's throughput timer synchronizes the GPU before and after every micro-batch; `train/meters` replaces it.
    config.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    offload = offload_device(config, "offload_optimizer") != "none"
    situation = replace(_optimizer_situation(config, stage, device_type, offload), elsewhere=elsewhere)
    optimizer = choose_optimizer(run.optimizer, situation)
    if stage and not KINDS[optimizer.kind].known_to_deepspeed:
        config["zero_allow_untested_optimizer"] = True
        notes.append(f"zero_allow_untested_optimizer: true: {optimizer.kind} is unknown to DeepSpeed, but tested here")
    return ResolvedDeepSpeed(
        config=config,
        name=run.deepspeed,
        stage=stage,
        dtype=dtype,
        dtypes=_effective_dtypes(config, dtype, world_size, situation.bf16_master),
        accumulation=accumulation,
        offload_optimizer=offload,
        optimizer=optimizer,
        notes=tuple(notes),
    )


def _check_ranks_and_device(config: dict[str, Any], name: str, world_size: int, device_type: str) -> None:
    zero = zero_section(config)
    group = int(zero.get("zero_hpz_partition_size") or 1)
    if world_size % group:
        raise ConfigError(
            f"zero_hpz_partition_size={group} in {name}",
            f"must divide the number of ranks, {world_size}",
            f"Start a multiple of {group} ranks, or use zero3.",
        )
    if device_type == "cpu":
        settings = {**zero, "aio.use_gds": config.get("aio", {}).get("use_gds")}
        for key, reason in NEEDS_GPU.items():
            if settings.get(key):
                raise ConfigError(f"{key} in {name}", f"needs a GPU: {reason}", "Remove it, or run on a GPU.")


def _fill_in_gradient_dtypes(
    config: dict[str, Any], stage: int, dtype: str, accumulation: int, world_size: int
) -> None:
    data_types = config.get("data_types", {})
    if dtype == "fp32":
        # A 16-bit setting of the JSON belongs to 16-bit weights; stage 0 supports only fp32 for everything.
        data_types.pop("grad_accum_dtype", None)
        return
    if accumulation > 1 and not data_types.get("grad_accum_dtype"):
        config["data_types"] = {**data_types, "grad_accum_dtype": "fp32"}
    in_fp32 = config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    if in_fp32 and (world_size > 1 or stage == 1) and not config.get("communication_data_type"):
        # DeepSpeed would round the fp32 sums to 16 bits for communication; at stage 1 even on a single rank
        # (compiled layers have no `gradient_sinks.py`).
        config["communication_data_type"] = "fp32"


def _fill_in_nvme_path(config: dict[str, Any], run: RunConfig) -> None:
    """Set a folder if the JSON has none. One per run: DeepSpeed numbers its files, so those of two runs would clash."""
    for what in OFFLOADS:
        section = zero_section(config).get(what) or {}
        if section.get("device") == "nvme" and not section.get("nvme_path"):
            section["nvme_path"] = str(nvme_folder(run))


def nvme_folder(run: RunConfig) -> Path:
    run_dir = expanded(run.run_dir).absolute()
    if not run.train.nvme_folder:
        return run_dir / "nvme"
    number = sha256(str(run_dir).encode()).hexdigest()[:8]
    return expanded(run.train.nvme_folder).absolute() / f"{run_dir.name}-{number}"


def _effective_dtypes(config: dict[str, Any], dtype: str, world_size: int, bf16_master: bool) -> EffectiveDtypes:
    fp16_master = dtype == "fp16" and config["fp16"].get("fp16_master_weights_and_grads")
    return EffectiveDtypes(
        compute=dtype,
        accumulation=config.get("data_types", {}).get("grad_accum_dtype") or dtype,
        communication="none" if world_size == 1 else config.get("communication_data_type") or dtype,
        master="bf16" if bf16_master else "fp16" if fp16_master else "fp32",
    )


def _optimizer_situation(config: dict[str, Any], stage: int, device_type: str, offload: bool) -> OptimizerSituation:
    bf16 = config.get("bf16", {})
    # At stage 1, DeepSpeed's optimizer for bf16 with fp32 accumulation always keeps fp32 master weights.
    own_master = stage == 1 and not offload and config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    return OptimizerSituation(
        device=device_type,
        stage=stage,
        offload=offload,
        bf16_master=bool(bf16.get("bf16_master_weights_and_grads")) and not own_master,
        bf16_states=bool(bf16.get("bf16_optimizer_states")),
    )


def accumulation_steps(global_batch: int, micro_batch: int, world_size: int) -> int:
    """Return the accumulation in global_batch = micro_batch × accumulation × ranks."""
    if global_batch % (micro_batch * world_size):
        fitting = [n for n in range(1, global_batch // micro_batch + 1) if (global_batch // micro_batch) % n == 0]
        raise ConfigError(
            f"train.global_batch={global_batch}",
            f"must be a multiple of train.micro_batch × ranks = {micro_batch} × {world_size}",
            f"With this micro_batch, ranks may be {', '.join(map(str, fitting))}.",
        )
    return global_batch // (micro_batch * world_size)
