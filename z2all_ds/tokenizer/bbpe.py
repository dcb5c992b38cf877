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
_SIGN = r"[^\r\n\p{L}\p{N}]"
_OTHER_LETTERS = rf"{_SIGN}?[\p{{L}}&&[^{_CJK}]]{{1,24}}"
"""A word with the one sign before it (" word", "_name", ".join"). The limit is for other scripts without spaces (Thai,
Khmer) and for base64."""
_NUMBERS = r"\p{N}{1,3}"
"""In groups, so that 2024 is not one word."""
_REST = (
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the line end after them
    r"\s*[\r\n]+",
    r"\s+(?!\S)",  # indentation, without the one space that belongs to the next word
    r"\s+",
)
_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
SPLITS = {
    "by_script": "|".join([rf"{_SIGN}?[{_CJK}ー]{{1,64}}", _NUMBERS, _OTHER_LETTERS, *_REST]),
    "four_characters": "|".join([rf"[{_CJK}]{{1,4}}", _NUMBERS, _OTHER_LETTERS, *_REST]),
    "llama3": "|".join([rf"(?i:{_ENDINGS})", rf"{_SIGN}?\p{{L}}+", _NUMBERS, *_REST]),
    "qwen2": "|".join([rf"(?i:{_ENDINGS})", rf"{_SIGN}?\p{{L}}+", r"\p{N}", *_REST]),
    "gpt2": "|".join([_ENDINGS, r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", *_REST[2:]]),
}
"""How text is split before merging, by name; no token crosses a split. `four_characters` was the default before
`by_script`; on 8 MB of Chinese manuals and 16,000 tokens, the first gave 3.73 bytes per token on other pages, the
second and `llama3` 4.08. For a regex engine with \\p{...} and && (Oniguruma in `tokenizers`)."""
DEFAULT_SPLIT, EARLIER_DEFAULT_SPLIT = "by_script", "four_characters"


def learn_bbpe(
    texts: Iterator[str], text_vocab_size: int, split: str = DEFAULT_SPLIT, show_progress: bool = False
) -> Tokenizer:
    """Return the backend without control tokens; `split` is a name in SPLITS. Progress is JSON lines on stderr."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated"),
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
    fix = f"Give a larger corpus (or read more of it), or a size of at most {reached}."
    return DataError(f"vocabulary size {text_vocab_size}", rule, fix)
