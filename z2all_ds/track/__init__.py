"""Records of a run and their displays: board, plots, terminal panel, trackers. Does not need torch.

All displays read the same files (`writer`): metrics.jsonl, events.jsonl and health.jsonl.
"""
