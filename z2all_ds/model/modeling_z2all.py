"""Z2all: the Llama-2 structure with one qkv and one gate_up product per layer and exchangeable ops.

Shapes: B batch, T tokens, D hidden size, H heads, K kv heads, E head size. Fused weights have their own names here;
`stock_keys.py` maps them to Llama's for every file that leaves the package, `hf_conversion.py` for transformers' own
loading and saving.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import ModelOutput

from z2all_ds.errors import ConfigError
from z2all_ds.model.configuration_z2all import Z2allConfig
from z2all_ds.ops import Ops, Situation, resolve_ops
from z2all_ds.ops.cross_entropy import IGNORED_LABEL

CHANGING_ROPE_TYPES = ("dynamic", "longrope")
"""Their frequencies depend on the length of the input."""


class RMSNorm(nn.Module):
    """Holds the weight; the work is the op's."""

    def __init__(self, hidden_size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.ops = ops

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed: Tensor = self.ops.rms_norm(x_BTD, self.weight, self.eps)
        return normed


class RotaryTable:
    """cos and sin per position, from frequencies kept in fp32.

    Not a module on purpose: buffers follow `model.to(torch.bfloat16)`, and frequencies rounded to eight bits give a
    model that its own fp32 export does not reproduce.
    """

    def __init__(self, config: Z2allConfig) -> None:
        # Built on the CPU even inside `torch.device("meta")`: the frequencies are values, not weights to be loaded.
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
        self.inverse_frequencies = rotary.inv_freq.float()
        self.scaling = rotary.attention_scaling

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.inverse_frequencies.device != position_ids.device:
            self.inverse_frequencies = self.inverse_frequencies.to(position_ids.device)
        half_BTE = position_ids[..., None].float() * self.inverse_frequencies
        angles_BTE = torch.cat((half_BTE, half_BTE), dim=-1)
        return (angles_BTE.cos() * self.scaling).to(dtype), (angles_BTE.sin() * self.scaling).to(dtype)


class Attention(nn.Module):
    """Grouped-query attention with one product for q, k and v."""

    def __init__(self, config: Z2allConfig, layer_index: int, ops: Ops) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dropout = config.attention_dropout
        self.ops = ops
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(
        self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        batch, tokens, _ = x_BTD.shape
        heads_BTHE = self.qkv_proj(x_BTD).view(batch, tokens, -1, self.head_dim)
        q, k, v = (
            part.transpose(1, 2)
            for part in heads_BTHE.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        )
        q, k = self.ops.rope(q, k, *rotation)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_index)
        dropout = self.dropout if self.training else 0.0
        mixed_BHTE = self.ops.attention(q, k, v, mask, self.head_dim**-0.5, dropout)
        out: Tensor = self.o_proj(mixed_BHTE.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU with one product for gate and up."""

    def __init__(self, config: Z2allConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x_BTD).chunk(2, dim=-1)
        out: Tensor = self.down_proj(self.ops.swiglu(gate, up))
        return out


class DecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each with its norm before and its residual after."""

    def __init__(self, config: Z2allConfig, layer_index: int, ops: Ops) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_index, ops)
        self.mlp = FeedForward(config, ops)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)

    def forward(
        self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotation, mask, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Z2allPreTrainedModel(PreTrainedModel):
    config_class = Z2allConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - the name and form transformers reads

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)


class Z2allModel(Z2allPreTrainedModel):
    """Embedding, layers, last norm."""

    def __init__(self, config: Z2allConfig, ops: Ops | None = None) -> None:
        super().__init__(config)
        refuse_what_is_not_computed(config)
        # Used straight from `from_pretrained` or in a notebook, nobody has chosen: the references run anywhere.
        ops = ops or resolve_ops(dict.fromkeys(("rope", "rms_norm", "swiglu"), "torch"), _situation(config))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DecoderLayer(config, index, ops) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.rotary = RotaryTable(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_ids: Tensor | None = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast:
        """`document_ids` [B, T] keep attention inside each packed document."""
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache(config=self.config)
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(seen, seen + x_BTD.shape[1], device=x_BTD.device)[None]
        mask = allowed_pairs(x_BTD, seen, attention_mask, document_ids)
        rotation = self.rotary(position_ids.expand(x_BTD.shape[0], -1), x_BTD.dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotation, mask, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x_BTD), past_key_values=past_key_values)


