"""Other people's data loaders, measured beside ours by `z2all bench data`.

`hf_datasets` and `mosaic_streaming` are scripts: they run in an environment of their own (`environments`) and know
nothing of this package. `measuring` is what every measured process does alike, ours too.
"""
