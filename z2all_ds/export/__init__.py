"""Exports a checkpoint to a Hugging Face folder and verifies it before it becomes visible.

`to_hf.export_checkpoint` writes the folder. `verify` compares its logits with those of the training weights, in a
separate process; for the Llama format that process cannot import z2all_ds. No module holds the whole model in memory:
`weights` reads, `shards` writes and `layerwise_logits` computes one part at a time. `in_background` runs exports during
training.
"""
