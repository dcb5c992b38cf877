"""The smallest model with all features: grouped heads, several layers, and a vocabulary for the small tokenizer."""

from z2all_ds.base.config.sections import ModelSection

TINY = ModelSection(
    vocab_size=1024,
    hidden_size=32,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
