"""`z2all bench tokenizer`: time and peak memory of our trainers, compared with the Hugging Face trainer as it is.

Each runs in a process of its own, on the same sample of text, one after the other. "hf_default" is what `tokenizers`
gives without further thought: byte-level BPE with its built-in way of cutting, which keeps a Chinese sentence whole.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from z2all_ds.base.console import heartbeat, human_bytes
from z2all_ds.base.process_memory import peak_of_process
from z2all_ds.base.reports import Shown
from z2all_ds.bench.shared import built_in_text, require_at_least, require_known, run_process, scratch_folder, why_ended
from z2all_ds.tokenizer.bbpe import MIN_FREQUENCY, learn_bbpe
from z2all_ds.tokenizer.sampling import check_weights, open_sources, share_budget
from z2all_ds.tokenizer.spm import learn_spm

SAMPLE_BYTES = 20_000_000
TEXT_VOCAB_SIZE = 16_000
ENCODE_BYTES_PER_DOMAIN = 4_000_000
ENCODE_REPEATS = 3


def learn_hf_default(texts: Iterator[str], text_vocab_size: int) -> Tokenizer:
    """The same trainer with the library's own pre-tokenizer."""
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


@dataclass(frozen=True)
class TrainerCosts:
    """One trainer; a failed one has the reason and no figures. Seconds are from the first byte read to the vocabulary,
    CPU seconds over all cores; the peak is that of the whole process."""

    trainer: str
    failed: str
    seconds: float | None = None
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None
    encode_megabytes_per_second_per_core: float | None = None
    bytes_per_token: dict[str, float] | None = None


@dataclass(frozen=True)
class TokenizerCosts:
    """All trainers on one sample."""

    text_vocab_size: int
    text_bytes: int
    mix: dict[str, float]
    """Part of each domain in the sample."""
    cores: int
    machine: str
    packages: dict[str, str]
    trainers: list[TrainerCosts]


def bench_tokenizer(
    inputs: Sequence[str | Path] = (),
    sample_bytes: int = SAMPLE_BYTES,
    text_vocab_size: int = TEXT_VOCAB_SIZE,
    weights: Mapping[str, float] | None = None,
    names: Sequence[str] = ("bbpe", "hf_default"),
) -> TokenizerCosts:
    """Trains with each of `names` on the same text: a corpus folder, files, or else the text every machine has."""
    require_known("trainer", names, list(TRAINERS))
    require_at_least(1, bytes=sample_bytes)
    with scratch_folder() as scratch:
        given = [str(one) for one in inputs] or [built_in_text(scratch / "corpus", sample_bytes)]
        sources = open_sources(given, with_fingerprint=False)
        if weights is not None:
            check_weights(weights, list(sources.domains))
        shares = share_budget({name: one.bytes for name, one in sources.domains.items()}, sample_bytes, weights)
        results = [_in_own_process(name, given, shares, text_vocab_size) for name in names]
    return TokenizerCosts(
        text_vocab_size=text_vocab_size,
        text_bytes=max(text_bytes for _, text_bytes in results),
        mix={name: round(share / sum(shares.values()), 4) for name, share in shares.items()},
        cores=len(os.sched_getaffinity(0)),
        machine=platform.machine(),
        packages={name: version(name) for name in ("tokenizers", *(["sentencepiece"] if "spm" in names else []))},
        trainers=[costs for costs, _ in results],
    )


def _in_own_process(
    name: str, inputs: list[str], shares: dict[str, int], text_vocab_size: int
) -> tuple[TrainerCosts, int]:
    job = {"name": name, "inputs": inputs, "shares": shares, "text_vocab_size": text_vocab_size}
    with heartbeat(f"trainer {name}"):
        done = run_process(["-c", "from z2all_ds.bench.tokenizer import work; work()"], job)
    if done.returncode:
        return TrainerCosts(name, why_ended(done.returncode)), 0
    figures = json.loads(done.stdout.splitlines()[-1])
    return TrainerCosts(name, "", **figures["costs"]), figures["text_bytes"]


def work() -> None:
    """Measures in a process of its own: a job comes on stdin, figures go to stdout."""
    job: dict[str, Any] = json.load(sys.stdin)
    domains = open_sources(job["inputs"], with_fingerprint=False).domains
    shares: dict[str, int] = {name: share for name, share in job["shares"].items() if share}
    bytes_of_text = 0

    def texts() -> Iterator[str]:
        nonlocal bytes_of_text
        for name, share in shares.items():
            for _, text in domains[name].sample(share):
                bytes_of_text += len(text.encode())
                yield text

    started, cpu_before = time.monotonic(), time.process_time()
    backend = TRAINERS[job["name"]](texts(), job["text_vocab_size"])
    costs = {
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(time.process_time() - cpu_before, 2),
        "peak_memory_bytes": peak_of_process(),
    }
    some = {n: [text for _, text in domains[n].sample(min(s, ENCODE_BYTES_PER_DOMAIN))] for n, s in shares.items()}
    print(json.dumps({"costs": {**costs, **encode_speed(backend, some)}, "text_bytes": bytes_of_text}))


def encode_speed(backend: Tokenizer, texts: Mapping[str, list[str]]) -> dict[str, Any]:
    """On one core; the best of three, as other work on the machine can only slow it down."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    packed, best = {}, 0.0
    for name, some in texts.items():
        tokens = sum(len(found.ids) for found in backend.encode_batch_fast(some, add_special_tokens=False))
        packed[name] = round(sum(len(text.encode()) for text in some) / max(1, tokens), 4)
    everything = [text for some in texts.values() for text in some]
    megabytes = sum(len(text.encode()) for text in everything) / 1e6
    for _ in range(ENCODE_REPEATS):
        started = time.perf_counter()
        backend.encode_batch_fast(everything, add_special_tokens=False)
        best = max(best, megabytes / (time.perf_counter() - started))
    return {"encode_megabytes_per_second_per_core": round(best, 3), "bytes_per_token": packed}


def describe(costs: TokenizerCosts) -> Shown:
    """Yields the sample, and a line per trainer."""
    mix = ", ".join(f"{name} {part:.0%}" for name, part in costs.mix.items())
    yield f"{costs.text_bytes / 1e6:,.0f} MB ({mix}) to {costs.text_vocab_size:,} tokens on {costs.cores} cores"
    for one in costs.trainers:
        if one.failed:
            yield f"{one.trainer}: failed, {one.failed}"
            continue
        packed = ", ".join(f"{name} {value:.2f}" for name, value in (one.bytes_per_token or {}).items())
        yield (
            f"{one.trainer}: {one.seconds:.1f} s ({one.cpu_seconds:.1f} s of CPU)"
            f" | peak {human_bytes(one.peak_memory_bytes or 0)}"
            f" | encodes {one.encode_megabytes_per_second_per_core:.1f} MB/s/core | bytes per token {packed}"
        )
