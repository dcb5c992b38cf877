"""Files of checkpoints. A checkpoint on disk is complete or does not count.

`writer` writes a checkpoint, called by the ranks or, from a snapshot in shared memory (`memory`), by a writer process
per rank (`background`). `state_files` holds the pieces of named parameters, `layout` the folders and the manifest,
`disk_file` single files, `snapshot_check` the checksums of snapshots, `fixed_tokens` the loss that proves a checkpoint.
`retention` and `pruning` delete, `report` describes. `zero.state` connects this to engines.
"""
