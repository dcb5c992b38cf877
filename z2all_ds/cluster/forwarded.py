"""Settings of the launcher's own environment that processes on the nodes get too."""

from collections.abc import Mapping

FORWARDED = ("NCCL_", "GLOO_", "UCX_", "TORCH_", "WANDB_", "HF_", "OMP_", "MKL_", "PYTHON", "DS_ACCELERATOR", "AWS_")
"""Beginnings of their names."""
NOT_FORWARDED = ("TORCH_EXTENSIONS_DIR", "PYTHONSTARTUP")


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(FORWARDED) and name not in NOT_FORWARDED
    }
