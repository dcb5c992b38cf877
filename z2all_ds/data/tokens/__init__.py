"""Token shards: made once from a corpus and read instead of it.

`manifest` defines the format and `reading` opens it. `tokenizing` writes it; `folder` keeps track of finished shards.
"""
