"""The checkpoint room: what a run needs in order to go on, saved while it trains, complete or not there.

`keeper` is what training talks to. A save is a snapshot in shared memory (`snapshots`, `mapped_file`, `memory`), and a
process beside the rank (`background`, `writer`, `disk_file`) brings it onto the disk; without the memory for that,
ranks write to the disk themselves (`save`). Either way the files are the same: pieces of named parameters (`flats`,
`engine_state`, `state_files`) in a folder that counts from its manifest on (`layout`, `checksums`); `restore` reads
them into an engine of any shape. `retention` and `pruning` delete, `report` looks, `importing` takes over DeepSpeed's.
"""
