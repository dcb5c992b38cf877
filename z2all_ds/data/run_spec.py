"""The data settings of a run config as a stream spec and an opened tokenizer. Loads no torch."""

from pathlib import Path

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.paths import expanded
from z2all_ds.base.vocabulary_rows import rounded_rows
from z2all_ds.data.data_plan import StreamSpec
from z2all_ds.data.stages import StageSpec
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer, load_tokenizer


def open_tokenizer(run: RunConfig) -> Z2allTokenizer:
    """Open the run's tokenizer and check that it fits the model."""
    tokenizer = load_run_tokenizer(run)
    check_vocabulary(run, tokenizer)
    return tokenizer


def load_run_tokenizer(run: RunConfig) -> Z2allTokenizer:
    """Open the run's tokenizer."""
    if not run.data.tokenizer:
        raise ConfigError("data.tokenizer", "is not set", "Give its folder: data.tokenizer=PATH.")
    return load_tokenizer(expanded(run.data.tokenizer))


def check_vocabulary(run: RunConfig, tokenizer: Z2allTokenizer) -> None:
    """Raise if the model has fewer rows than the tokenizer has ids."""
    if tokenizer.size > run.model.vocab_size:
        raise DataError(
            f"tokenizer {run.data.tokenizer} with {tokenizer.size} ids",
            f"does not fit model.vocab_size={run.model.vocab_size}",
            f"Set model.vocab_size to auto, or to {rounded_rows(tokenizer.size)} or more.",
        )


def corpus_location(corpus: str) -> str | Path:
    """Return a URL unchanged, anything else as a path."""
    return corpus if "://" in corpus else expanded(corpus)


def stream_spec(run: RunConfig) -> StreamSpec:
    """Return the spec of the run's data stream."""
    if not run.data.corpus:
        raise ConfigError("data.corpus", "is not set", "Give its folder: data.corpus=PATH.")
    stages = [
        StageSpec(stage.sequence_length, stage.weights, stage.temperature, stage.samples, stage.name)
        for stage in run_stages(run)
    ]
    location = corpus_location(run.data.corpus)
    data = run.data
    return StreamSpec(
        location,
        stages,
        seed=run.train.seed,
        num_lanes=run.num_lanes,
        packing=data.packing,
        skip=data.skip_samples,
        on_bad_record=data.on_bad_record,
        begin_of_text=data.begin_of_text,
        verify_shards=data.verify_shards,
    )
