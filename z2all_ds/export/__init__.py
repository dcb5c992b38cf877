"""The export room: a checkpoint becomes a Hugging Face folder that loads without this package, and is proven to.

`to_hf.export_checkpoint` writes the folder and lets it be seen only after `verify` has found its logits equal to those
of the training weights, in a process that cannot import z2all_ds.
"""
