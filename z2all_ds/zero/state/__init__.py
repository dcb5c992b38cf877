"""The state of a DeepSpeed engine: saved, restored at any world size and ZeRO stage, imported from DeepSpeed."""
