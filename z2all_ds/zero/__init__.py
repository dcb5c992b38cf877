"""Everything that depends on DeepSpeed: its JSONs, engine, optimizers, op builds, offload and training state."""
