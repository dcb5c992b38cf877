"""W&B and TensorBoard get the records of metrics.jsonl and events.jsonl from child processes, one per sink.

Rank 0 (`feed.py`) starts the child processes (`session.py`) and reads their reports without waiting. A session reads
the files (`records.py`) and passes the records to its adapter (`wandb_sink.py`, `tensorboard_sink.py`). A session that
fails, is killed or hangs is started again from the last record that is delivered.
"""
