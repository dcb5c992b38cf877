"""What changes over the life of a stream: the mixture and the length of samples by stage, and samples left out.

Global samples are numbered 0, 1, 2, ... and keep their number when others are skipped. A stage lasts for so many
samples *given*, so that its border lies at the same step of training whether or not something was skipped before.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from z2all_ds.base.errors import ConfigError
from z2all_ds.data.mixture import Mixture, resolve_shares

SkipRange = tuple[int, int]
"""[first, end) of global samples."""


@dataclass(frozen=True)
class StageSpec:
    """One stage of a stream."""

    sequence_length: int
    """Tokens of a sample."""
    weights: Mapping[str, float] | None = None
    """Share of tokens of each domain, in any unit; domains not named are not read. None: by size."""
    temperature: float = 1.0
    """Without weights, shares are size ** (1 / temperature)."""
    samples: int | None = None
    """Samples given before the next stage begins. The last stage has no end."""
    name: str = ""
    """For people; by default its number."""


@dataclass(frozen=True)
class Stage:
    """A stage with its shares and borders worked out."""

    number: int
    name: str
    sequence_length: int
    shares: Mapping[str, float]
    first_given: int
    """Samples given before it."""
    mixture: Mixture


class Schedule:
    """All stages, and what is skipped."""

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
        first_given = 0
        for number, (spec, its_shares) in enumerate(zip(specs, shares, strict=True)):
            name = _name_of(number, spec)
            _check_stage(spec, name, is_last=number == len(specs) - 1)
            in_order = tuple(its_shares.get(domain, 0.0) for domain in self.domain_names)
            mixture = Mixture(in_order, num_lanes, seed, self.sample_after(first_given))
            self.stages.append(Stage(number, name, spec.sequence_length, its_shares, first_given, mixture))
            first_given += spec.samples or 0
        self._first_given = [stage.first_given for stage in self.stages]

    def stage_of(self, sample: int) -> Stage:
        """The stage a global sample belongs to; a skipped one to that of its time."""
        if len(self.stages) == 1:
            return self.stages[0]
        return self.stages[bisect_right(self._first_given, self.given_before(sample)) - 1]

    def is_skipped(self, sample: int) -> bool:
        return bool(self.skip) and any(first <= sample < end for first, end in self.skip)

    def given_before(self, sample: int) -> int:
        """How many of the samples 0 to `sample` - 1 are given out."""
        return sample - sum(min(end, sample) - first for first, end in self.skip if first < sample)

    def sample_after(self, given: int) -> int:
        """Number of the next sample after `given` of them were given out."""
        sample = given
        for first, end in self.skip:
            if first <= sample:
                sample += end - first
        return sample

    def check_world_size(self, world_size: int) -> None:
        """Ranks own lanes, so every border must come for all of them at once."""
        for first, end in self.skip:
            if first % world_size or end % world_size:
                wider = (first // world_size * world_size, -(-end // world_size) * world_size)
                raise ConfigError(
                    f"skip=[{first}, {end})",
                    f"both ends must be multiples of the {world_size} ranks",
                    f"Skip [{wider[0]}, {wider[1]}), or whole batches.",
                )
        for stage in self.stages[1:]:
            if stage.first_given % world_size:
                raise ConfigError(
                    f"stage {stage.name!r} after {stage.first_given} samples",
                    f"a stage must begin at a multiple of the {world_size} ranks",
                    "Let stages last for whole batches.",
                )


def merged_ranges(ranges: Sequence[SkipRange]) -> list[SkipRange]:
    """Sorted, without overlap."""
    merged: list[SkipRange] = []
    for first, end in sorted((int(first), int(end)) for first, end in ranges):
        if not 0 <= first < end:
            raise ConfigError(f"skip=[{first}, {end})", "a range goes up from 0", "Give [first, end) with first < end.")
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def _name_of(number: int, spec: StageSpec) -> str:
    return spec.name or str(number)


def _shares_of(number: int, spec: StageSpec, bytes_by_domain: Mapping[str, int]) -> dict[str, float]:
    try:
        return resolve_shares(spec.weights, spec.temperature, bytes_by_domain)
    except ConfigError as error:
        raise ConfigError(f"stage {_name_of(number, spec)!r}: {error.what}", error.rule, error.fix) from None


def _check_stage(spec: StageSpec, name: str, is_last: bool) -> None:
    if spec.sequence_length < 1:
        fix = "Set it to 1 or more."
        raise ConfigError(f"sequence_length={spec.sequence_length} of stage {name!r}", "it must be at least 1", fix)
    if not is_last and (spec.samples is None or spec.samples < 1):
        rule = "every stage but the last lasts for at least one sample"
        raise ConfigError(f"samples={spec.samples} of stage {name!r}", rule, "Say how long it lasts.")
