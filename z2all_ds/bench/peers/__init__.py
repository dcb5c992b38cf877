"""Other people's ways, measured like ours: loaders by `z2all bench data`, a trainer by `z2all bench step --peer`.

`hf_datasets` and `mosaic_streaming` are scripts: they run in an environment of their own (`environments`) and know
nothing of this package. `measuring` is what every measured process does alike, ours too. `hf_llama` runs in our own
environment, as it shares torch, transformers, DeepSpeed and Liger with us.
"""
