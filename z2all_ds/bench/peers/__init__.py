"""Other projects, measured like ours: data loaders for `z2all bench data`, a trainer for `z2all bench step --peer`.

`hf_datasets` and `mosaic_streaming` are scripts that run in an environment of their own (`environments`) and do not
import this package. `measuring` is common to all measured processes, ours included. `hf_llama` runs in our own
environment, as it shares torch, transformers, DeepSpeed and Liger with us.
"""
