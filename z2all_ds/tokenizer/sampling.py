"""Streams a fair share of a corpus: the same byte budget for each domain, and documents from all over each one."""

from collections.abc import Iterator
from pathlib import Path

from z2all_ds.corpus.manifest import Manifest
from z2all_ds.corpus.schema import parse_record
from z2all_ds.errors import DataError


def share_budget(available: dict[str, int], budget: int) -> dict[str, int]:
    """Bytes for each domain: equal parts; what a small domain cannot use goes to the larger ones."""
    shares: dict[str, int] = {}
    left = budget
    # Smallest first, so that what each leaves over is known when the larger ones divide the rest.
    for place, domain in enumerate(sorted(available, key=lambda name: (available[name], name))):
        shares[domain] = min(available[domain], left // (len(available) - place))
        left -= shares[domain]
    return shares


def sample_texts(corpus_dir: Path, manifest: Manifest, domain: str, budget: int) -> Iterator[str]:
    """About `budget` bytes of documents of a domain, evenly spread from its first shard to its last.

    Bytes are those of the JSON lines, which the manifest knows beforehand. A line is taken whenever the bytes taken so
    far lag behind their due share of the bytes seen so far. At least one document is given.
    """
    total = manifest.domains[domain][1]
    seen = taken = 0
    for shard in manifest.shards:
        if shard.domain != domain:
            continue
        try:
            with open(corpus_dir / shard.path, "rb") as stream:
                for number, line in enumerate(stream, 1):
                    if taken * total <= seen * budget and taken < budget:
                        taken += len(line)
                        yield parse_record(line, f"{shard.path}:{number}").content
                    seen += len(line)
        except OSError as error:
            fix = "Restore the shard or build the corpus again."
            raise DataError(f"shard {corpus_dir / shard.path}", f"not readable ({error.strerror})", fix) from None
