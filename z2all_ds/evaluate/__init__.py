"""The evaluate room: what a model can do, on Hugging Face folders and on checkpoints of runs alike.

`loading` opens them; `perplexity`, `probes`, `harness` and `generate` are the verbs, each with its parts beside it.
"""
