"""Reads documents from raw shards (JSON lines by a line index, Parquet by row groups), on disk or in object stores."""
