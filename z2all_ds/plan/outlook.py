"""The whole run: days and GPU hours for its tokens, checkpoints, and what failures make of it."""

import math
from dataclasses import dataclass

from z2all_ds.base.accounting import count_parameters
from z2all_ds.base.errors import ConfigError
from z2all_ds.plan.estimate import Estimate
from z2all_ds.plan.failures import (
    GPU_HOURS_PER_FAILURE,
    Interruptions,
    Nodes,
    Simulated,
    best_interval,
    failure_probability,
    goodput,
    seconds_between_failures,
    simulate,
)

CHECKPOINT_BYTES = 12
"""A parameter: fp32 master and two moments; weights are made of the master."""
COPY_SPEED = 50e9
"""Bytes a second at which a GPU's part of the state goes to pinned memory while training waits: 15.07 GB in 0.29 s."""
RESTART_SECONDS = 300.0
"""Assumed, from a failure to the next step that is new: noticed, preflight, start, checkpoint read."""
SIMULATED_RUNS = 20
MOST_FAILURES = 2000
"""In a simulated run: a longer one is cut there, as its share of time no longer changes."""


@dataclass(frozen=True)
class Risks:
    """What the user expects of failures."""

    gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE
    restart_seconds: float = RESTART_SECONDS

    def __post_init__(self) -> None:
        hours, restart = self.gpu_hours_per_failure, self.restart_seconds
        if not (math.isfinite(hours) and hours > 0):
            raise ConfigError(f"--gpu-hours-per-failure {hours}", "must be above 0", "Llama 3 saw 50,000.")
        if not (math.isfinite(restart) and restart >= 0):
            raise ConfigError(f"--restart-seconds {restart}", "must be 0 or more", "300 is what we assume.")


@dataclass(frozen=True)
class Outlook:
    """Of a run of `tokens`; (at least, at most) where there are two."""

    tokens: int
    days: tuple[float, float]
    """Without failures."""
    gpu_hours: tuple[float, float]
    checkpoint_bytes: int
    save_seconds: float
    """For which training waits."""
    write_seconds: float
    interval_seconds: float
    """Between saves, so that least is lost."""
    interval_steps: int
    failure_probability: float
    """That at least one comes."""
    failures: float
    """Expected."""
    goodput: float
    """Share of the time that is training that counts, by the closed form."""
    simulated: Simulated


def look_ahead(of: Estimate, tokens: int, risks: Risks) -> Outlook | None:
    """None where step times are not known. By the longer step time, where there is one figure."""
    days = of.days(tokens)
    if days is None or of.time is None:
        return None
    fleet = of.fleet
    checkpoint = CHECKPOINT_BYTES * count_parameters(of.run.model.shape).total
    # The disk is taken to be one that all machines share, the slowest case.
    save, write = checkpoint / fleet.gpus / COPY_SPEED, checkpoint / fleet.host.disk
    between = seconds_between_failures(fleet.gpus, risks.gpu_hours_per_failure)
    interruptions = Interruptions(between, risks.restart_seconds, save, write)
    # A save must be written before the next begins.
    interval = max(best_interval(interruptions), write, of.time.most)
    seconds = days[1] * 86400
    simulated = min(seconds, MOST_FAILURES * between)
    return Outlook(
        tokens=tokens,
        days=days,
        gpu_hours=(days[0] * 24 * fleet.gpus, days[1] * 24 * fleet.gpus),
        checkpoint_bytes=checkpoint,
        save_seconds=save,
        write_seconds=write,
        interval_seconds=interval,
        interval_steps=max(1, round(interval / of.time.most)),
        failure_probability=failure_probability(seconds, between),
        failures=seconds / between,
        goodput=goodput(interruptions, interval),
        simulated=simulate(interruptions, interval, Nodes(fleet.nodes), simulated, SIMULATED_RUNS),
    )
