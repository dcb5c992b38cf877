"""Trains a tokenizer on a sample of text and writes it as a Hugging Face folder.

The same text and settings give the same files, byte for byte; a folder that holds them already is returned at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from z2all_ds.base.console import human_bytes, say
from z2all_ds.base.errors import ConfigError
from z2all_ds.tokenizer import bbpe, spm
from z2all_ds.tokenizer.folder import add_control_tokens, check_place, is_filled, read_recipe, write_folder
from z2all_ds.tokenizer.learning import learn_in_own_process
from z2all_ds.tokenizer.sampling import Sources, check_weights, open_sources, share_budget
from z2all_ds.tokenizer.tokenization_z2all import TOKENIZER_FILE, load_tokenizer

RECIPE = 2
"""Raise it when the same text would give another vocabulary."""
ALGORITHMS = {"bbpe": bbpe.SMALLEST_VOCABULARY, "spm": spm.SMALLEST_VOCABULARY}
"""And the smallest vocabulary of each."""
MAX_BYTES = {"bbpe": 1_000_000_000, "spm": 500_000_000}
"""1 GB (30 % zh, 40 % en, 30 % code) to 64,000 tokens took 4.4 GB with bbpe and 7.9 GB with spm."""
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
    max_bytes: int | None = None,
    *,
    algorithm: str = "bbpe",
    weights: Mapping[str, float] | None = None,
    safe_by_default: bool = False,
) -> TokenizerReport:
    """Trains on up to `max_bytes` (MAX_BYTES without) of a corpus folder or of files (`PATH` or `NAME=PATH`).

    `weights` gives each domain its part of the sample (equal without). `safe_by_default` makes plain transformers, too,
    encode spelled-out control tokens as text; its chat template then needs `split_special_tokens=False` in the call.
    A folder that holds the result of the same call already is returned at once; any other is left alone.
    """
    out_dir = Path(out_dir)
    max_bytes = _check_settings(algorithm, text_vocab_size, max_bytes)
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
    check_place(out_dir)

    shares = share_budget({name: domain.bytes for name, domain in sources.domains.items()}, max_bytes, weights)
    _say_what_is_short(shares, max_bytes, weights)
    learned = learn_in_own_process(algorithm, _as_strings(inputs), shares, text_vocab_size)
    backend = Tokenizer.from_str(learned.files.pop(TOKENIZER_FILE).decode())
    add_control_tokens(backend, text_vocab_size)
    packed = {name: _bytes_per_token(backend, sources, name) for name, share in shares.items() if share}
    results = {"trained_bytes": learned.text_bytes, "bytes_per_token": packed}
    write_folder(backend, out_dir, {**recipe, **results}, learned.files, safe_by_default)
    return _report(out_dir, recipe)


def _check_settings(algorithm: str, text_vocab_size: int, max_bytes: int | None) -> int:
    """The bytes to read, if all of it can be meant."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"algorithm {algorithm!r}", f"there are {', '.join(ALGORITHMS)}", "Use bbpe if in doubt.")
    if text_vocab_size < ALGORITHMS[algorithm]:
        rule = f"must be at least {ALGORITHMS[algorithm]}, one token for each byte" + (
            " and <unk>" * (algorithm == "spm")
        )
        raise ConfigError(f"text_vocab_size {text_vocab_size}", rule, "Try 4096 for a toy, 32000 to 64000 for a model.")
    max_bytes = MAX_BYTES[algorithm] if max_bytes is None else max_bytes
    if max_bytes < 1:
        raise ConfigError(f"max_bytes {max_bytes}", "must be positive", f"Leave it at {MAX_BYTES[algorithm]}.")
    return max_bytes


def _as_strings(inputs: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(inputs)] if isinstance(inputs, str | Path) else [str(one) for one in inputs]


def _say_what_is_short(shares: Mapping[str, int], max_bytes: int, weights: Mapping[str, float] | None) -> None:
    """Weights that the text cannot fill; what is missing was shared among the others."""
    total = sum(weights.values()) if weights else 0
    if weights and any(
        share < SHORT_BELOW * max_bytes * weights.get(name, 0) / total for name, share in shares.items()
    ):
        mix = ", ".join(f"{name} {share / sum(shares.values()):.0%}" for name, share in shares.items())
        say(f"tokenizer: too little text for {human_bytes(max_bytes)} in the given weights; the mix is {mix}")


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
