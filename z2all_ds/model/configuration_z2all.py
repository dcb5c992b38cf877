"""Z2all's Hugging Face config: Llama's fields under its own model type, and the way back to a plain Llama config."""

from typing import Any

from transformers import LlamaConfig

from z2all_ds.config import ModelSection


class Z2allConfig(LlamaConfig):
    """A Llama config with model_type z2all. Same fields, so that an export is only a change of name."""

    model_type = "z2all"

    def __post_init__(self, **kwargs: Any) -> None:
        # Read from a Llama folder, the fields carry its model type; kept, transformers would take this for a Llama.
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)

    @classmethod
    def from_section(cls, section: ModelSection, **token_ids: int) -> "Z2allConfig":
        """From the run config's model section; `token_ids` are bos/eos/pad_token_id of the tokenizer."""
        fields: dict[str, Any] = section.model_dump()
        rope_theta = fields.pop("rope_theta")
        return cls(**fields, rope_parameters={"rope_type": "default", "rope_theta": rope_theta}, **token_ids)

    def to_llama(self) -> LlamaConfig:
        """The stock config of the same model, which loads without this package."""
        fields = self.to_dict()
        for own in ("model_type", "architectures", "transformers_version", "_name_or_path"):
            fields.pop(own, None)
        return LlamaConfig(**fields, architectures=["LlamaForCausalLM"])
