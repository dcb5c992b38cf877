"""Dtypes by their names in configs and DeepSpeed JSONs."""

import torch

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
