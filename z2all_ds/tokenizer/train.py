"""Trains a tokenizer on a sample of text and writes it as a Hugging Face folder.

The same text and settings give the same files, byte for byte; a folder that already has them is returned at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from z2all_ds.base.console import human_bytes, say
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.tokenizer import bbpe, spm
from z2all_ds.tokenizer.folder import (
    RECIPE_FILE,
    add_control_tokens,
    check_writable,
    is_filled,
    read_recipe,
    write_folder,
)
from z2all_ds.tokenizer.learning import learn_in_own_process
from z2all_ds.tokenizer.sampling import Inputs, SampledDomain, check_weights, input_list, open_sources, share_budget
from z2all_ds.tokenizer.special_tokens import SPECIAL_TOKENS
from z2all_ds.tokenizer.tokenization_z2all import TOKENIZER_FILE, load_tokenizer

RECIPE = 2
"""Increase it when the same text would give another vocabulary."""
ALGORITHMS = {"bbpe": bbpe.SMALLEST_VOCABULARY, "spm": spm.SMALLEST_VOCABULARY}
"""Algorithms with their smallest vocabulary."""
LARGEST_VOCABULARY = 10_000_000
MAX_BYTES = {"bbpe": 1_000_000_000, "spm": 500_000_000}
"""1 GB (30 % zh, 40 % en, 30 % code) and 64,000 tokens took 4.4 GB with bbpe and 7.9 GB with spm."""
REPORT_BYTES_PER_DOMAIN = 200_000
SHORT_BELOW = 0.9
"""A domain with less than this part of its share is reported."""


@dataclass(frozen=True)
class TokenizerReport:
    """Size and compression of a trained tokenizer."""

    folder: Path
    text_vocab_size: int
    size: int
    """Number of ids, including control tokens."""
    trained_bytes: int
    """Bytes of text that were read."""
    bytes_per_token: dict[str, float]
    """By domain, on a sample of the training text."""
    fingerprint: str
    algorithm: str = "bbpe"


def train_tokenizer(
    inputs: Inputs,
    out_dir: str | Path,
    text_vocab_size: int,
    max_bytes: int | None = None,
    *,
    algorithm: str = "bbpe",
    split: str | None = None,
    weights: Mapping[str, float] | None = None,
    safe_by_default: bool = False,
) -> TokenizerReport:
    """Train on up to `max_bytes` (default: MAX_BYTES) of a corpus folder or of files (`PATH` or `NAME=PATH`).

    `split` is the name of a pattern in bbpe.SPLITS (default: by_script, or that of an existing folder). `weights` are
    the shares of the domains (default: equal). `safe_by_default` makes plain transformers encode control
    tokens in text as plain text too; its chat template then needs `split_special_tokens=False` in the call. If the
    folder has the result of the same call, it is returned at once; a folder with other content is refused.
    """
    out_dir = Path(out_dir)
    max_bytes = _check_settings(algorithm, text_vocab_size, max_bytes, split)
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
    if algorithm == "bbpe" and split != bbpe.EARLIER_DEFAULT_SPLIT:  # which is not recorded
        recipe["split"] = split or bbpe.DEFAULT_SPLIT
    if is_filled(out_dir):
        if split is None and "split" not in read_recipe(out_dir, {}):
            recipe.pop("split", None)
        return _report(out_dir, recipe)
    check_writable(out_dir)

    shares = share_budget({name: domain.bytes for name, domain in sources.domains.items()}, max_bytes, weights)
    _report_short_domains(shares, max_bytes, weights)
    files, trained_bytes = learn_in_own_process(
        algorithm, input_list(inputs), shares, text_vocab_size, split or bbpe.DEFAULT_SPLIT
    )
    backend = Tokenizer.from_str(files.pop(TOKENIZER_FILE).decode())
    add_control_tokens(backend, {name: text_vocab_size + number for number, name in enumerate(SPECIAL_TOKENS)})
    results = {
        "trained_bytes": trained_bytes,
        "bytes_per_token": {
            name: _bytes_per_token(backend, sources.domains[name]) for name, share in shares.items() if share
        },
    }
    write_folder(backend, out_dir, {**recipe, **results}, files, safe_by_default)
    return _report(out_dir, recipe)


def _check_settings(algorithm: str, text_vocab_size: int, max_bytes: int | None, split: str | None) -> int:
    """Check the settings; return the bytes to read."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"algorithm {algorithm!r}", f"must be one of {', '.join(ALGORITHMS)}", "Use bbpe if in doubt."
        )
    if split is not None and (split not in bbpe.SPLITS or algorithm != "bbpe"):
        rule = f"must be one of {', '.join(bbpe.SPLITS)}" if algorithm == "bbpe" else f"is not used by {algorithm}"
        raise ConfigError(f"split {split!r}", rule, "Leave it out if in doubt.")
    if not ALGORITHMS[algorithm] <= text_vocab_size <= LARGEST_VOCABULARY:
        units = "one token per byte" + (" and <unk>" if algorithm == "spm" else "")
        rule = f"must be at least {ALGORITHMS[algorithm]}, {units}, and at most {LARGEST_VOCABULARY}"
        raise ConfigError(f"vocabulary size {text_vocab_size}", rule, "Try 4096 for a toy, 32000 to 64000 for a model.")
    max_bytes = MAX_BYTES[algorithm] if max_bytes is None else max_bytes
    if max_bytes < 1:
        raise ConfigError(f"max_bytes {max_bytes}", "must be positive", f"Leave it at {MAX_BYTES[algorithm]}.")
    return max_bytes


def _report_short_domains(shares: Mapping[str, int], max_bytes: int, weights: Mapping[str, float] | None) -> None:
    """Report the actual mix if some domain has too little text for its weight."""
    weights = weights or {}
    total = sum(weights.values())
    if any(share < SHORT_BELOW * max_bytes * weights.get(name, 0) / (total or 1) for name, share in shares.items()):
        mix = ", ".join(f"{name} {share / sum(shares.values()):.0%}" for name, share in shares.items())
        say(f"tokenizer: too little text for {human_bytes(max_bytes)} with these weights; the mix is {mix}")


def _bytes_per_token(backend: Tokenizer, domain: SampledDomain) -> float:
    texts = [text for _, text in domain.sample(REPORT_BYTES_PER_DOMAIN)]
    tokens = sum(len(found.ids) for found in backend.encode_batch_fast(texts, add_special_tokens=False))
    return round(sum(len(text.encode()) for text in texts) / max(1, tokens), 4)


def _report(out_dir: Path, recipe: Mapping[str, Any]) -> TokenizerReport:
    """Return the report of a folder that was made with this recipe."""
    values, tokenizer = read_recipe(out_dir, recipe, ("trained_bytes", "bytes_per_token")), load_tokenizer(out_dir)
    fix = "Choose another folder, or remove this one first."
    with explain_content(ConfigError, f"folder {out_dir}", f"its {RECIPE_FILE} is damaged", fix):
        trained_bytes = int(values["trained_bytes"])
        bytes_per_token = {name: float(value) for name, value in values["bytes_per_token"].items()}
    return TokenizerReport(
        folder=out_dir,
        text_vocab_size=recipe["text_vocab_size"],
        size=tokenizer.size,
        trained_bytes=trained_bytes,
        bytes_per_token=bytes_per_token,
        fingerprint=tokenizer.fingerprint,
        algorithm=recipe["algorithm"],
    )
