"""Creates each kind of optimizer from parameter groups and the `optimizer` section; imports its library on demand."""

from importlib import import_module
from typing import Any

import torch

from z2all_ds.base.config.sections import OptimizerSection
from z2all_ds.zero.optimizers.adamw_bf16 import AdamWBf16
from z2all_ds.zero.optimizers.lion import Lion

Groups = list[dict[str, Any]]


def adam_settings(section: OptimizerSection) -> dict[str, Any]:
    """Return the settings under the names that all Adam variants share; the weight decay is in the groups."""
    return {"lr": section.lr, "betas": section.betas, "eps": section.eps}


def adamw(groups: Groups, section: OptimizerSection) -> Any:
    return torch.optim.AdamW(groups, fused=True, **adam_settings(section))


def ds_fused_adam(groups: Groups, section: OptimizerSection) -> Any:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(groups, adam_w_mode=True, **adam_settings(section))


def ds_cpu_adam(groups: Groups, section: OptimizerSection) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, adamw_mode=True, **adam_settings(section))


def apex_adam(groups: Groups, section: OptimizerSection) -> Any:
    return import_module("apex.optimizers").FusedAdam(groups, adam_w_mode=True, **adam_settings(section))


def adamw_8bit(groups: Groups, section: OptimizerSection) -> Any:
    """Use torchao, which needs no compiled extension, or else bitsandbytes."""
    try:
        base = import_module("torchao.optim").AdamW8bit
    except ImportError:
        return import_module("bitsandbytes").optim.AdamW8bit(groups, **adam_settings(section))

    class AdamW8bitWithSettableRate(base):  # type: ignore[misc, valid-type]
        """Accepts plain numbers as learning rate, as schedules set them; torchao requires a tensor."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                if not isinstance(group["lr"], torch.Tensor):
                    group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
            return super().step(closure)

    return AdamW8bitWithSettableRate(groups, bf16_stochastic_round=True, **adam_settings(section))


def adamw_bf16(groups: Groups, section: OptimizerSection) -> Any:
    return AdamWBf16(groups, rounding=section.rounding, **adam_settings(section))


def lion(groups: Groups, section: OptimizerSection) -> Any:
    return Lion(groups, lr=section.lr, betas=section.betas)


def adafactor(groups: Groups, section: OptimizerSection) -> Any:
    # Its two eps values differ in meaning from Adam's; torch's defaults are used.
    return torch.optim.Adafactor(groups, lr=section.lr)