@dataclass
class TokenLosses(ModelOutput):
    """What training needs of a forward pass: the loss of each token, 0 where the label does not count.

    A ModelOutput, which is a dict, because DeepSpeed hangs its hooks on the tensors it finds in tuples and dicts. From
    a plain class it finds none, says nothing, and ZeRO-1 in bf16 then adds each micro-batch's gradient several times.
    """

    losses: Tensor | None = None


class Z2allForCausalLM(Z2allPreTrainedModel, GenerationMixin):
    """Z2all with its output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' form

    def __init__(self, config: Z2allConfig, ops: Ops | None = None) -> None:
        super().__init__(config)
        self.model = Z2allModel(config, ops)
        self.ops = self.model.norm.ops
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def set_rope_theta(self, rope_theta: float) -> None:
        """Other rotary frequencies from here on, as a stage with longer samples wants them; weights stay."""
        if self.config.rope_parameters["rope_theta"] != rope_theta:
            self.config.rope_parameters["rope_theta"] = rope_theta
            self.model.rotary = RotaryTable(self.config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        next_tokens: Tensor | None = None,
        document_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **unused: Any,
    ) -> CausalLMOutputWithPast | TokenLosses:
        """As Llama's, which shifts `labels` itself; with `next_tokens` (labels already aligned) losses per token.

        `num_items_in_batch` comes from transformers' Trainer: the tokens of all micro-batches, to divide the loss by.
        """
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, document_ids
        )
        hidden = outputs.last_hidden_state
        if next_tokens is not None:
            return TokenLosses(self.ops.cross_entropy(self.lm_head(hidden), next_tokens))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        logits = self.lm_head(hidden[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else kept])
        loss = None
        if labels is not None:
            losses = self.ops.cross_entropy(logits[:, :-1], labels[:, 1:])
            counted = (labels[:, 1:] != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
            loss = losses.sum() / counted
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


def refuse_what_is_not_computed(config: Z2allConfig) -> None:
    """Llama configs can ask for more than this file computes; better refused than ignored."""
    other_way = "Load it with transformers' LlamaForCausalLM."
    if config.hidden_act != "silu":
        raise ConfigError(f"hidden_act={config.hidden_act}", "Z2all computes SwiGLU, with silu, only", other_way)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type in CHANGING_ROPE_TYPES:
        raise ConfigError(f"rope_type={rope_type}", "Z2all keeps its frequencies for any length", other_way)


def allowed_pairs(
    x_BTD: Tensor, seen: int, attention_mask: Tensor | None, document_ids: Tensor | None
) -> Tensor | None:
    """Boolean [B, 1, T, seen + T]; None where plain causal attention says the same (no cache, padding or documents)."""
    batch, tokens, _ = x_BTD.shape
    padded = attention_mask is not None and not bool(attention_mask.all())
    if seen == 0 and not padded and document_ids is None:
        return None
    keys = torch.arange(seen + tokens, device=x_BTD.device)
    allowed = (keys[None, :] <= keys[seen:, None])[None, None].expand(batch, 1, tokens, seen + tokens)
    if document_ids is not None:
        assert seen == 0, "packed documents have no cache"
        allowed = allowed & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    if attention_mask is not None and padded:
        # A padded query may see itself, so that its softmax is over something; nobody reads its output.
        itself = keys[None, :] == keys[seen:, None]
        allowed = (allowed & attention_mask[:, None, None, :].bool()) | itself
    return allowed


def _situation(config: Z2allConfig) -> Situation:
    return Situation(device="cpu", dtype="fp32", head_dim=config.head_dim)
