"""The train room: one readable loop around a DeepSpeed engine, with schedules, meters and the loss per domain.

`pretrain.py` is what each rank runs, `loop.py` its loop, `hooks/` what runs beside it.
"""
