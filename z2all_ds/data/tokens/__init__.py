"""Token shards: made once from a corpus, read in its place with the same samples.

`manifest` has the format, `reading` opens it; `tokenizing` drives the making, with `shard_tokenizer` for the work on
one shard and `folder` for what is finished and what is not.
"""
