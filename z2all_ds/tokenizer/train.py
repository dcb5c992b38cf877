"""Trains a tokenizer on a sample of text and writes it as a Hugging Face folder.

The same text and settings give the same files, byte for byte; a folder that holds them already is returned at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from z2all_ds.console import human_bytes, say
from z2all_ds.errors import ConfigError, DataError
from z2all_ds.tokenizer import bbpe, spm
from z2all_ds.tokenizer.folder import add_control_tokens, is_filled, read_recipe, write_folder
from z2all_ds.tokenizer.learning import learn_watched
from z2all_ds.tokenizer.sampling import Sources, check_weights, open_sources, share_budget
from z2all_ds.tokenizer.tokenization_z2all import load_tokenizer

RECIPE = 2
"""Raise it when the same text would give another vocabulary."""
ALGORITHMS = {"bbpe": bbpe.SMALLEST_VOCABULARY, "spm": spm.SMALLEST_VOCABULARY}
"""And the smallest vocabulary of each."""
MAX_BYTES = 1_000_000_000
REPORT_BYTES_PER_DOMAIN = 200_000
SHORT_BELOW = 0.9
"""A domain that has less than this part of its due share is worth a line."""


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
    """By domain, on a sample of the text that it was trained on."""
    fingerprint: str
    algorithm: str = "bbpe"


def train_tokenizer(
    inputs: str | Path | Sequence[str | Path],
    out_dir: str | Path,
    text_vocab_size: int,
    max_bytes: int = MAX_BYTES,
    *,
    algorithm: str = "bbpe",
    weights: Mapping[str, float] | None = None,
    safe_by_default: bool = False,
) -> TokenizerReport:
    """Trains on up to `max_bytes` of a corpus folder or of files (`PATH` or `NAME=PATH`).

    `weights` gives each domain its part of the sample (equal without). `safe_by_default` makes plain transformers, too,
    encode spelled-out control tokens as text; its chat template then needs `split_special_tokens=False` in the call.
    A folder that holds the result of the same call already is returned at once; any other is left alone.
    """
    out_dir = Path(out_dir)
    _check_settings(algorithm, text_vocab_size, max_bytes)
    sources = open_sources(inputs)
    if weights is not None:
        check_weights(weights, list(sources.domains))
    recipe = {
        "recipe": RECIPE,
        "algorithm": algorithm,
        "text_fingerprint": sources.fingerprint,
        "text_vocab_size": text_vocab_size,
        "max_bytes": max_bytes,
        "weights": None if weights is None else {name: float(weights.get(name, 0)) for name in sources.domains},
        "safe_by_default": safe_by_default,
    }
    if is_filled(out_dir):
        return _report(out_dir, recipe)

    shares = share_budget({name: domain.bytes for name, domain in sources.domains.items()}, max_bytes, weights)
    _say_what_is_short(shares, max_bytes, weights)
    extra_files: dict[str, bytes] = {}

    def learn(texts: Iterator[str]) -> Tokenizer:
        if algorithm == "bbpe":
            return bbpe.learn_bbpe(texts, text_vocab_size)
        backend, extra_files[spm.MODEL_FILE] = spm.learn_spm(texts, text_vocab_size)
        return backend

    label = f"merging to {text_vocab_size:,} tokens"
    backend, trained_bytes = learn_watched(_sample(sources, shares), sum(shares.values()), learn, label)
    add_control_tokens(backend, text_vocab_size)
    packed = {name: _bytes_per_token(backend, sources, name) for name, share in shares.items() if share}
    results = {"trained_bytes": trained_bytes, "bytes_per_token": packed}
    write_folder(backend, out_dir, {**recipe, **results}, extra_files, safe_by_default)
    return _report(out_dir, recipe)


def _check_settings(algorithm: str, text_vocab_size: int, max_bytes: int) -> None:
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"algorithm {algorithm!r}", f"there are {', '.join(ALGORITHMS)}", "Use bbpe if in doubt.")
    if text_vocab_size < ALGORITHMS[algorithm]:
        rule = f"must be at least {ALGORITHMS[algorithm]}, one token for each byte" + (" and <unk>" * (algorithm == "spm"))
        raise ConfigError(f"text_vocab_size {text_vocab_size}", rule, "Try 4096 for a toy, 32000 to 64000 for a model.")
    if max_bytes < 1:
        raise ConfigError(f"max_bytes {max_bytes}", "must be positive", f"Leave it at {MAX_BYTES}.")


def _sample(sources: Sources, shares: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    some = False
    for name, share in shares.items():
        for size, text in sources.domains[name].sample(share) if share else ():
            some = some or bool(text.strip())
            yield size, text
    if not some:
        raise DataError(sources.label, "there is no text in it", "Give text, or a larger max_bytes.")


def _say_what_is_short(shares: Mapping[str, int], max_bytes: int, weights: Mapping[str, float] | None) -> None:
    """Weights that the text cannot fill; what is missing was shared among the others."""
    total = sum(weights.values()) if weights else 0
    if weights and any(share < SHORT_BELOW * max_bytes * weights.get(name, 0) / total for name, share in shares.items()):
        mix = ", ".join(f"{name} {share / sum(shares.values()):.0%}" for name, share in shares.items())
        say(f"tokenizer: too little text for {human_bytes(max_bytes)} in the given weights; all that is short is used: {mix}")


def _bytes_per_token(backend: Tokenizer, sources: Sources, domain: str) -> float:
    texts = [text for _, text in sources.domains[domain].sample(REPORT_BYTES_PER_DOMAIN)]
    tokens = sum(len(found.ids) for found in backend.encode_batch_fast(texts, add_special_tokens=False))
    return round(sum(len(text.encode()) for text in texts) / max(1, tokens), 4)


def _report(out_dir: Path, recipe: Mapping[str, Any]) -> TokenizerReport:
    """Of a folder that this recipe made."""
    values = read_recipe(out_dir, recipe)
    tokenizer = load_tokenizer(out_dir)
    return TokenizerReport(
        folder=out_dir,
        text_vocab_size=recipe["text_vocab_size"],
        size=tokenizer.size,
        trained_bytes=values["trained_bytes"],
        bytes_per_token=values["bytes_per_token"],
        fingerprint=tokenizer.fingerprint,
        algorithm=recipe["algorithm"],
    )
