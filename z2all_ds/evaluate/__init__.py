"""Evaluation of models, both Hugging Face folders and checkpoints of runs.

`loading` opens them; `perplexity`, `probes`, `harness` and `generate` implement the commands.
"""
