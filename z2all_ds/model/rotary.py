"""Rotary positions: cos and sin per token, equal to transformers' for every supported type of scaling."""

from functools import cached_property

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.rope_scaling import REQUIRED_FIELDS

COMPUTED_ROPE_TYPES = ("default", *REQUIRED_FIELDS)
"""`longrope` and newer types are refused, not ignored."""


class RotaryTable:
    """cos and sin per position, from frequencies kept in fp32.

    Deliberately not a module: buffers follow `model.to(torch.bfloat16)`, and a model with frequencies rounded to eight
    bits does not match its own fp32 export.

    With `dynamic` scaling the frequencies depend on the longest position so far: they stretch when an input is longer
    than all before it, stay so for inputs of medium length, and return to the original ones for an input shorter than
    the original length. This is transformers' rule, including the dependence on earlier calls; reading the length
    synchronizes with the device once per call. The other types never synchronize.
    """

    def __init__(self, config: LlamaConfig) -> None:
        self.rope_type: str = config.rope_parameters["rope_type"]
        if self.rope_type not in COMPUTED_ROPE_TYPES:
            raise ConfigError(
                f"rope_type={self.rope_type}",
                f"Z2all supports {', '.join(COMPUTED_ROPE_TYPES)}",
                "Load it with transformers' LlamaForCausalLM.",
            )
        self.config = config
        self.original_length: int = config.max_position_embeddings
        self.stretched_to = self.original_length
        self._now: tuple[Tensor, float] | None = None
        """Current frequencies and scaling."""

    @cached_property
    def _original(self) -> tuple[Tensor, float]:
        """Created at first use, not with the model: inside `deepspeed.zero.Init` torch creates every new tensor in the
        model's dtype, and inside `torch.device("meta")` without values."""
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(self.config)
        return rotary.inv_freq.float(), rotary.attention_scaling

    @property
    def inverse_frequencies(self) -> Tensor:
        """The current frequencies."""
        return (self._now or self._original)[0]

    @property
    def length_dependent(self) -> bool:
        """Whether the frequencies change with the length of the input."""
        return self.rope_type == "dynamic"

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, T, E] for positions [B, T]."""
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
            # The length must be a tensor: transformers computes the base from it in fp32, and a Python number would
            # give different last bits.
            stretch = ROPE_INIT_FUNCTIONS[self.rope_type]
            self._now = stretch(self.config, position_ids.device, seq_len=length_tensor)
            self.stretched_to = length
        elif length < self.original_length < self.stretched_to:
            self._now = self._original
            self.stretched_to = self.original_length
