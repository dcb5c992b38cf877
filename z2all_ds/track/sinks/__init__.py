"""Child processes, one per sink, that send the records of metrics.jsonl and events.jsonl to W&B and TensorBoard.

Rank 0 (`feed.py`) starts the child processes (`session.py`) and reads their reports without waiting. A session reads
the files (`records.py`) and passes the records to its adapter (`wandb_sink.py`, `tensorboard_sink.py`). A session that
fails, is killed or hangs is restarted from the last delivered record.
"""
