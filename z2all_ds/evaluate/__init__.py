"""Evaluation of models, both Hugging Face folders and checkpoints of runs.

`loading` opens them and `scoring` computes losses. `perplexity`, `probe_runs`, `harness` and `generate` implement the
commands.
"""
