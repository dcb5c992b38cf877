"""Everything that knows DeepSpeed: its JSONs, the engine, optimizers, op builds, offload, the state it trains."""
