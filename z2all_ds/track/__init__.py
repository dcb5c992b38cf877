"""Records of a run, and what is made of them: plots, board, trackers. Runs without torch.

metrics.jsonl, events.jsonl and health.jsonl (`writer`) are the one source of every curve: the board, plots, the
terminal's panel and the sinks (W&B, TensorBoard) read the same records.
"""
