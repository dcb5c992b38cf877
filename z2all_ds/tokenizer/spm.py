"""Learns a SentencePiece BPE vocabulary with byte fallback, and converts it.

Settings: text is left as it is (no normalization, no blank put in front, none removed), digits stand alone, runs of
blanks may be tokens, and there are no control tokens of SentencePiece's own. Line ends cut sentences, so a line end is
the byte token <0x0A>.
"""

import io
import re
from collections.abc import Iterator

from tokenizers import Tokenizer

from z2all_ds.base.errors import DataError, MachineError
from z2all_ds.tokenizer.spm_convert import spm_to_backend
from z2all_ds.tokenizer.spm_model import parse_spm_model

MODEL_FILE = "sentencepiece.model"
SMALLEST_VOCABULARY = 257
"""Each byte, and <unk>."""
CHARACTER_COVERAGE = 0.9999
"""Of all characters in the text; the rare rest is written in bytes. SentencePiece's own 0.9995 counts over the whole
mix and would leave 1 Chinese character in 250 to bytes where an eighth of the characters are Chinese."""
LONGEST_SENTENCE = 1000
"""Characters. Minified code and base64 have lines of megabytes, and SentencePiece drops lines beyond its limit."""


def sentences(texts: Iterator[str]) -> Iterator[str]:
    """Lines; a long one is cut, after a blank where there is one near the limit."""
    for text in texts:
        for line in text.split("\n"):
            while len(line) > LONGEST_SENTENCE:
                blank = line.rfind(" ", LONGEST_SENTENCE // 2, LONGEST_SENTENCE)
                cut = blank if blank > 0 else LONGEST_SENTENCE
                yield line[:cut]
                line = line[cut:]
            if line:
                yield line


def learn_spm(texts: Iterator[str], text_vocab_size: int) -> tuple[Tokenizer, bytes]:
    """The backend, without control tokens yet, and the .model file."""
    try:
        import sentencepiece
    except ImportError:
        fix = "pip install 'z2all_ds[tokenizer]', or use --algorithm bbpe, which needs nothing more."
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
    return spm_to_backend(model, "the trained model"), data


def _explained(message: str, text_vocab_size: int) -> DataError:
    """SentencePiece names its source lines; the two things that go wrong are these."""
    what = f"text_vocab_size {text_vocab_size}"
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        rule = f"bytes and different characters of the text alone need {found.group(1)}"
        return DataError(what, rule, f"Give {found.group(1)} or more, or use bbpe.")
    if found := re.search(r"value <= (\d+)", message):
        rule = f"the corpus has only enough repeated text for {found.group(1)}"
        fix = f"Give a larger corpus (or a larger max_bytes), or set text_vocab_size to at most {found.group(1)}."
        return DataError(what, rule, fix)
    return DataError(what, f"SentencePiece cannot reach it ({message})", "Give more text or another size.")
