"""Check for fp16 on this processor: DeepSpeed refuses it on processors without fp16 instructions."""

from functools import cache

WHY_NOT = "DeepSpeed has no fp16 on this processor"


@cache
def is_known_here() -> bool:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    return bool(CPU_Accelerator().is_fp16_supported())
