"""The keys of a DeepSpeed JSON that this trainer accepts, with the type of each value. Taken from DeepSpeed 0.19.

DeepSpeed forbids unknown keys in most sections (through pydantic, after the ranks have loaded everything), ignores them
at the top level and in data_types, aio, flops_profiler, checkpoint and timers, and reads "true" and "2" as true and 2
in some places and as truthy strings in others. This table needs neither torch nor DeepSpeed;
`tests/zero/test_ds_keys.py` compares it with DeepSpeed's own models.
"""

from typing import Any

Kind = str | tuple[Any, ...] | dict[str, Any]
"""bool, int (not negative; 5e8 is allowed), positive (int), number, text or texts; a tuple of allowed values; or, for a
section, its keys."""

OFFLOAD_DEVICES = ("none", "cpu", "nvme")
DTYPES = ("fp32", "fp16", "bf16")


def _keys(**keys_by_kind: str) -> dict[str, Any]:
    """Return a section from the names of its keys, by kind and separated by blanks."""
    return {key: kind for kind, keys in keys_by_kind.items() for key in keys.split()}


FILLED_IN = {
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.global_batch and train.micro_batch",
    "gradient_clipping": "train.gradient_clipping",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "activation_checkpointing": "train.activation_checkpointing",
    "compile": "train.compile",
    "dataloader_drop_last": "data",
    "data_efficiency": "data and stages",
}
"""DeepSpeed keys that the run config sets, and the name of its setting."""

_REMOVED = (
    "amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula progressive_layer_drop"
    " quantize_training sparse_attention sparse_gradients"
)
REMOVED_TOP_LEVEL = _REMOVED.split()
"""Former keys that DeepSpeed now rejects."""

REMOVED_IN_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")

_PARALLELISM = (
    "tensor_parallel expert_parallel pipeline sequence_parallel_size seq_parallel_communication_data_type"
    " use_data_before_expert_parallelism"
)
_CHECKPOINTS = (
    "zero_optimization.elastic_checkpoint zero_optimization.load_from_fp32_weights"
    " zero_optimization.pipeline_loading_checkpoint checkpoint.load_universal"
)
NOT_HERE = {
    **dict.fromkeys(_PARALLELISM.split(), "this trainer supports only data parallelism and ZeRO"),
    **dict.fromkeys(_CHECKPOINTS.split(), "this trainer has its own checkpoint format"),
    "torch_autocast": "ops are selected for one dtype, set by bf16 and fp16",
    "hybrid_engine": "it is for training that alternates with generation",
    "weight_quantization": "it is for inference",
    "autotuning": "batch sizes come from the run config",
    "datastates_ckpt": "its package is not part of DeepSpeed",
    "managed_gradient_accumulation": "train.global_batch determines the accumulation",
    "vocabulary_size": "model.vocab_size decides it",
    "zero_optimization.zenflow": "its checkpoints cannot be resumed bit for bit",
    "zero_optimization.offload_optimizer.super_offload": "its checkpoints are not tested",
    "zero_optimization.legacy_stage1": "DeepSpeed raises on it",
    "zero_optimization.compute_grad_norm": "clipping and the metrics need the norm",
    "data_types.param_dtype": "bf16.enabled and fp16.enabled decide it",
    "checkpoint.writer": "DeepSpeed's writers lose data or write files that cannot be read",
    "tensorboard": "track.tensorboard writes into the run folder",
    "csv_monitor": "metrics.jsonl in the run folder has the same values",
    "wandb": "track.wandb does the same in a separate process",
    "comet": "metrics.jsonl in the run folder has the same values",
    "flops_profiler.output_file": "the profile goes to the log in the run folder",
}
"""Keys that DeepSpeed supports and this trainer does not, with the reason."""

RENAMED_IN_ZERO = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "pin_memory in offload_optimizer",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}

_STAGE_3 = _keys(
    int="prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters"
    " max_reuse_distance module_granularity_threshold",
    bool="gather_16bit_weights_on_model_save use_all_reduce_for_fetch_params allgather_sequential",
)
"""DeepSpeed accepts these with and without the prefix `stage3_`."""

_ZERO: dict[str, Kind] = {
    "stage": (0, 1, 2, 3),
    "offload_param": {
        "device": OFFLOAD_DEVICES,
        **_keys(text="nvme_path", int="buffer_count buffer_size max_in_cpu", bool="pin_memory"),
    },
    "offload_optimizer": {
        "device": OFFLOAD_DEVICES,
        **_keys(text="nvme_path", int="buffer_count", bool="pin_memory pipeline_read pipeline_write fast_init"),
        **_keys(number="ratio cpuadam_cores_perc"),
    },
    "leaf_module": _keys(texts="classes names name_suffixes"),
    **{f"stage3_{key}": kind for key, kind in _STAGE_3.items()},
    **_STAGE_3,
    **_keys(
        int="allgather_bucket_size sub_group_size",
        positive="reduce_bucket_size zero_hpz_partition_size",
        bool="contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm"
        " ignore_unused_parameters round_robin_gradients parameter_alignment zero_quantized_weights"
        " zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear override_module_apply"
        " log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory",
    ),
}

KNOWN: dict[str, Kind] = {
    "zero_optimization": _ZERO,
    "bf16": _keys(
        bool="enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
    ),
    "fp16": _keys(
        bool="enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
        int="initial_scale_power hysteresis",
        positive="loss_scale_window min_loss_scale",
        number="loss_scale",
    ),
    "data_types": {"grad_accum_dtype": DTYPES, "buffer_dtype": DTYPES, "keep_in_fp32_modules": "texts"},
    "communication_data_type": DTYPES,
    "gradient_allreduce_op": ("mean", "sum"),
    **_keys(
        bool="prescale_gradients disable_allgather zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
        " wall_clock_breakdown memory_breakdown dump_state disable_python_gc",
        positive="steps_per_print",
        number="gradient_predivide_factor",
        text="log_level",
    ),
    "comms_logger": _keys(bool="enabled prof_all verbose debug", texts="prof_ops"),
    "flops_profiler": _keys(
        bool="enabled detailed",
        int="profile_step top_modules",
        number="recompute_fwd_factor module_depth",
    ),
    "aio": _keys(positive="block_size queue_depth intra_op_parallelism", bool="single_submit overlap_events use_gds"),
    "checkpoint": {
        "tag_validation": ("Ignore", "Warn", "Fail"),
        "parallel_write": {"pipeline_stage": "bool"},
        **_keys(bool="use_node_local_storage checkpoint_serialization"),
    },
    "timers": {"throughput": _keys(bool="enabled synchronized")},
}
