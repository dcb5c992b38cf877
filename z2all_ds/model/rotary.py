"""Rotary positions: cos and sin per token, equal to transformers' own for every kind of scaling we compute."""

from functools import cached_property

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.rope_scaling import REQUIRED_FIELDS

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
        self.config = config
        self.original_length: int = config.max_position_embeddings
        self.stretched_to = self.original_length
        self._now: tuple[Tensor, float] | None = None
        """Frequencies and scaling in force."""

    @cached_property
    def _original(self) -> tuple[Tensor, float]:
        """Made at the first use, not with the model: inside `deepspeed.zero.Init` torch makes every new tensor in the
        model's dtype, and inside `torch.device("meta")` one without values."""
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(self.config)
        return rotary.inv_freq.float(), rotary.attention_scaling

    @property
    def inverse_frequencies(self) -> Tensor:
        """In force now."""
        return (self._now or self._original)[0]

    @property
    def length_dependent(self) -> bool:
        """Whether the frequencies change with the length of the input."""
        return self.rope_type == "dynamic"

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, E] of positions [B, T]."""
        if self.length_dependent:
            self._follow_length(position_ids)
        frequencies, scaling = self._now or self._original
        if frequencies.device != position_ids.device:
            frequencies = frequencies.to(position_ids.device)
        self._now = frequencies, scaling
        half_BTE = position_ids[..., None].float() * frequencies
        angles_BTE = torch.cat((half_BTE, half_BTE), dim=-1)
        return (angles_BTE.cos() * scaling).to(dtype), (angles_BTE.sin() * scaling).to(dtype)

    def _follow_length(self, position_ids: Tensor) -> None:
        length_tensor = position_ids.max() + 1
        length = int(length_tensor)
        if length > self.stretched_to:
            # The length goes in as a tensor: transformers computes the base from one in fp32, and from a Python
            # number it would come out different in the last bits.
            stretch = ROPE_INIT_FUNCTIONS[self.rope_type]
            self._now = stretch(self.config, position_ids.device, seq_len=length_tensor)
            self.stretched_to = length
        elif length < self.original_length < self.stretched_to:
            self._now = self._original
            self.stretched_to = self.original_length
