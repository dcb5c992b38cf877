"""The state of an engine: saved to disk or memory, restored under any ZeRO stage, imported from DeepSpeed's own files.

`manager` is the interface for training. `save` writes and restores checkpoints, `snapshots` copies the state to shared
memory, both through `engine_state` and `optimizer_shards`; `import_deepspeed` converts folders that `deepspeed_folders`
reads. Files and folders are in `z2all_ds.checkpoint`.
"""
