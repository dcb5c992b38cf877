"""Files of checkpoints: what a run needs in order to continue, complete or absent.

A save is written by one function (`writer`, `disk_file`), called by the ranks or, from a snapshot in shared memory
(`memory`), by a writer process per rank (`background`). Pieces of named parameters (`state_files`) lie in a folder that
counts when it has a manifest (`layout`). `retention` and `pruning` delete, `report` describes. What knows engines is in
`zero.state`: `manager` is what training calls, `save` and `snapshots` save and restore, `importing` reads DeepSpeed's
own folders.
"""
