"""`z2all bench tokenizer`: time and peak memory of our trainers, compared with the default Hugging Face trainer.

Each runs in a process of its own, on the same sample of text, one after the other. "hf_default" is byte-level BPE with
the default pre-tokenizer of `tokenizers`, which keeps a Chinese sentence whole.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

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
from z2all_ds.tokenizer.bbpe import SEEN_AT_LEAST, learn_bbpe
from z2all_ds.tokenizer.sampling import check_weights, open_sources, share_budget
from z2all_ds.tokenizer.spm import learn_spm

ENCODE_BYTES_PER_DOMAIN = 4_000_000
ENCODE_REPEATS = 3


def learn_hf_default(texts: Iterator[str], text_vocab_size: int) -> Tokenizer:
    """Trains with the same library and its own pre-tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=text_vocab_size,
        min_frequency=SEEN_AT_LEAST,
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


@dataclass(frozen=True)
class TrainerCosts:
    """One trainer; a failed one has the reason and no figures.

    Seconds are from the first byte read to the vocabulary, CPU seconds over all cores; the peak is that of the process.
    """

    trainer: str
    failed: str
    seconds: float | None = None
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None
    encode_megabytes_per_second_per_core: float | None = None
    bytes_per_token: dict[str, float] | None = None


def bench_tokenizer(
    inputs: Sequence[str | Path],
    sample_bytes: int,
    text_vocab_size: int,
    weights: Mapping[str, float] | None = None,
    names: Sequence[str] = DEFAULT_TRAINERS,
) -> Report:
    """Trains with each of `names` on the same text: a corpus folder, files, or else built-in text."""
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
                    found, text_bytes = in_new_process(measure_trainer, name, given, shares, text_vocab_size)
                except Exception as error:  # the other trainers are still measured
                    found = TrainerCosts(name, " ".join(f"{type(error).__name__}: {error}".split())[:300])
                costs.append(found)
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
) -> tuple[TrainerCosts, int]:
    """Trains once in this process. Returns the costs and the bytes of text that were read."""
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
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_before
    peak_memory_bytes = peak_of_process()
    samples = {
        domain: [text for _, text in domains[domain].sample(min(share, ENCODE_BYTES_PER_DOMAIN))]
        for domain, share in shares.items()
    }
    encoding = _measure_encoding(backend, samples)
    return TrainerCosts(name, "", round(seconds, 2), round(cpu_seconds, 2), peak_memory_bytes, *encoding), text_bytes


def _measure_encoding(backend: Tokenizer, texts: Mapping[str, list[str]]) -> tuple[float, dict[str, float]]:
    """Returns MB/s on one core, the best of three, as other work on the machine only slows it down, and bytes per token
    of each domain."""
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
    return round(best, 3), bytes_per_token


def describe(report: Report) -> Shown:
    """Yields the sample, and a line per trainer."""
    mix = ", ".join(f"{name} {share:.0%}" for name, share in report["mix"].items())
    sample = f"{report['text_bytes'] / 1e6:,.0f} MB ({mix})"
    yield f"{sample} to {report['text_vocab_size']:,} tokens on {report['cores']} cores"
    for one in report["trainers"]:
        if one.failed:
            yield f"{one.trainer}: failed, {one.failed}"
            continue
        bytes_per_token = ", ".join(f"{name} {value:.2f}" for name, value in (one.bytes_per_token or {}).items())
        yield (
            f"{one.trainer}: {one.seconds:.1f} s ({one.cpu_seconds:.1f} s of CPU)"
            f" | peak {human_bytes(one.peak_memory_bytes or 0)}"
            f" | encodes {one.encode_megabytes_per_second_per_core:.1f} MB/s/core | bytes per token {bytes_per_token}"
        )
