"""Which domain comes next: shares by tokens, kept by always drawing from the domain that is most behind.

A lane needs no dice for its mixture. It counts the tokens it took from each domain, and when a document is used up
the next comes from the domain whose count lies furthest below its share. The error is never more than about one
document a domain and lane, so shares are met in the short run too.
"""

import math
from collections.abc import Mapping, Sequence

from z2all_ds.data.order import permuted_index
from z2all_ds.errors import ConfigError

BYTES_PER_TOKEN_GUESS = 4
"""Only scales the head starts below; a wrong guess makes the first batches a little less even, nothing else."""

SHARE_DIGITS = 9
"""Shares are rounded to this many digits, because pow() may differ in its last bit from one C library to the next and
a share decides the order of the data."""


def resolve_shares(
    weights: Mapping[str, float] | None, temperature: float, bytes_by_domain: Mapping[str, int]
) -> dict[str, float]:
    """The share of tokens of each domain, by sorted name, summing to 1 (up to rounding).

    With `weights`, the domains named there are read and no others. Without, all are read and a share is proportional
    to size ** (1 / temperature): 1 keeps the sizes, more lifts small domains, infinity makes all equal.
    """
    known = ", ".join(sorted(bytes_by_domain)) or "none"
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature}", "it must be above 0", "Use 1 for shares by size.")
    if weights is None:
        parts = {name: float(size) ** (1.0 / temperature) for name, size in bytes_by_domain.items() if size > 0}
        if not parts:
            raise ConfigError("weights=None", "no domain of the corpus has any text", f"Its domains: {known}.")
    else:
        if temperature != 1.0:
            rule = "a temperature shapes shares by size and would be ignored beside weights"
            raise ConfigError(f"temperature={temperature}", rule, "Give weights or a temperature, not both.")
        parts = _checked_weights(weights, bytes_by_domain, known)
    total = math.fsum(parts.values())
    smallest = 10.0**-SHARE_DIGITS
    return {name: max(round(parts[name] / total, SHARE_DIGITS), smallest) for name in sorted(parts)}


def _checked_weights(weights: Mapping[str, float], bytes_by_domain: Mapping[str, int], known: str) -> dict[str, float]:
    if not weights:
        raise ConfigError("weights={}", "at least one domain needs a weight", f"Name some of: {known}; or give none.")
    for name, weight in weights.items():
        if name not in bytes_by_domain:
            raise ConfigError(f"weights: domain {name!r}", "the corpus has no such domain", f"It has: {known}.")
        if not (math.isfinite(weight) and weight > 0):
            fix = "Leave a domain out to read nothing of it."
            raise ConfigError(f"weights: {name}={weight}", "a weight must be a number above 0", fix)
    return {name: float(weight) for name, weight in weights.items()}


def next_domain(shares: Sequence[float], tokens_taken: Sequence[int], head_start_tokens: Sequence[int]) -> int:
    """Number of the domain most behind its share; of equals the first."""
    counted = [taken + head_start for taken, head_start in zip(tokens_taken, head_start_tokens, strict=True)]
    total = sum(counted)
    behind = [share * total - count for share, count in zip(shares, counted, strict=True)]
    return behind.index(max(behind))


def lane_head_starts(
    lane: int, num_lanes: int, seed: int, domain_names: Sequence[str], mean_document_tokens: Sequence[float]
) -> list[int]:
    """Tokens a lane pretends to have taken of each domain before its first document.

    Without them all lanes would begin alike (the first documents all of the first domain, the next all of the
    rarest) and the first batches would be nothing like the mixture. A head start of a random part of a document, a
    different part in each lane, puts the lanes where they would stand in the middle of a run.
    """
    starts = []
    for name, mean_tokens in zip(domain_names, mean_document_tokens, strict=True):
        # Over the lanes the parts are 0.5/L, 1.5/L, ... in shuffled order: even, and not in step between domains.
        part = permuted_index(lane, num_lanes, seed, 0, f"head start of {name}") + 0.5
        starts.append(int(part / num_lanes * mean_tokens))
    return starts


def mean_tokens_guess(num_bytes: int, num_documents: int) -> float:
    """Tokens of a middling document of a domain, guessed from the manifest."""
    return num_bytes / num_documents / BYTES_PER_TOKEN_GUESS
