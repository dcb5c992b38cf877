"""What decides the order of the data, and the corpus it is about. Needs no torch: a login node can check it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.corpus.reading.readers import open_domains
from z2all_ds.data.documents import Documents, RawDomain, Tokenizer
from z2all_ds.data.packing import PACKING_MODES
from z2all_ds.data.stages import SkipRange, StageSpec
from z2all_ds.data.state import divisors
from z2all_ds.data.tokens.reading import is_token_corpus, open_token_corpus


@dataclass(frozen=True)
class StreamSpec:
    """What decides the order of the data, beside the corpus and the tokenizer themselves."""

    corpus_dir: str | Path
    """Folder (or URL) with raw shards and their manifest, or with token shards."""
    stages: Sequence[StageSpec]
    """At least one."""
    seed: int = 0
    """Key of all shuffling."""
    num_lanes: int = 256
    """Fixed for the life of a run; the world size must divide it."""
    packing: str = "cut"
    """cut: no padding. best_fit: documents that fit into a sample are not cut."""
    skip: Sequence[SkipRange] = ()
    """Global samples [first, end) to leave out."""


def open_documents(corpus_dir: str | Path, tokenizer: Tokenizer) -> Documents:
    """A corpus of either kind; token shards must be of this tokenizer."""
    if not is_token_corpus(corpus_dir):
        readers = open_domains(corpus_dir, load_manifest(corpus_dir))
        return Documents(
            {name: RawDomain(reader, tokenizer) for name, reader in readers.items()}, tokenizer.fingerprint
        )
    documents = open_token_corpus(corpus_dir)
    if documents.tokenizer_fingerprint != tokenizer.fingerprint:
        rule = "its tokens were made with another tokenizer than this run's"
        raise DataError(str(corpus_dir), rule, "Give that tokenizer, or run `z2all corpus tokenize` again.")
    return documents


def check_shape(spec: StreamSpec, rank: int, world_size: int) -> None:
    for name, value in (("num_lanes", spec.num_lanes), ("world_size", world_size)):
        if value < 1:
            raise ConfigError(f"{name}={value}", "it must be at least 1", f"Set {name} to 1 or more.")
    if spec.num_lanes % world_size:
        raise ConfigError(
            f"world_size={world_size}",
            f"it must divide num_lanes={spec.num_lanes}",
            f"Allowed world sizes: {', '.join(map(str, divisors(spec.num_lanes)))}.",
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank}", f"ranks go from 0 to {world_size - 1}", "Check RANK and WORLD_SIZE.")
    if spec.packing not in PACKING_MODES:
        raise ConfigError(f"packing={spec.packing!r}", f"there are {', '.join(PACKING_MODES)}", "Use one of these.")
