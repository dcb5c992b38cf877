"""What is printed at the start and at the end of a run: its size, its data, its result and the next command."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from z2all_ds.base.accounting import count_parameters
from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import RunStage, tokens_seen
from z2all_ds.base.errors import Z2allError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.data.documents import Domain, TokenArray, TokenRun
from z2all_ds.tokenizer import Z2allTokenizer
from z2all_ds.track.fields import BAD_RECORDS_PREFIX
from z2all_ds.train.inputs import RunData

SAMPLED_PLACES, DOCUMENTS_PER_PLACE, SAMPLED_TOKENS = 8, 8, 50_000
"""Limits per domain: an estimate of a corpus must not delay the start, and each place may be in another shard."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2


def start_lines(
    run: RunConfig,
    world_size: int,
    stages: Sequence[RunStage],
    shares: Sequence[Mapping[str, float]],
    data: RunData,
) -> Iterator[str]:
    """Yield what a person wants to check before a run costs hours. `shares`: of each domain, per stage."""
    first, total = stages[0], tokens_seen(list(stages), run.train.steps)
    accumulation = first.global_batch // (first.micro_batch * world_size)
    yield f"run folder {run.run_dir}"
    yield f"model: {count_parameters(run.model.shape).total:,} parameters"
    yield (
        f"tokens per step: ranks {world_size} x micro-batch {first.micro_batch} x accumulation {accumulation} x"
        f" length {first.sequence_length} = {first.tokens_per_step:,}; {run.train.steps:,} steps: {total:,}"
    )
    with suppress(Z2allError):  # the run itself reports a corpus that cannot be read
        read = dict.fromkeys(data.documents.domains, 0.0)
        for stage, of_stage in zip(stages, shares, strict=True):
            for name, share in of_stage.items():
                read[name] += stage.samples * stage.sequence_length * share
        sizes = {
            name: tokens_of(domain, data.tokenizer, name in data.counted)
            for name, domain in data.documents.domains.items()
        }
        epochs = ", ".join(f"{name} {_two_digits(read[name] / sizes[name])}" for name in sizes if read[name])
        size = sum(sizes.values())
        shown = f"{size / 1e6:,.2f} M" if size >= 1e6 else f"{size:,.0f}"
        yield f"corpus: about {shown} tokens; epochs that the run reads, about: {epochs}"


def _two_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def tokens_of(domain: Domain, tokenizer: Z2allTokenizer, is_counted: bool) -> float:
    """Return the tokens of a domain: their number if it is known, else an estimate.

    `is_counted`: the order of its documents has counted them.
    """
    if domain.num_tokens is not None:
        return domain.num_tokens
    if is_counted:
        return int(domain.token_counts().sum())
    return estimated_tokens(domain, tokenizer)


def estimated_tokens(domain: Domain, tokenizer: Z2allTokenizer) -> float:
    """Return an estimate from documents at several places: tokens per byte of text times the bytes of the domain, as
    documents differ in length; tokens per document if the manifest has no bytes of text."""
    tokens = text_bytes = documents = 0
    for place in range(SAMPLED_PLACES):
        # Multiples of the golden ratio are spread over the domain wherever the loop ends.
        first = int((place + 0.5) * _GOLDEN_RATIO % 1 * domain.num_documents)
        count = min(DOCUMENTS_PER_PLACE, domain.num_documents - first)
        run = domain.open_block(first, first + count).run(list(range(count)), SAMPLED_TOKENS // SAMPLED_PLACES)
        tokens += len(run.tokens) - len(run.ends)  # each ends with <|endoftext|>
        documents += len(run.ends)
        text_bytes += sum(len(tokenizer.decode(ids.tolist()).encode()) for ids in _texts(run))
        if tokens >= SAMPLED_TOKENS:
            break
    if domain.text_bytes is None or not text_bytes:
        return domain.num_documents * (1 + tokens / documents)
    return domain.num_documents + domain.text_bytes * tokens / text_bytes


def _texts(run: TokenRun) -> Iterator[TokenArray]:
    """Yield the tokens of each document without its <|endoftext|>."""
    for begin, end in pairwise([0, *run.ends]):
        yield run.tokens[begin : end - 1]


def ops_lines(choices: Iterable[Any], wanted: Mapping[str, str], is_cpu: bool) -> Iterator[str]:
    """Yield a line per op with the reason of its choice. On a CPU, where there is no choice, one line for those that
    were not asked for."""
    plain = []
    for choice in choices:
        if is_cpu and wanted.get(choice.op, "auto") == "auto" and "train.compile" not in choice.reason:
            plain.append(f"{choice.op} {choice.backend}")
        else:
            yield f"op {choice.op}: {choice.backend} ({choice.reason})"
    if plain:
        yield f"ops on the CPU: {', '.join(plain)}"


def end_lines(run: RunConfig, folder: RunFolder, records: Iterable[dict[str, Any]], outcome: str) -> Iterator[str]:
    """Yield the lowest loss of the whole run, its skipped records, its folder and the next command."""
    lowest: dict[str, tuple[float, int]] = {}
    bad_records: Counter[str] = Counter()
    for record in records:
        for name in record:
            if name.startswith(BAD_RECORDS_PREFIX):
                bad_records[name.removeprefix(BAD_RECORDS_PREFIX)] += record[name] or 0
        for key in ("loss", "validation_loss"):
            if record.get(key) is not None:
                lowest[key] = min(lowest.get(key, (float("inf"), 0)), (record[key], record["step"]))
    for key, (loss, step) in lowest.items():
        yield f"lowest {key.replace('_', ' ')} {loss:.4f} at step {step:,}"
    if bad_records:
        counts = ", ".join(f"{name} {count:,}" for name, count in bad_records.items())
        yield f"bad records skipped, counted in every epoch: {counts}"
    if run.writes_checkpoints:  # else the run was a measurement
        path = shlex.quote(str(folder.root))
        following = f"next: z2all export {path}, or z2all board {path}"
        again = "the same command resumes it" if outcome == "requeue" else "without train.stop_at_step it continues"
        yield f"run folder {folder.root}; {following if outcome == 'done' else again}"
