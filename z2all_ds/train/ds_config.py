"""From a DeepSpeed JSON and the run config to the JSON that runs. Pure; does not import DeepSpeed.

The JSON is the only home of DeepSpeed's keys. What the run config must decide (batch sizes, clipping, precision on a
CPU, dtype of gradient accumulation) is filled in here and may not stand in the JSON too; what DeepSpeed would accept in
silence and ignore (a top-level key with a typo, "auto") is refused with the nearest key.
"""

import difflib
import json
from dataclasses import dataclass
from typing import Any

from z2all_ds.config import RunConfig
from z2all_ds.errors import ConfigError
from z2all_ds.resources import find_named_file
from z2all_ds.train.optimizers import OptimizerChoice, OptimizerSituation, choose_optimizer

FILLED_IN = {
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.global_batch and train.micro_batch",
    "gradient_clipping": "train.gradient_clipping",
    "optimizer": "optimizer",
    "scheduler": "schedule",
}
"""DeepSpeed keys that the run config decides, and its own name for them."""

KNOWN_TOP_LEVEL = {
    "zero_optimization",
    "bf16",
    "fp16",
    "torch_autocast",
    "data_types",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "disable_allgather",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "disable_python_gc",
    "log_level",
    "activation_checkpointing",
    "comms_logger",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "aio",
    "checkpoint",
    "compile",
    "timers",
    "dataloader_drop_last",
    "sparse_attention",
    "data_efficiency",
    "curriculum_learning",
    "managed_gradient_accumulation",
    "tensor_parallel",
    "expert_parallel",
    "hybrid_engine",
}
"""Top-level keys DeepSpeed 0.19 reads; anything else it would accept and ignore."""


@dataclass(frozen=True)
class ResolvedDeepSpeed:
    """What `deepspeed.initialize` gets, and the figures the rest needs of it."""

    config: dict[str, Any]
    name: str
    stage: int
    dtype: str
    """Compute dtype: fp32, bf16 or fp16."""
    accumulation: int
    """Micro-batches per optimizer step and rank."""
    offload_optimizer: bool
    optimizer: OptimizerChoice
    """Which one steps, and why."""
    notes: tuple[str, ...]
    """Lines for the person watching: what was changed against the JSON, and why."""


def load_ds_json(name_or_path: str) -> dict[str, Any]:
    """The JSON as it lies on disk, its top level checked."""
    path = find_named_file(name_or_path, "DeepSpeed JSON", "ds_configs", ".json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"DeepSpeed JSON {path}", f"not valid JSON ({error})", "Correct the file.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"DeepSpeed JSON {path}", "must be one JSON object", "See ds_configs/zero2.json.")
    for key in content:
        if key in FILLED_IN:
            raise ConfigError(
                f"{key} in {path.name}", f"the run config decides it ({FILLED_IN[key]})", "Remove it from the JSON."
            )
        if key not in KNOWN_TOP_LEVEL:
            near = difflib.get_close_matches(key, KNOWN_TOP_LEVEL, n=1)
            raise ConfigError(
                f"{key} in {path.name}",
                "DeepSpeed knows no such top-level key and would ignore it",
                f"Did you mean {near[0]}?" if near else "Remove it.",
            )
    _refuse_auto(content, path.name, "")
    for key in ("zero_optimization", "bf16", "fp16", "data_types"):
        if not isinstance(content.get(key, {}), dict):
            raise ConfigError(
                f"{key}={json.dumps(content[key])} in {path.name}",
                "must be a JSON object",
                'For example "bf16": {"enabled": true}.',
            )
    stage = content.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"zero_optimization.stage={json.dumps(stage)} in {path.name}", "must be 0, 1, 2 or 3", "Write the number."
        )
    return content


def resolve(run: RunConfig, world_size: int, device_type: str) -> ResolvedDeepSpeed:
    """Fills in what the run config decides and settles the precision for this device."""
    config = load_ds_json(run.deepspeed)
    notes: list[str] = []
    stage = int(config.get("zero_optimization", {}).get("stage", 0))
    accumulation = accumulation_steps(run.train.global_batch, run.train.micro_batch, world_size)

    asked = next((d for d in ("bf16", "fp16") if config.get(d, {}).get("enabled")), "fp32")
    dtype = asked
    if run.train.precision != "auto":
        dtype = run.train.precision
    elif device_type == "cpu" and asked != "fp32":
        dtype = "fp32"
        notes.append(f"precision: fp32, not {asked}: this is a CPU (train.precision=bf16 forces bf16)")
    if dtype == "bf16" and stage == 0:
        # Measured: losses 8.6e-3 off every other stage, and fp32 accumulation raises.
        raise ConfigError(
            "bf16 with ZeRO stage 0", "DeepSpeed trains this mix inaccurately", "Use zero1, or precision fp32."
        )
    for name in ("bf16", "fp16"):
        if dtype == name:
            config[name] = {**config.get(name, {}), "enabled": True}
        else:
            config.pop(name, None)
    if dtype != "fp32" and accumulation > 1:
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")

    config["train_batch_size"] = run.train.global_batch
    config["train_micro_batch_size_per_gpu"] = run.train.micro_batch
    config["gradient_accumulation_steps"] = accumulation
    # DeepSpeed clips at 1.0 unless told; said explicitly, always.
    config["gradient_clipping"] = run.train.gradient_clipping
    # DeepSpeed's own speedometer waits for the GPU before and after every micro-batch; `meters.py` has another.
    config.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    offload = (config.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device", "none") != "none"
    optimizer = choose_optimizer(run.optimizer, _optimizer_situation(config, stage, device_type, offload))
    if stage and not optimizer.known_to_deepspeed:
        config["zero_allow_untested_optimizer"] = True
        notes.append(f"zero_allow_untested_optimizer: true: DeepSpeed does not know {optimizer.kind}, our tests do")
    return ResolvedDeepSpeed(config, run.deepspeed, stage, dtype, accumulation, offload, optimizer, tuple(notes))


def _optimizer_situation(config: dict[str, Any], stage: int, device_type: str, offload: bool) -> OptimizerSituation:
    bf16 = config.get("bf16", {})
    # DeepSpeed's own optimizer for bf16 with fp32 accumulation at stage 1 keeps an fp32 master whatever bf16 says.
    own_master = stage == 1 and not offload and config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    return OptimizerSituation(
        device=device_type,
        stage=stage,
        offload=offload,
        bf16_master=bool(bf16.get("bf16_master_weights_and_grads")) and not own_master,
        bf16_states=bool(bf16.get("bf16_optimizer_states")),
    )


def accumulation_steps(global_batch: int, micro_batch: int, world_size: int) -> int:
    """The third side of global_batch = micro_batch × accumulation × ranks."""
    if global_batch % (micro_batch * world_size):
        fitting = [n for n in range(1, global_batch // micro_batch + 1) if (global_batch // micro_batch) % n == 0]
        raise ConfigError(
            f"train.global_batch={global_batch}",
            f"must be a multiple of train.micro_batch × ranks = {micro_batch} × {world_size}",
            f"With this micro_batch, ranks may be {', '.join(map(str, fitting))}.",
        )
    return global_batch // (micro_batch * world_size)


def _refuse_auto(node: Any, file: str, dotted: str) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            _refuse_auto(value, file, f"{dotted}.{key}".lstrip("."))
    elif node == "auto":
        raise ConfigError(f'{dotted}="auto" in {file}', "DeepSpeed alone does not know auto", "Write the value.")
