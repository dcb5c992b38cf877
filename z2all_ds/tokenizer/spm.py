"""Learns a SentencePiece BPE vocabulary with byte fallback, and converts it.

Settings: text is not changed (no normalization, no spaces added or removed), each digit is a token, runs of spaces may
be tokens, and there are no control tokens of SentencePiece. Line ends separate sentences, so a line end is the byte
token <0x0A>.
"""

import io
import re
from collections.abc import Iterator

from tokenizers import Tokenizer

from z2all_ds.base.errors import DataError, MachineError
from z2all_ds.tokenizer.bbpe import too_little_text
from z2all_ds.tokenizer.spm_backend import spm_to_backend
from z2all_ds.tokenizer.spm_model import parse_spm_model

MODEL_FILE = "sentencepiece.model"
SMALLEST_VOCABULARY = 257
"""One token per byte, and <unk>."""
CHARACTER_COVERAGE = 0.9999
"""Share of the characters that get tokens; the rare others become bytes. With SentencePiece's default of 0.9995, 1 of
250 Chinese characters would become bytes if an eighth of the text is Chinese."""
LONGEST_SENTENCE = 1000
"""In characters. Minified code and base64 have lines of megabytes, and SentencePiece drops lines above its limit."""


def sentences(texts: Iterator[str]) -> Iterator[str]:
    """Yield lines; split a long one, before a space if there is one near the limit."""
    for text in texts:
        for line in text.split("\n"):
            while len(line) > LONGEST_SENTENCE:
                space = line.rfind(" ", LONGEST_SENTENCE // 2, LONGEST_SENTENCE)
                cut = space if space > 0 else LONGEST_SENTENCE
                yield line[:cut]
                line = line[cut:]
            if line:
                yield line


def learn_spm(texts: Iterator[str], text_vocab_size: int) -> tuple[Tokenizer, bytes]:
    """Return the backend without control tokens, and the content of the .model file."""
    try:
        import sentencepiece
    except ImportError:
        fix = "pip install 'z2all_ds[tokenizer]', or use --algorithm bbpe."
        raise MachineError("algorithm spm", "the library sentencepiece is not installed", fix) from None
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(texts),
            model_writer=written,
            model_type="bpe",
            vocab_size=text_vocab_size,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            character_coverage=CHARACTER_COVERAGE,
            max_sentence_length=4 * LONGEST_SENTENCE + 1,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(str(error), text_vocab_size) from None
    data = written.getvalue()
    model = parse_spm_model(data, "the trained model")
    assert len(model.pieces) == text_vocab_size
    return spm_to_backend(model, "the trained model", keeps_space_mark=True), data


def _explained(message: str, text_vocab_size: int) -> DataError:
    """Return an error for the two usual failures of SentencePiece, whose messages name its source lines."""
    what = f"vocabulary size {text_vocab_size}"
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        rule = f"the bytes and characters of the text need {found.group(1)}"
        return DataError(what, rule, f"Give {found.group(1)} or more, or use bbpe.")
    if found := re.search(r"value <= (\d+)", message):
        return too_little_text(text_vocab_size, found.group(1))
    return DataError(what, f"SentencePiece cannot reach it ({message})", "Give more text or another size.")
