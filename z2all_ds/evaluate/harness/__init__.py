"""Benchmarks with lm-evaluation-harness, offline, and with reshaped questions that reveal memorized answers.

`run` implements the command, `tasks` loads tasks, `model` adapts a model, `questions` and `variants` reshape
multiple-choice tasks, and `report` compares scores.
"""
