"""The inputs of a run, checked together without torch: before the launch by one process, then by every rank."""

from typing import NamedTuple

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import ConfigError
from z2all_ds.data.data_plan import open_documents
from z2all_ds.data.documents import Documents
from z2all_ds.data.run_spec import corpus_location, open_tokenizer, stream_spec
from z2all_ds.data.stages import Schedule
from z2all_ds.data.state import divisors
from z2all_ds.evaluate.probe_rows import EncodedProbe, encode_probes
from z2all_ds.evaluate.probes import load_probes
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer


class RunData(NamedTuple):
    """A run's tokenizer and corpora, opened once per process."""

    tokenizer: Z2allTokenizer
    documents: Documents
    held_out: Documents | None
    """For validation, if configured."""


def check_data(run: RunConfig, world_size: int) -> RunData:
    """Open and check corpus, mixture, lanes, held-out samples, probes and tokenizer; errors are one line."""
    spec, tokenizer = stream_spec(run), open_tokenizer(run)
    documents = open_documents(spec.corpus_dir, tokenizer)
    sizes = {name: domain.num_bytes for name, domain in documents.domains.items()}
    schedule = Schedule(spec.stages, spec.skip, sizes, spec.num_lanes, spec.seed)
    if run.num_lanes % world_size:
        raise ConfigError(
            f"ranks={world_size}",
            f"must divide the {run.num_lanes} lanes of the data order (data.num_lanes)",
            f"Use one of {', '.join(map(str, divisors(run.num_lanes)))} ranks.",
        )
    schedule.check_world_size(world_size)
    held_out = None
    if run.validation.corpus:
        validation_batches(run, world_size)
        held_out = open_documents(corpus_location(run.validation.corpus), tokenizer)
    if run.probes.file:
        probes_asked(run, tokenizer)
    return RunData(tokenizer, documents, held_out)


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
