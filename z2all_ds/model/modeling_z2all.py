"""Z2all: the Llama-2 structure with one qkv and one gate_up product per layer and exchangeable ops.

Fused weights have their own names here; `stock_keys.py` maps them to Llama's names for every file this package writes,
`hf_conversion.py` for transformers' own loading and saving. The layers are in `modules.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import ModelOutput

from z2all_ds.base.errors import ConfigError
from z2all_ds.model.configuration_z2all import Z2allConfig
from z2all_ds.model.modules import DecoderLayer, Embedding, Head, RMSNorm
from z2all_ds.model.rotary import RotaryTable
from z2all_ds.ops import Ops, Situation, resolve_ops
from z2all_ds.ops.cross_entropy import IGNORED_LABEL, refuse_unknown_labels
from z2all_ds.ops.visibility import Visible

IGNORED_INPUTS = frozenset({"return_dict", "cache_position", "domain_ids"})
"""Inputs that change nothing here: two that transformers passes, and a column of the stream's batches."""


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
    """Embedding, layers and final norm."""

    def __init__(self, config: Z2allConfig, ops: Ops | None = None) -> None:
        super().__init__(config)
        refuse_what_is_not_computed(config)
        # Without a choice, as in `from_pretrained` or a notebook, use the references, which run anywhere.
        ops = ops or resolve_ops(dict.fromkeys(("rope", "rms_norm", "swiglu"), "torch"), _situation(config))
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
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
        cu_seqlens: Tensor | None = None,
        max_document: int = 0,
        **other: Any,
    ) -> BaseModelOutputWithPast:
        """`document_ids` [B, T] or `cu_seqlens` restrict attention to each packed document (`ops/visibility.py`)."""
        refuse_unknown_inputs(other)
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch, tokens, _ = x_BTD.shape
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache(config=self.config)
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        self._refuse_too_long(seen + tokens)
        if position_ids is None:
            position_ids = torch.arange(seen, seen + tokens, device=x_BTD.device)[None]
        padding = attention_mask.bool() if attention_mask is not None and not bool(attention_mask.all()) else None
        visible = Visible(batch, tokens, x_BTD.device, seen, document_ids, padding, cu_seqlens, max_document)
        rotation = self.rotary(position_ids.expand(batch, -1), x_BTD.dtype)
        stream_BTD: Tensor | None = None
        if self.config.residual_in_fp32:
            x_BTD = x_BTD.float()
        for layer in self.layers:
            x_BTD, stream_BTD = layer(x_BTD, stream_BTD, rotation, visible, past_key_values)
        hidden_BTD, _ = self.norm(x_BTD, stream_BTD)
        return BaseModelOutputWithPast(last_hidden_state=hidden_BTD, past_key_values=past_key_values)

    def _refuse_too_long(self, tokens: int) -> None:
        longest = self.config.max_position_embeddings
        if tokens > longest and not self.rotary.length_dependent:
            raise ConfigError(
                f"a sequence of {tokens} tokens",
                f"the model supports at most max_seq_len={longest}",
                "Shorten it, or set rope_scaling and a larger max_seq_len in the config.",
            )


@dataclass
class TokenLosses(ModelOutput):
    """The results of a forward pass that training needs.

    A ModelOutput, which is a dict, because DeepSpeed attaches its hooks to the tensors it finds in tuples and dicts. In
    a plain class it silently finds none, and ZeRO-1 in bf16 then adds each micro-batch's gradient several times.
    """

    loss: Tensor | None = None
    """Sum of the losses divided by the number of positions (including ignored ones: a constant)."""
    losses: Tensor | None = None
    """Loss of each token, without a gradient; 0 for ignored labels."""


class Z2allForCausalLM(Z2allPreTrainedModel, GenerationMixin):
    """Z2all with its output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' form

    def __init__(self, config: Z2allConfig, ops: Ops | None = None) -> None:
        super().__init__(config)
        self.model = Z2allModel(config, ops)
        self.ops = self.model.norm.ops
        self.lm_head = Head(config.hidden_size, config.vocab_size, self.ops)
        self.post_init()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Convert a plain Linear, which transformers creates when resizing a vocabulary, to a Head."""
        if isinstance(new_embeddings, nn.Linear) and not isinstance(new_embeddings, Head):
            with torch.device("meta"):
                head = Head(new_embeddings.in_features, new_embeddings.out_features, self.ops)
            head.weight = new_embeddings.weight
            new_embeddings = head
        assert isinstance(new_embeddings, Head)
        self.lm_head = new_embeddings

    def set_rope_theta(self, rope_theta: float) -> None:
        """Change the rotary frequencies, e.g. for a stage with longer samples; weights do not change."""
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
        cu_seqlens: Tensor | None = None,
        max_document: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        **other: Any,
    ) -> CausalLMOutputWithPast | TokenLosses:
        """As Llama's forward, which shifts `labels` itself and returns logits; with `next_tokens` (the target of each
        position, as in the stream's batches), return only losses, computed by the op that does not keep the logits.

        `num_items_in_batch` is set by transformers' Trainer: the tokens of all micro-batches, to divide the loss by.
        Without it, the sum for `labels` is divided by the number of labels, that for `next_tokens` by the number of
        positions, -100 included: a constant, which training needs. Their mean is that of `losses` where they count.
        """
        refuse_unknown_inputs(other)
        if labels is not None and next_tokens is not None:
            raise TypeError(
                "labels and next_tokens are both given; labels are shifted by the model, next_tokens are not"
            )
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            document_ids,
            cu_seqlens,
            max_document,
        )
        hidden = outputs.last_hidden_state
        if next_tokens is not None:
            total, losses = self.lm_head(hidden, next_tokens)
            divisor = next_tokens.numel() if num_items_in_batch is None else num_items_in_batch
            return TokenLosses(loss=total / divisor, losses=losses)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        logits = self.lm_head(hidden[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else kept])
        loss = None
        if labels is not None:
            loss = shifted_loss(logits, labels, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


def shifted_loss(logits_BTV: Tensor, labels_BT: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Return the mean loss of each label under the logits one position before it, as transformers computes it."""
    targets = labels_BT[:, 1:].flatten()
    refuse_unknown_labels(targets, logits_BTV.shape[-1])
    wide = logits_BTV[:, :-1].flatten(0, 1).to(torch.promote_types(logits_BTV.dtype, torch.float32))
    total = functional.cross_entropy(wide, targets, ignore_index=IGNORED_LABEL, reduction="sum")
    return total / ((targets != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch)


def refuse_unknown_inputs(inputs: Mapping[str, Any]) -> None:
    """Refuse inputs that would be ignored silently."""
    given = {name for name, value in inputs.items() if value is not None and value is not False}
    if unknown := sorted(given - IGNORED_INPUTS):
        raise TypeError(f"Z2all's forward does not use {', '.join(unknown)}; remove it from the batch")


def refuse_what_is_not_computed(config: Z2allConfig) -> None:
    """Refuse features of Llama configs that this module does not implement, instead of ignoring them."""
    if config.hidden_act != "silu":
        raise ConfigError(
            f"hidden_act={config.hidden_act}",
            "Z2all supports only SwiGLU, with silu",
            "Load it with transformers' LlamaForCausalLM.",
        )


def _situation(config: Z2allConfig) -> Situation:
    return Situation(device="cpu", dtype="fp32", head_dim=config.head_dim)
