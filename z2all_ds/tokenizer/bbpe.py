"""Learns a byte-level BPE vocabulary: all 256 bytes are in it, so any text can be encoded and comes back exactly.

The trainer is that of `tokenizers`: 1 GB of zh, en and code to 64,000 tokens took it 559 s of CPU and 4.4 GB. rustbpe
0.1 took 194 s and 2.1 GB with the same split, and all but 8 of the tokens are the same; but it merges down to pairs
seen once, tells no progress, and would be one library more. For work done once per corpus that is not worth it.
"""

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from z2all_ds.base.errors import DataError
from z2all_ds.tokenizer.pre_split import PRE_SPLIT

SMALLEST_VOCABULARY = 256
"""One token for each byte."""
SEEN_AT_LEAST = 2
"""A merge that occurs once in the whole corpus is a quotation, not a piece of language."""


def learn_bbpe(texts: Iterator[str], text_vocab_size: int, tell_progress: bool = False) -> Tokenizer:
    """The backend, without control tokens yet. Progress goes to stderr, one JSON object a line."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=text_vocab_size,
        min_frequency=SEEN_AT_LEAST,
        show_progress=tell_progress,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    if hasattr(trainer, "progress_format"):  # new in tokenizers 0.23; before, there are bars on a terminal alone
        trainer.progress_format = "json"
    backend.train_from_iterator(texts, trainer=trainer)
    reached = backend.get_vocab_size()
    if reached != text_vocab_size:
        rule = f"the corpus has only enough repeated text for {reached}"
        fix = f"Give a larger corpus (or a larger max_bytes), or set text_vocab_size to at most {reached}."
        raise DataError(f"text_vocab_size {text_vocab_size}", rule, fix)
    return backend
