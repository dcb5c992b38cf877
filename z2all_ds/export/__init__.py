"""A checkpoint becomes a Hugging Face folder that loads without this package, and is proven to.

`to_hf.export_checkpoint` writes the folder and lets it be seen only after `verify` has found its logits equal to those
of the training weights, in a fresh process; for the Llama format one that cannot import z2all_ds. Nothing here holds
the whole model: `weights` reads, `shards` writes, `layerwise_logits` computes a part at a time. `in_background` starts
exports beside a training run.
"""
