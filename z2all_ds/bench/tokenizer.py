"""`z2all bench tokenizer`: time and peak memory of our trainers, compared with the default Hugging Face trainer.

Each runs in a process of its own, on the same sample of text, one after the other. "hf_default" is byte-level BPE with
the default pre-tokenizer of `tokenizers`, which keeps a Chinese sentence whole.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from z2all_ds.base.console import heartbeat, human_bytes
from z2all_ds.base.process_memory import peak_of_process
from z2all_ds.base.reports import Shown
from z2all_ds.bench.shared import (
    Report,
    built_in_text,
    in_new_process,
    require_at_least,
    require_known,
    scratch_folder,
)
from z2all_ds.tokenizer.bbpe import MIN_FREQUENCY, learn_bbpe
from z2all_ds.tokenizer.sampling import check_weights, open_sources, share_budget
from z2all_ds.tokenizer.spm import learn_spm

ENCODE_BYTES_PER_DOMAIN = 4_000_000
ENCODE_REPEATS = 3


def learn_hf_default(texts: Iterator[str], text_vocab_size: int) -> Tokenizer:
    """Train with the same library and its own pre-tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=text_vocab_size,
        min_frequency=MIN_FREQUENCY,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return backend


TRAINERS: dict[str, Callable[[Iterator[str], int], Tokenizer]] = {
    "bbpe": learn_bbpe,
    "hf_default": learn_hf_default,
    "spm": lambda texts, size: learn_spm(texts, size)[0],
}
DEFAULT_TRAINERS = ("bbpe", "hf_default")


def bench_tokenizer(
    inputs: Sequence[str | Path],
    sample_bytes: int,
    text_vocab_size: int,
    weights: Mapping[str, float] | None = None,
    names: Sequence[str] = DEFAULT_TRAINERS,
) -> Report:
    """Train with each of `names` on the same text: a corpus folder, files, or else built-in text.

    Seconds are from the first byte read to the vocabulary, CPU seconds over all cores; the peak memory is that of the
    process. A failed trainer has the reason and no figures.
    """
    require_known("trainer", names, list(TRAINERS))
    require_at_least(1, bytes=sample_bytes)
    costs, text_bytes = [], 0
    with scratch_folder() as scratch:
        given = [str(one) for one in inputs] or [built_in_text(scratch / "corpus", sample_bytes)]
        sources = open_sources(given, with_fingerprint=False)
        if weights is not None:
            check_weights(weights, list(sources.domains))
        shares = share_budget({name: one.bytes for name, one in sources.domains.items()}, sample_bytes, weights)
        for name in names:
            with heartbeat(f"trainer {name}"):
                try:
                    figures, text_bytes = in_new_process(measure_trainer, name, given, shares, text_vocab_size)
                    costs.append({"trainer": name, "failed": "", **figures})
                except Exception as error:  # the other trainers are still measured
                    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    costs.append({"trainer": name, "failed": reason})
    return {
        "text_vocab_size": text_vocab_size,
        "text_bytes": text_bytes,
        "mix": {name: round(share / sum(shares.values()), 4) for name, share in shares.items()},
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "packages": {name: version(name) for name in ("tokenizers", *(["sentencepiece"] if "spm" in names else []))},
        "trainers": costs,
    }


def measure_trainer(
    name: str, inputs: list[str], shares: dict[str, int], text_vocab_size: int
) -> tuple[dict[str, Any], int]:
    """Train once in this process. Return the figures and the bytes of text that were read."""
    domains = open_sources(inputs, with_fingerprint=False).domains
    shares = {domain: share for domain, share in shares.items() if share}
    text_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal text_bytes
        for domain, share in shares.items():
            for _, text in domains[domain].sample(share):
                text_bytes += len(text.encode())
                yield text

    started, cpu_before = time.monotonic(), time.process_time()
    backend = TRAINERS[name](texts(), text_vocab_size)
    figures = {
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(time.process_time() - cpu_before, 2),
        "peak_memory_bytes": peak_of_process(),
    }
    samples = {
        domain: [text for _, text in domains[domain].sample(min(share, ENCODE_BYTES_PER_DOMAIN))]
        for domain, share in shares.items()
    }
    return {**figures, **_measure_encoding(backend, samples)}, text_bytes


def _measure_encoding(backend: Tokenizer, texts: Mapping[str, list[str]]) -> dict[str, Any]:
    """Measure one core; the best of three repeats counts, as other work on the machine only slows it down."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    bytes_per_token, best = {}, 0.0
    for domain, some in texts.items():
        tokens = sum(len(found.ids) for found in backend.encode_batch_fast(some, add_special_tokens=False))
        bytes_per_token[domain] = round(sum(len(text.encode()) for text in some) / max(1, tokens), 4)
    everything = [text for some in texts.values() for text in some]
    megabytes = sum(len(text.encode()) for text in everything) / 1e6
    for _ in range(ENCODE_REPEATS):
        started = time.perf_counter()
        backend.encode_batch_fast(everything, add_special_tokens=False)
        best = max(best, megabytes / (time.perf_counter() - started))
    return {"encode_megabytes_per_second_per_core": round(best, 3), "bytes_per_token": bytes_per_token}


def describe(report: Report) -> Shown:
    """Yield the sample, and a line per trainer."""
    mix = ", ".join(f"{name} {share:.0%}" for name, share in report["mix"].items())
    sample = f"{report['text_bytes'] / 1e6:,.0f} MB ({mix})"
    yield f"{sample} to {report['text_vocab_size']:,} tokens on {report['cores']} cores"
    for one in report["trainers"]:
        if one["failed"]:
            yield f"{one['trainer']}: failed, {one['failed']}"
            continue
        bytes_per_token = ", ".join(f"{name} {value:.2f}" for name, value in one["bytes_per_token"].items())
        yield (
            f"{one['trainer']}: {one['seconds']:.1f} s ({one['cpu_seconds']:.1f} s of CPU)"
            f" | peak {human_bytes(one['peak_memory_bytes'])}"
            f" | encodes {one['encode_megabytes_per_second_per_core']:.1f} MB/s/core"
            f" | bytes per token {bytes_per_token}"
        )
