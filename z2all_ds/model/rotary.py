"""Rotary positions: cos and sin per token, equal to transformers' own for every kind of scaling we compute."""

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from z2all_ds.errors import ConfigError
from z2all_ds.rope_scaling import REQUIRED_FIELDS

COMPUTED_ROPE_TYPES = ("default", *REQUIRED_FIELDS)
"""`longrope` and younger ones are refused, not ignored."""


class RotaryTable:
    """cos and sin per position, from frequencies kept in fp32.

    Not a module on purpose: buffers follow `model.to(torch.bfloat16)`, and frequencies rounded to eight bits give a
    model that its own fp32 export does not reproduce.

    With `dynamic` scaling the frequencies depend on the longest position asked for so far: they stretch when an input
    grows beyond all before it, stay so for inputs of middle length, and go back to the original ones for an input
    shorter than the original length. That is transformers' rule, the history of calls included; seeing the length
    costs one wait for the device per call. The other kinds never wait.
    """

    def __init__(self, config: LlamaConfig) -> None:
        self.rope_type: str = config.rope_parameters["rope_type"]
        if self.rope_type not in COMPUTED_ROPE_TYPES:
            raise ConfigError(
                f"rope_type={self.rope_type}",
                f"Z2all computes {', '.join(COMPUTED_ROPE_TYPES)}",
                "Load it with transformers' LlamaForCausalLM.",
            )
        # Built on the CPU even inside `torch.device("meta")`: the frequencies are values, not weights to be loaded.
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
        self.config = config
        self.inverse_frequencies = rotary.inv_freq.float()
        self.original_frequencies = self.inverse_frequencies
        self.scaling: float = rotary.attention_scaling
        self.original_length: int = config.max_position_embeddings
        self.stretched_to = self.original_length

    @property
    def length_dependent(self) -> bool:
        """Whether the frequencies change with the length of the input."""
        return self.rope_type == "dynamic"

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, E] of positions [B, T]."""
        if self.length_dependent:
            self._follow_length(position_ids)
        if self.inverse_frequencies.device != position_ids.device:
            self.inverse_frequencies = self.inverse_frequencies.to(position_ids.device)
        half_BTE = position_ids[..., None].float() * self.inverse_frequencies
        angles_BTE = torch.cat((half_BTE, half_BTE), dim=-1)
        return (angles_BTE.cos() * self.scaling).to(dtype), (angles_BTE.sin() * self.scaling).to(dtype)

    def _follow_length(self, position_ids: Tensor) -> None:
        length_tensor = position_ids.max() + 1
        length = int(length_tensor)
        if length > self.stretched_to:
            # The length goes in as a tensor: transformers computes the base from one in fp32, and from a Python
            # number it would come out different in the last bits.
            stretch = ROPE_INIT_FUNCTIONS[self.rope_type]
            self.inverse_frequencies, self.scaling = stretch(self.config, position_ids.device, seq_len=length_tensor)
            self.stretched_to = length
        elif length < self.original_length < self.stretched_to:
            self.inverse_frequencies = self.original_frequencies
            self.stretched_to = self.original_length
