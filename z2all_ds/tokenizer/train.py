"""Learns a byte-level BPE vocabulary from a corpus and writes it as a Hugging Face folder.

Byte-level: all 256 bytes are in the vocabulary, so any text can be encoded and comes back exactly. What matters most
for memory is how text is cut before merging. A Chinese sentence has no spaces; uncut, each sentence is a "word" of its
own and the table of words grows with the corpus. PRE_SPLIT cuts such runs into short pieces, so words repeat.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from z2all_ds.atomic import force_to_disk, machine_limits_named, temporary_name
from z2all_ds.console import heartbeat
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.errors import ConfigError, DataError
from z2all_ds.tokenizer.sampling import sample_texts, share_budget
from z2all_ds.tokenizer.special_tokens import (
    BEGIN_OF_TEXT,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    PAD,
    SPECIAL_TOKENS,
    UNKNOWN,
)
from z2all_ds.tokenizer.tokenization_z2all import load_tokenizer

RECIPE = 1
"""Raise it when the same corpus would give another vocabulary."""
RECIPE_FILE = "training.json"
MAX_BYTES = 200_000_000
REPORT_BYTES_PER_DOMAIN = 200_000
SMALLEST_VOCABULARY = 256
"""One token for each byte."""
SEEN_AT_LEAST = 2
"""A merge that occurs once in the whole corpus is a quotation, not a piece of language."""

_CJK = r"\p{Han}\p{Hiragana}\p{Katakana}"
PRE_SPLIT = "|".join(
    [
        rf"[{_CJK}]{{1,4}}",  # most Chinese words have one to four characters
        r"\p{N}{1,3}",  # numbers in groups, so that 2024 is not a word of its own
        # A word with the one sign before it (" word", "_name", ".join"). The bound is for scripts without spaces
        # other than CJK (Thai, Khmer) and for base64.
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_CJK}]]{{1,24}}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the line end they close
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # indentation, less the one space that goes with the next word
        r"\s+",
    ]
)


@dataclass(frozen=True)
class TokenizerReport:
    """What was learned, and how well it packs each domain."""

    folder: Path
    text_vocab_size: int
    size: int
    """Number of ids with the control tokens."""
    trained_bytes: int
    """Bytes of text that were read."""
    bytes_per_token: dict[str, float]
    """By domain, on a sample of the corpus that it was trained on."""
    fingerprint: str


def train_tokenizer(
    corpus_dir: str | Path, out_dir: str | Path, text_vocab_size: int, max_bytes: int = MAX_BYTES
) -> TokenizerReport:
    """Trains on up to `max_bytes` of the corpus; the same corpus gives the same files, byte for byte.

    A folder that holds the result of the same call already is returned at once; any other is left alone.
    """
    corpus_dir, out_dir = Path(corpus_dir), Path(out_dir)
    if text_vocab_size < SMALLEST_VOCABULARY:
        rule = f"must be at least {SMALLEST_VOCABULARY}, one token for each byte"
        raise ConfigError(f"text_vocab_size {text_vocab_size}", rule, "Try 4096 for a toy, 32000 to 64000 for a model.")
    if max_bytes < 1:
        raise ConfigError(f"max_bytes {max_bytes}", "must be positive", f"Leave it at {MAX_BYTES}.")
    manifest = load_manifest(corpus_dir)
    recipe = {
        "recipe": RECIPE,
        "corpus_fingerprint": manifest.fingerprint,
        "text_vocab_size": text_vocab_size,
        "max_bytes": max_bytes,
    }
    if out_dir.is_dir() and any(out_dir.iterdir()):
        return _reuse(out_dir, recipe)

    sizes = {domain: size for domain, (documents, size) in manifest.domains.items() if documents}
    if not sizes:
        raise DataError(f"corpus {corpus_dir}", "it has no document", "Build it with at least one source.")
    trained_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal trained_bytes
        for domain, share in share_budget(sizes, max_bytes).items():
            for text in sample_texts(corpus_dir, manifest, domain, share):
                trained_bytes += len(text.encode())
                yield text

    # No bar: reading has an end that is known, but the merging after it, inside the library, does not.
    with heartbeat(f"tokenizer of {text_vocab_size} tokens"):
        backend = _learn(texts(), text_vocab_size)
    packed = {}
    for domain in sizes:
        sample = list(sample_texts(corpus_dir, manifest, domain, REPORT_BYTES_PER_DOMAIN))
        tokens = sum(len(found.ids) for found in backend.encode_batch_fast(sample, add_special_tokens=False))
        packed[domain] = round(sum(len(text.encode()) for text in sample) / max(1, tokens), 4)
    with machine_limits_named(out_dir.parent):
        _write_folder(backend, out_dir, {**recipe, "trained_bytes": trained_bytes, "bytes_per_token": packed})
    return _reuse(out_dir, recipe)


def _learn(texts: Iterator[str], text_vocab_size: int) -> Tokenizer:
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
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(texts, trainer=trainer)
    reached = backend.get_vocab_size()
    if reached != text_vocab_size:
        rule = f"the corpus has only enough repeated text for {reached}"
        fix = f"Give a larger corpus (or a larger max_bytes), or set text_vocab_size to at most {reached}."
        raise DataError(f"text_vocab_size {text_vocab_size}", rule, fix)
    # Spelled-out control tokens were cut at their signs while learning, so none of them can be in the vocabulary yet.
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    assert [backend.token_to_id(token) for token in SPECIAL_TOKENS] == list(
        range(text_vocab_size, text_vocab_size + len(SPECIAL_TOKENS))
    )
    return backend


def _write_folder(backend: Tokenizer, out_dir: Path, recipe: dict[str, Any]) -> None:
    """Everything into a temporary folder beside the final one, forced to disk, then one rename."""
    from transformers import PreTrainedTokenizerFast  # seconds to import, and needed here alone

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(out_dir)
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed training
    try:
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token=BEGIN_OF_TEXT,
            eos_token=END_OF_TEXT,
            pad_token=PAD,
            unk_token=UNKNOWN,
            clean_up_tokenization_spaces=False,
            chat_template=CHAT_TEMPLATE,
        ).save_pretrained(str(temporary))
        config_path = temporary / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8"))
        # transformers 5 writes a class name that 4 does not know; both know this one
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config_path.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")
        (temporary / RECIPE_FILE).write_text(json.dumps(recipe, indent=2, sort_keys=True) + "\n", "utf-8")
        for path in sorted(temporary.iterdir()):
            force_to_disk(path)
        force_to_disk(temporary)
        os.replace(temporary, out_dir)  # an empty folder gives way, a filled one does not
        force_to_disk(out_dir.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _reuse(out_dir: Path, recipe: dict[str, Any]) -> TokenizerReport:
    """The report of a folder that this recipe made."""
    try:
        values = json.loads((out_dir / RECIPE_FILE).read_text("utf-8"))
        same = all(values[name] == wanted for name, wanted in recipe.items())
        trained_bytes, packed = values["trained_bytes"], values["bytes_per_token"]
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        rule = "it holds something else than the tokenizer of this corpus with these settings"
        raise ConfigError(f"folder {out_dir}", rule, "Choose another folder, or remove that one first.")
    tokenizer = load_tokenizer(out_dir)
    return TokenizerReport(
        out_dir, recipe["text_vocab_size"], tokenizer.size, trained_bytes, packed, tokenizer.fingerprint
    )
