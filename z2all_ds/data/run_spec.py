"""The data settings of a run config as a stream spec and an opened tokenizer. Loads no torch."""

from pathlib import Path

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import run_stages
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.data.data_plan import StreamSpec
from z2all_ds.data.stages import StageSpec
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer, load_tokenizer


def open_tokenizer(run: RunConfig) -> Z2allTokenizer:
    """Open the run's tokenizer and check that it fits the model."""
    if not run.data.tokenizer:
        raise ConfigError("data.tokenizer", "is not set", "Give its folder: data.tokenizer=PATH.")
    tokenizer = load_tokenizer(Path(run.data.tokenizer).expanduser())
    if tokenizer.size > run.model.vocab_size:
        raise DataError(
            f"tokenizer {run.data.tokenizer} with {tokenizer.size} ids",
            f"does not fit model.vocab_size={run.model.vocab_size}",
            f"Set model.vocab_size to {-(-tokenizer.size // 64) * 64} or more.",
        )
    return tokenizer


def corpus_location(corpus: str) -> str | Path:
    """Return a URL unchanged, anything else as a path."""
    return corpus if "://" in corpus else Path(corpus).expanduser()


def stream_spec(run: RunConfig) -> StreamSpec:
    """Return the spec of the run's data stream."""
    if not run.data.corpus:
        raise ConfigError("data.corpus", "is not set", "Give its folder: data.corpus=PATH.")
    stages = [
        StageSpec(stage.sequence_length, stage.weights, stage.temperature, stage.samples, stage.name)
        for stage in run_stages(run)
    ]
    location = corpus_location(run.data.corpus)
    return StreamSpec(location, stages, run.train.seed, run.num_lanes, run.data.packing, run.data.skip_samples)
