"""The room that learns a byte-level BPE vocabulary from a corpus and encodes text with it.

`train_tokenizer` writes a Hugging Face folder that AutoTokenizer loads without this package; `load_tokenizer` opens the
same folder for training data: fast, without transformers, and deaf to control tokens spelled out in a document.
"""

from z2all_ds.tokenizer.special_tokens import SPECIAL_TOKENS
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer, load_tokenizer
from z2all_ds.tokenizer.train import TokenizerReport, train_tokenizer

__all__ = ["SPECIAL_TOKENS", "TokenizerReport", "Z2allTokenizer", "load_tokenizer", "train_tokenizer"]
