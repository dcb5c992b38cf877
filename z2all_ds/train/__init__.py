"""The train room: one readable loop around a DeepSpeed engine, with schedules, meters and the loss per domain.

`engine.py` is the only place that calls `deepspeed.initialize`; `pretrain.py` is what each rank runs.
"""
