"""W&B and TensorBoard, fed from metrics.jsonl and events.jsonl by processes beside training, which they cannot hurt.

Rank 0 (`feed.py`) starts one keeper (`keeper.py`), and the keeper one session (`session.py`) for every sink: a process
that follows the files (`records.py`) and hands their records on (`wandb_sink.py`, `tensorboard_sink.py`). A step costs
training nothing but the line it writes anyway, and those files are the buffer. A session that fails, is killed or does
not answer is ended and started again, from the last record that is surely delivered.
"""
