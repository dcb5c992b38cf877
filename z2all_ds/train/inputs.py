"""The inputs of a run, checked together without torch: before the launch by one process, then by every rank."""

from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.data.data_plan import DataPlan, open_documents
from z2all_ds.data.documents import Documents
from z2all_ds.data.run_spec import check_vocabulary, corpus_location, load_run_tokenizer, stream_spec
from z2all_ds.data.token_counts import Beat
from z2all_ds.evaluate.probe_rows import EncodedProbe, encode_probes
from z2all_ds.evaluate.probes import load_probes
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer


class RunData(NamedTuple):
    """A run's tokenizer and corpora, opened once per process."""

    tokenizer: Z2allTokenizer
    documents: Documents
    held_out: Documents | None
    """For validation, if configured."""
    counted: Set[str]
    """Domains whose tokens were counted."""


def require_folders(run: RunConfig) -> None:
    """Check that corpus and tokenizer are given and exist, in the order in which they are made. Before all else: what
    is wrong with the other settings matters only to a run that has data."""
    made_by = {"corpus": "z2all corpus build", "tokenizer": "z2all tokenizer train"}
    for name, verb in made_by.items():
        path = getattr(run.data, name)
        if not path:
            raise ConfigError(f"data.{name}", "is not set", f"Give its folder: data.{name}=PATH (made by `{verb}`).")
        location = corpus_location(path)
        if isinstance(location, Path) and not location.exists():
            raise DataError(f"data.{name}={path}", "no such folder", f"Correct the path, or make it with `{verb}`.")


def check_lanes(run: RunConfig, world_size: int) -> None:
    """Check that every rank has a lane."""
    if world_size > run.num_lanes:
        rule = f"must be at most the {run.num_lanes} lanes of the data order (data.num_lanes)"
        raise ConfigError(f"ranks={world_size}", rule, f"Use at most {run.num_lanes} ranks.")


def check_data(run: RunConfig, world_size: int, is_new: bool = True, beat: Beat | None = None) -> RunData:
    """Open and check corpus, mixture, lanes, held-out samples, probes and tokenizer; errors are one line.

    `is_new`: if not, ranges and stages are checked when the checkpoint is loaded, from its position on. With
    `beat`, which is called meanwhile, the tokens that a new run needs are counted.
    """
    spec, tokenizer = stream_spec(run), load_run_tokenizer(run)
    documents = open_documents(spec.corpus_dir, tokenizer, spec.on_bad_record, spec.verify_shards)
    check_vocabulary(run, tokenizer)  # after the corpus: a missing one is to be reported first
    plan = DataPlan.open(spec, tokenizer, documents)
    check_lanes(run, world_size)
    if is_new:
        plan.schedule.check_world_size(world_size)
    held_out = None
    if run.validation.corpus:
        validation_batches(run, world_size)
        location = corpus_location(run.validation.corpus)
        held_out = open_documents(location, tokenizer, spec.on_bad_record, spec.verify_shards)
    if run.probes.file:
        probes_asked(run, tokenizer)
    counted: set[str] = set()
    if is_new and beat:
        plan.prepare(beat)  # it may take minutes, here once for all ranks
        counted = {domain.name for domain in plan.counted()}
    return RunData(tokenizer, documents, held_out, counted)


def probes_asked(run: RunConfig, tokenizer: Z2allTokenizer) -> list[EncodedProbe]:
    """Return the run's probes as tokens; they must fit into the shortest samples of the run."""
    shortest = min(stage.sequence_length for stage in run_stages(run))
    return encode_probes(load_probes(run.probes.file), tokenizer, before=(), max_tokens=shortest)


def validation_batches(run: RunConfig, world_size: int) -> int:
    """Return the number of validation batches per rank."""
    samples, at_a_time = run.validation.samples, run.train.micro_batch * world_size
    if samples % at_a_time:
        raise ConfigError(
            f"validation.samples={samples}",
            f"must be a multiple of train.micro_batch × ranks = {run.train.micro_batch} × {world_size}",
            f"Set it to {-(-samples // at_a_time) * at_a_time}.",
        )
    return samples // at_a_time
