"""Stages of a stream, each with its own mixture and sample length, and ranges of samples that are skipped.

Global samples are numbered 0, 1, 2, ... and keep their number when others are skipped. The length of a stage counts
only samples that are *used* (not skipped), so it ends at the same training step whether or not samples were skipped.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from z2all_ds.base.errors import ConfigError
from z2all_ds.data.mixture import Mixture, resolve_shares

SkipRange = tuple[int, int]
"""[first, end) of global samples."""


@dataclass(frozen=True)
class StageSpec:
    """One stage of a stream."""

    sequence_length: int
    """Tokens per sample."""
    weights: Mapping[str, float] | None = None
    """Relative share of tokens per domain; other domains are not read. None: by size."""
    temperature: float = 1.0
    """Without weights, shares are size ** (1 / temperature)."""
    samples: int | None = None
    """Samples used before the next stage begins. The last stage has no end."""
    name: str = ""
    """Shown to users; by default its number."""


@dataclass(frozen=True)
class Stage:
    """A stage with its shares and its start computed."""

    number: int
    name: str
    sequence_length: int
    shares: Mapping[str, float]
    first_used: int
    """Samples used before it."""
    mixture: Mixture


class Schedule:
    """All stages and the skipped ranges."""

    def __init__(
        self,
        specs: Sequence[StageSpec],
        skip: Sequence[SkipRange],
        bytes_by_domain: Mapping[str, int],
        num_lanes: int,
        seed: int,
    ) -> None:
        if not specs:
            raise ConfigError("stages=[]", "a stream needs at least one stage", "Give a sequence length.")
        self.skip = merged_ranges(skip)
        shares = [_shares_of(number, spec, bytes_by_domain) for number, spec in enumerate(specs)]
        self.domain_names = sorted(set().union(*shares))
        self.stages: list[Stage] = []
        first_used = 0
        for number, (spec, stage_shares) in enumerate(zip(specs, shares, strict=True)):
            name = spec.name or str(number)
            _check_stage(spec, name, is_last=number == len(specs) - 1)
            share_list = tuple(stage_shares.get(domain, 0.0) for domain in self.domain_names)
            mixture = Mixture(share_list, num_lanes, seed, self.sample_after(first_used))
            self.stages.append(Stage(number, name, spec.sequence_length, stage_shares, first_used, mixture))
            first_used += spec.samples or 0
        self._first_used = [stage.first_used for stage in self.stages]

    def stage_of(self, sample: int) -> Stage:
        """Return the stage of a global sample, also of a skipped one."""
        if len(self.stages) == 1:
            return self.stages[0]
        return self.stages[bisect_right(self._first_used, self.used_before(sample)) - 1]

    def length_after(self, domain: str, tokens: int) -> int:
        """Return the length of samples once about this many tokens of a domain were read. Later stages, which may still
        change, make no difference."""
        left = float(tokens)
        for stage, following in pairwise(self.stages):
            samples = following.first_used - stage.first_used
            left -= samples * stage.shares.get(domain, 0.0) * stage.sequence_length
            if left < 0:
                return stage.sequence_length
        return self.stages[-1].sequence_length

    def is_skipped(self, sample: int) -> bool:
        return any(first <= sample < end for first, end in self.skip)

    def used_before(self, sample: int) -> int:
        """Return how many of the samples 0 to `sample` - 1 are used."""
        return sample - sum(min(end, sample) - first for first, end in self.skip if first < sample)

    def sample_after(self, used: int) -> int:
        """Return the number of the next sample after `used` of them were used."""
        sample = used
        for first, end in self.skip:
            if first <= sample:
                sample += end - first
        return sample

    def check_world_size(self, world_size: int, begin: int = 0) -> None:
        """Check that the skipped ranges and stages after sample `begin` begin and end for all ranks at once.

        The ranks share out the samples from `begin` on, where the run started or continued.
        """
        since = f", counted from sample {begin} where the run continues" if begin else ""
        for first, end in self.skip:
            ahead = max(first - begin, 0)
            if end > begin and (ahead % world_size or (end - begin) % world_size):
                wider = (begin + ahead // world_size * world_size, begin - (begin - end) // world_size * world_size)
                raise ConfigError(
                    f"skip=[{first}, {end})",
                    f"both ends must be multiples of the {world_size} ranks{since}",
                    f"Skip [{wider[0]}, {wider[1]}), or whole batches.",
                )
        for stage in self.stages[1:]:
            ahead = stage.first_used - self.used_before(begin)
            if ahead > 0 and ahead % world_size:
                raise ConfigError(
                    f"stage {stage.name!r} after {stage.first_used} samples",
                    f"a stage must begin at a multiple of the {world_size} ranks{since}",
                    "Make stages a whole number of batches long.",
                )


def merged_ranges(ranges: Sequence[SkipRange]) -> list[SkipRange]:
    """Return the ranges sorted and without overlap."""
    merged: list[SkipRange] = []
    for first, end in sorted((int(first), int(end)) for first, end in ranges):
        if not 0 <= first < end:
            raise ConfigError(f"skip=[{first}, {end})", "must be 0 <= first < end", "Give [first, end).")
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def _shares_of(number: int, spec: StageSpec, bytes_by_domain: Mapping[str, int]) -> dict[str, float]:
    try:
        return resolve_shares(spec.weights, spec.temperature, bytes_by_domain)
    except ConfigError as error:
        raise ConfigError(f"stage {spec.name or str(number)!r}: {error.what}", error.rule, error.fix) from None


def _check_stage(spec: StageSpec, name: str, is_last: bool) -> None:
    if spec.sequence_length < 1:
        fix = "Set it to 1 or more."
        raise ConfigError(f"sequence_length={spec.sequence_length} of stage {name!r}", "it must be at least 1", fix)
    if not is_last and (spec.samples is None or spec.samples < 1):
        rule = "every stage but the last needs at least one sample"
        raise ConfigError(f"samples={spec.samples} of stage {name!r}", rule, "Set its number of samples.")
