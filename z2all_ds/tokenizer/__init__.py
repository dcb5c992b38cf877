"""Learns a vocabulary from text and encodes with it: byte-level BPE, or SentencePiece with byte fallback.

`train_tokenizer` and `import_tokenizer` write a Hugging Face folder that AutoTokenizer loads without this package.
`load_tokenizer` opens the same folder for training data: fast, without transformers, and with control tokens in a
document encoded as plain text. `report_tokenizers` compares folders.
"""

from typing import TYPE_CHECKING

from z2all_ds.base.lazy import lazy_names

if TYPE_CHECKING:
    from z2all_ds.tokenizer.import_existing import import_tokenizer
    from z2all_ds.tokenizer.report import report_tokenizers
    from z2all_ds.tokenizer.special_tokens import SPECIAL_TOKENS, padded_vocabulary
    from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer, load_tokenizer
    from z2all_ds.tokenizer.train import TokenizerReport, train_tokenizer

__all__ = [
    "SPECIAL_TOKENS",
    "TokenizerReport",
    "Z2allTokenizer",
    "import_tokenizer",
    "load_tokenizer",
    "padded_vocabulary",
    "report_tokenizers",
    "train_tokenizer",
]

__getattr__ = lazy_names(
    __name__,
    {
        "import_existing": "import_tokenizer",
        "report": "report_tokenizers",
        "special_tokens": "SPECIAL_TOKENS padded_vocabulary",
        "tokenization_z2all": "Z2allTokenizer load_tokenizer",
        "train": "TokenizerReport train_tokenizer",
    },
)
