"""The track room: what is written down about a run, and the pictures made of it. Runs without torch.

metrics.jsonl is the one source of truth of every curve; sinks and plots read the same records.
"""
