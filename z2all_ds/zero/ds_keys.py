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

REMOVED_TOP_LEVEL = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
)
"""Former keys that DeepSpeed now rejects."""

REMOVED_IN_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")

NOT_HERE = {
    "torch_autocast": "ops are selected for one dtype, set by bf16 and fp16",
    "tensor_parallel": "this trainer supports only data parallelism and ZeRO",
    "expert_parallel": "this trainer supports only data parallelism and ZeRO",
    "pipeline": "this trainer supports only data parallelism and ZeRO",
    "sequence_parallel_size": "this trainer supports only data parallelism and ZeRO",
    "seq_parallel_communication_data_type": "this trainer supports only data parallelism and ZeRO",
    "use_data_before_expert_parallelism": "this trainer supports only data parallelism and ZeRO",
    "hybrid_engine": "it is for training that alternates with generation",
    "weight_quantization": "it is for inference",
    "autotuning": "batch sizes come from the run config",
    "datastates_ckpt": "its package is not part of DeepSpeed",
    "managed_gradient_accumulation": "train.global_batch determines the accumulation",
    "vocabulary_size": "model.vocab_size decides it",
    "zero_optimization.zenflow": "its checkpoints cannot be resumed bit for bit",
    "zero_optimization.offload_optimizer.super_offload": "its checkpoints are not tested",
    "zero_optimization.legacy_stage1": "DeepSpeed raises on it",
    "zero_optimization.elastic_checkpoint": "this trainer has its own checkpoint format",
    "zero_optimization.load_from_fp32_weights": "this trainer has its own checkpoint format",
    "zero_optimization.pipeline_loading_checkpoint": "this trainer has its own checkpoint format",
    "zero_optimization.compute_grad_norm": "clipping and the metrics need the norm",
    "data_types.param_dtype": "bf16.enabled and fp16.enabled decide it",
    "checkpoint.writer": "DeepSpeed's writers lose data or write files that cannot be read",
    "checkpoint.load_universal": "this trainer has its own checkpoint format",
}
"""Keys that DeepSpeed supports and this trainer does not, with the reason."""

RENAMED_IN_ZERO = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "pin_memory in offload_optimizer",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}

_OFFLOAD_PARAM = {
    "device": OFFLOAD_DEVICES,
    "nvme_path": "text",
    "buffer_count": "int",
    "buffer_size": "int",
    "max_in_cpu": "int",
    "pin_memory": "bool",
}

_OFFLOAD_OPTIMIZER = {
    "device": OFFLOAD_DEVICES,
    "nvme_path": "text",
    "buffer_count": "int",
    "pin_memory": "bool",
    "pipeline_read": "bool",
    "pipeline_write": "bool",
    "fast_init": "bool",
    "ratio": "number",
    "cpuadam_cores_perc": "number",
}

_STAGE_3 = {
    "prefetch_bucket_size": "int",
    "param_persistence_threshold": "int",
    "model_persistence_threshold": "int",
    "max_live_parameters": "int",
    "max_reuse_distance": "int",
    "gather_16bit_weights_on_model_save": "bool",
    "module_granularity_threshold": "int",
    "use_all_reduce_for_fetch_params": "bool",
    "allgather_sequential": "bool",
}
"""DeepSpeed accepts these with and without the prefix `stage3_`."""

_ZERO: dict[str, Kind] = {
    "stage": (0, 1, 2, 3),
    "contiguous_gradients": "bool",
    "reduce_scatter": "bool",
    "reduce_bucket_size": "positive",
    "use_multi_rank_bucket_allreduce": "bool",
    "allgather_partitions": "bool",
    "allgather_bucket_size": "int",
    "overlap_comm": "bool",
    "offload_param": _OFFLOAD_PARAM,
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "sub_group_size": "int",
    **{f"stage3_{key}": kind for key, kind in _STAGE_3.items()},
    **_STAGE_3,
    "ignore_unused_parameters": "bool",
    "round_robin_gradients": "bool",
    "parameter_alignment": "bool",
    "zero_hpz_partition_size": "positive",
    "zero_quantized_weights": "bool",
    "zero_quantized_nontrainable_weights": "bool",
    "zero_quantized_gradients": "bool",
    "memory_efficient_linear": "bool",
    "override_module_apply": "bool",
    "log_trace_cache_warnings": "bool",
    "enable_sanity_checks": "bool",
    "save_muon_momentum_buffer_in_memory": "bool",
    "leaf_module": {"classes": "texts", "names": "texts", "name_suffixes": "texts"},
}

KNOWN: dict[str, Kind] = {
    "zero_optimization": _ZERO,
    "bf16": {
        "enabled": "bool",
        "immediate_grad_update": "bool",
        "check_grad_overflow": "bool",
        "bf16_master_weights_and_grads": "bool",
        "bf16_optimizer_states": "bool",
    },
    "fp16": {
        "enabled": "bool",
        "auto_cast": "bool",
        "loss_scale": "number",
        "initial_scale_power": "int",
        "loss_scale_window": "positive",
        "hysteresis": "int",
        "consecutive_hysteresis": "bool",
        "min_loss_scale": "positive",
        "fp16_master_weights_and_grads": "bool",
    },
    "data_types": {"grad_accum_dtype": DTYPES, "buffer_dtype": DTYPES, "keep_in_fp32_modules": "texts"},
    "communication_data_type": DTYPES,
    "prescale_gradients": "bool",
    "gradient_predivide_factor": "number",
    "gradient_allreduce_op": ("mean", "sum"),
    "disable_allgather": "bool",
    "zero_allow_untested_optimizer": "bool",
    "zero_force_ds_cpu_optimizer": "bool",
    "steps_per_print": "positive",
    "wall_clock_breakdown": "bool",
    "memory_breakdown": "bool",
    "dump_state": "bool",
    "disable_python_gc": "bool",
    "log_level": "text",
    "comms_logger": {"enabled": "bool", "prof_all": "bool", "prof_ops": "texts", "verbose": "bool", "debug": "bool"},
    "flops_profiler": {
        "enabled": "bool",
        "recompute_fwd_factor": "number",
        "profile_step": "int",
        "module_depth": "number",
        "top_modules": "int",
        "detailed": "bool",
        "output_file": "text",
    },
    "tensorboard": {"enabled": "bool", "output_path": "text", "job_name": "text"},
    "wandb": {"enabled": "bool", "group": "text", "team": "text", "project": "text"},
    "csv_monitor": {"enabled": "bool", "output_path": "text", "job_name": "text"},
    "comet": {
        "enabled": "bool",
        "samples_log_interval": "int",
        "project": "text",
        "workspace": "text",
        "api_key": "text",
        "experiment_name": "text",
        "experiment_key": "text",
        "online": "bool",
        "mode": "text",
    },
    "aio": {
        "block_size": "positive",
        "queue_depth": "positive",
        "intra_op_parallelism": "positive",
        "single_submit": "bool",
        "overlap_events": "bool",
        "use_gds": "bool",
    },
    "checkpoint": {
        "tag_validation": ("Ignore", "Warn", "Fail"),
        "use_node_local_storage": "bool",
        "parallel_write": {"pipeline_stage": "bool"},
        "checkpoint_serialization": "bool",
    },
    "timers": {"throughput": {"enabled": "bool", "synchronized": "bool"}},
}
