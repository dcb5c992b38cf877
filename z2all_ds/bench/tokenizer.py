"""`z2all bench tokenizer`: time and peak memory of our trainers beside the Hugging Face trainer as it comes.

Each runs in a process of its own, on the same sample of text, one after the other. "hf_default" is what `tokenizers`
gives without further thought: byte-level BPE with its built-in way of cutting, which keeps a Chinese sentence whole.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from z2all_ds.base.console import heartbeat, human_bytes
from z2all_ds.base.errors import ConfigError
from z2all_ds.bench.memory import peak_memory_bytes
from z2all_ds.bench.text import built_in_text
from z2all_ds.tokenizer.bbpe import SEEN_AT_LEAST, learn_bbpe
from z2all_ds.tokenizer.sampling import SampledDomain, check_weights, open_sources, share_budget
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


@dataclass(frozen=True)
class TrainerCosts:
    """One trainer. A failed one has its last words and no figures."""

    trainer: str
    failed: str
    seconds: float | None = None
    """From the first byte read to the vocabulary."""
    cpu_seconds: float | None = None
    """Over all cores; less upset by other work on the machine."""
    peak_memory_bytes: int | None = None
    """Of the whole process, as the kernel counted it."""
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
    for name in names:
        if name not in TRAINERS:
            raise ConfigError(f"trainer {name!r}", f"there are {', '.join(TRAINERS)}", "Use one of these.")
    if sample_bytes < 1:
        raise ConfigError(f"bytes {sample_bytes}", "must be positive", f"Leave it at {SAMPLE_BYTES}.")
    with tempfile.TemporaryDirectory(prefix="z2all-bench-") as scratch:
        given = [str(one) for one in inputs] or [built_in_text(Path(scratch) / "corpus", sample_bytes)]
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
    job = json.dumps({"name": name, "inputs": inputs, "shares": shares, "text_vocab_size": text_vocab_size})
    code = "from z2all_ds.bench.tokenizer import work; work()"
    command = [sys.executable, "-c", code]
    with heartbeat(f"trainer {name}"):
        done = subprocess.run(command, input=job, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        why = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return TrainerCosts(name, why), 0
    figures = json.loads(done.stdout.splitlines()[-1])
    return TrainerCosts(name, "", **figures["costs"]), figures["text_bytes"]


class Sampled:
    """Texts for a trainer, counted."""

    def __init__(self, domains: Mapping[str, SampledDomain], shares: Mapping[str, int]) -> None:
        self._domains, self._shares = domains, shares
        self.bytes_of_text = 0

    def texts(self) -> Iterator[str]:
        for name, share in self._shares.items():
            for _, text in self._domains[name].sample(share):
                self.bytes_of_text += len(text.encode())
                yield text


def work() -> None:
    """The measured process: a job comes on stdin, figures go to stdout."""
    job: dict[str, Any] = json.load(sys.stdin)
    domains = open_sources(job["inputs"], with_fingerprint=False).domains
    shares: dict[str, int] = {name: share for name, share in job["shares"].items() if share}
    reading = Sampled(domains, shares)
    started, cpu_before = time.monotonic(), time.process_time()
    backend = TRAINERS[job["name"]](reading.texts(), job["text_vocab_size"])
    costs = {
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(time.process_time() - cpu_before, 2),
        "peak_memory_bytes": peak_memory_bytes(),
    }
    texts = {n: [text for _, text in domains[n].sample(min(s, ENCODE_BYTES_PER_DOMAIN))] for n, s in shares.items()}
    print(json.dumps({"costs": {**costs, **encode_speed(backend, texts)}, "text_bytes": reading.bytes_of_text}))


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


def to_json(costs: TokenizerCosts) -> str:
    return json.dumps(asdict(costs), indent=2, ensure_ascii=False)


def to_line(costs: TokenizerCosts) -> str:
    """For people, one line a trainer."""
    mix = ", ".join(f"{name} {100 * part:.0f}%" for name, part in costs.mix.items())
    head = f"{costs.text_bytes / 1e6:,.0f} MB ({mix}) to {costs.text_vocab_size:,} tokens on {costs.cores} cores"
    lines = [head]
    for one in costs.trainers:
        if one.failed:
            lines.append(f"{one.trainer}: failed, {one.failed}")
            continue
        assert one.bytes_per_token is not None and one.peak_memory_bytes is not None
        packed = ", ".join(f"{name} {value:.2f}" for name, value in one.bytes_per_token.items())
        parts = [
            f"{one.seconds:.1f} s ({one.cpu_seconds:.1f} s of CPU)",
            f"peak {human_bytes(one.peak_memory_bytes)}",
            f"encodes {one.encode_megabytes_per_second_per_core:.1f} MB/s/core",
            f"bytes per token {packed}",
        ]
        lines.append(f"{one.trainer}: " + " | ".join(parts))
    return "\n".join(lines)
