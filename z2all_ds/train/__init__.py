"""Training: the loop around a DeepSpeed engine, with schedules, meters and the loss per domain.

`pretrain.py` is the program of each rank, `loop.py` its training loop, `hooks/` the optional features called by it.
"""
