"""Learns a byte-level BPE vocabulary. It contains all 256 bytes, so any text can be encoded and is reproduced exactly.

The trainer is that of `tokenizers`: for 1 GB of zh, en and code and 64,000 tokens it took 559 s of CPU and 4.4 GB.
rustbpe 0.1 took 194 s and 2.1 GB with the same split, and all but 8 tokens were equal; but it merges pairs that occur
once, reports no progress, and would be another dependency.
"""

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from z2all_ds.base.errors import DataError

SMALLEST_VOCABULARY = 256
"""One token per byte."""
MIN_FREQUENCY = 2
"""A pair that occurs once in the whole corpus is not worth a token."""

_CJK = r"\p{Han}\p{Hiragana}\p{Katakana}"
PRE_SPLIT = "|".join(
    [
        rf"[{_CJK}]{{1,4}}",  # most Chinese words have one to four characters
        r"\p{N}{1,3}",  # numbers in groups, so that 2024 is not one word
        # A word with the one sign before it (" word", "_name", ".join"). The limit is for other scripts without spaces
        # (Thai, Khmer) and for base64.
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_CJK}]]{{1,24}}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the line end after them
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # indentation, without the one space that belongs to the next word
        r"\s+",
    ]
)
"""How text is split before merging; no token crosses a split. The limits keep the number of different words small, also
in Chinese, where a sentence has no spaces. For a regex engine with \\p{...} and && (Oniguruma in `tokenizers`)."""


def learn_bbpe(texts: Iterator[str], text_vocab_size: int, show_progress: bool = False) -> Tokenizer:
    """Return the backend without control tokens. Progress goes to stderr as one JSON object per line."""
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
        min_frequency=MIN_FREQUENCY,
        show_progress=show_progress,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    if hasattr(trainer, "progress_format"):  # since tokenizers 0.23; earlier versions show bars on a terminal only
        trainer.progress_format = "json"
    backend.train_from_iterator(texts, trainer=trainer)
    reached = backend.get_vocab_size()
    if reached != text_vocab_size:
        raise too_little_text(text_vocab_size, reached)
    return backend


def too_little_text(text_vocab_size: int, reached: int | str) -> DataError:
    rule = f"the corpus has only enough repeated text for {reached}"
    fix = f"Give a larger corpus (or a larger max_bytes), or set text_vocab_size to at most {reached}."
    return DataError(f"text_vocab_size {text_vocab_size}", rule, fix)
