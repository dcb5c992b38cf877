"""Documents out of raw shards: JSON lines by an index of their lines, Parquet by row groups, on disk or in a store."""
