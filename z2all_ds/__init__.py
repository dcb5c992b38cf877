"""z2all_ds: from raw text to a Hugging Face checkpoint of a Llama-2-structure model, trained with DeepSpeed.

The bare package is light: importing it loads neither torch, deepspeed nor transformers.
"""

__version__ = "0.1.0"
