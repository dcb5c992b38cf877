"""Dtypes as configs and DeepSpeed's JSONs name them, and what torch calls them."""

import torch

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
