"""The inputs of a run, checked together and without torch: before the launch by one process, then by every rank."""

from pathlib import Path

from z2all_ds.config import RunConfig
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.data.mixture import resolve_shares
from z2all_ds.data.state import divisors
from z2all_ds.errors import ConfigError, DataError
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer, load_tokenizer


def open_tokenizer(run: RunConfig) -> Z2allTokenizer:
    """The run's tokenizer, which must fit the model."""
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


def check_inputs(run: RunConfig, world_size: int) -> None:
    """Corpus, mixture, lanes and tokenizer; whatever is wrong is one line."""
    if not run.data.corpus:
        raise ConfigError("data.corpus", "is not set", "Give its folder: data.corpus=PATH.")
    manifest = load_manifest(Path(run.data.corpus).expanduser())
    sizes = {domain: size for domain, (_, size) in manifest.domains.items()}
    resolve_shares(run.data.weights, run.data.temperature, sizes)
    open_tokenizer(run)
    if run.num_lanes % world_size:
        raise ConfigError(
            f"ranks={world_size}",
            f"must divide the {run.num_lanes} lanes of the data order (data.num_lanes)",
            f"Use one of {', '.join(map(str, divisors(run.num_lanes)))} ranks.",
        )
