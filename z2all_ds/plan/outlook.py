"""The whole run: days and GPU hours for its tokens, checkpoints, and the cost of failures.

Failures are random and independent, at a rate proportional to the number of GPUs. A failure loses the work since the
last checkpoint, and a restart takes a while, in which the next failure may come. If failed nodes are replaced at once,
Daly's closed form (2006) holds: a stretch of `s` seconds without failure takes M e^(r/M) (e^(s/M) - 1) on average, with
M between failures and r per restart. `simulate` also covers repairs, spare nodes, fewer nodes that continue more
slowly, and checkpoints that count only once written.
"""

import math
import random
import statistics
from dataclasses import dataclass

from z2all_ds.base.accounting import count_parameters
from z2all_ds.base.errors import ConfigError
from z2all_ds.plan.estimate import Estimate

HOUR = 3600.0
GPU_HOURS_PER_FAILURE = 50_000.0
"""Llama 3: 419 unexpected interruptions in 54 days of 16,384 H100s, one per 50,700 GPU hours."""
CHECKPOINT_BYTES = 12
"""Per parameter: fp32 master weight and two moments."""
COPY_SPEED = 50e9
"""Bytes per second of a GPU's copy to pinned memory, for which training waits: 15.07 GB took 0.29 s."""
RESTART_SECONDS = 300.0
"""Assumed from a failure to the next new step: detection, preflight, start, reading the checkpoint."""
SIMULATED_RUNS = 20
MOST_FAILURES = 2000
"""Failures after which a simulated run ends, because its share of time no longer changes."""


@dataclass(frozen=True)
class Risks:
    """The user's assumptions about failures."""

    gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE
    restart_seconds: float = RESTART_SECONDS

    def __post_init__(self) -> None:
        hours, restart = self.gpu_hours_per_failure, self.restart_seconds
        if not 0 < hours < math.inf:
            raise ConfigError(f"--gpu-hours-per-failure {hours}", "must be above 0", "Llama 3 saw 50,000.")
        if not 0 <= restart < math.inf:
            raise ConfigError(f"--restart-seconds {restart}", "must be 0 or more", "300 is what we assume.")

    def seconds_between(self, gpus: int) -> float:
        """Return the mean time between failures of a fleet."""
        return self.gpu_hours_per_failure * HOUR / gpus


@dataclass(frozen=True)
class Interruptions:
    """Seconds between failures of the whole fleet, and seconds that failures and checkpoints cost."""

    between: float
    restart: float  # From a failure to the next new step
    save: float  # Training waits for a checkpoint
    write: float = 0.0  # Until a checkpoint is on disk, while training continues


@dataclass(frozen=True)
class Nodes:
    """Nodes of a simulated run."""

    training: int
    spare: int = 0
    least: int = 1  # With fewer nodes training waits; between `least` and `training` it continues more slowly
    repair: float = 0.0  # Seconds until a failed node returns


@dataclass(frozen=True)
class Simulated:
    """Means over several simulated runs."""

    goodput: float  # Share of the whole fleet's time that is training that counts
    error: float  # Standard error of the goodput
    failures: float  # Per run


def failure_probability(seconds: float, between: float) -> float:
    """Return the probability of at least one failure within this time."""
    return -math.expm1(-seconds / between)


def best_interval(of: Interruptions) -> float:
    """Return the seconds of training between saves that lose least time.

    The derivative of the closed form is zero where (1 - x) e^x = e^(-c), with x and c the interval and the save in
    units of the time between failures. The left side falls from 1 to 0 up to x = 1, so bisection finds the one root.
    The write time does not matter: it adds the same loss to every failure.
    """
    if of.save == 0:
        return 0.0
    target = math.exp(-of.save / of.between)
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - middle) * math.exp(middle) > target else (low, middle)
    return low * of.between


def goodput(of: Interruptions, interval: float) -> float:
    """Return the share of time that is training that counts, if a failed node is replaced at once."""
    # A checkpoint is safe only once written: each failure loses the write time too, as with a longer restart.
    stretch = (interval + of.save) / of.between
    again = (of.restart + of.write) / of.between
    if stretch + again > 700:  # e^700 is near the largest float
        return 0.0
    return interval / (of.between * math.exp(again) * math.expm1(stretch))


def simulate(
    of: Interruptions, interval: float, nodes: Nodes, seconds: float, runs: int = SIMULATED_RUNS, seed: int = 0
) -> Simulated:
    """Simulate runs of `seconds` each, failure by failure. `of.between` holds for all training nodes together."""
    numbers = random.Random(seed)
    found = [_one_run(of, interval, nodes, seconds, numbers) for _ in range(runs)]
    shares = [share for share, _ in found]
    error = statistics.stdev(shares) / math.sqrt(runs)
    return Simulated(statistics.mean(shares), error, statistics.mean(count for _, count in found))


def _one_run(
    of: Interruptions, interval: float, nodes: Nodes, seconds: float, numbers: random.Random
) -> tuple[float, int]:
    """Return (share of the time, failures)."""
    now, done, failures = 0.0, 0.0, 0
    returns: list[float] = []  # when nodes in repair return, soonest first; they join at the next restart
    while now < seconds:
        returns = [moment for moment in returns if moment > now]
        while nodes.training + nodes.spare - len(returns) < nodes.least:
            now = returns.pop(0)
        at_work = min(nodes.training, nodes.training + nodes.spare - len(returns)) / nodes.training
        failed = now + numbers.expovariate(at_work / of.between)
        stretch = min(failed, seconds) - (now + (of.restart if failures else 0.0))
        if stretch > 0:
            done += at_work * _safe_work(stretch, of, interval, ended=failed >= seconds)
        now = failed
        failures += failed < seconds
        returns.append(failed + nodes.repair)
    return done / seconds, failures


def _safe_work(stretch: float, of: Interruptions, interval: float, ended: bool) -> float:
    """Return the seconds of training that a failure at the end of a stretch cannot lose; all if the run ended."""
    if ended:
        whole, rest = divmod(stretch, interval + of.save)
        return whole * interval + min(rest, interval)
    # The last save before the failure may not be written yet.
    return max(0.0, math.floor((stretch - of.write) / (interval + of.save))) * interval


@dataclass(frozen=True)
class Outlook:
    """A run of `tokens`; pairs are (at least, at most)."""

    tokens: int
    days: tuple[float, float]  # Without failures
    gpu_hours: tuple[float, float]
    checkpoint_bytes: int
    save_seconds: float  # Training waits
    write_seconds: float
    interval_seconds: float  # Between saves, for the least loss
    interval_steps: int
    failure_probability: float  # Of at least one failure
    failures: float  # Expected number
    goodput: float  # Share of the time that is training that counts, by the closed form
    simulated: Simulated


def look_ahead(of: Estimate, tokens: int, risks: Risks) -> Outlook | None:
    """Return the outlook by the longer step time, or None where step times are not known."""
    if of.time is None:
        return None
    steps = tokens / of.tokens_per_step
    days = (steps * of.time.least / 86400, steps * of.time.most / 86400)
    fleet = of.fleet
    checkpoint = CHECKPOINT_BYTES * count_parameters(of.run.model.shape).total
    # Assumes the slowest case: one disk that all machines share.
    save, write = checkpoint / fleet.gpus / COPY_SPEED, checkpoint / fleet.host.disk
    between = risks.seconds_between(fleet.gpus)
    interruptions = Interruptions(between, risks.restart_seconds, save, write)
    # A save must be written before the next begins.
    interval = max(best_interval(interruptions), write, of.time.most)
    seconds = days[1] * 86400
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
        simulated=simulate(interruptions, interval, Nodes(fleet.nodes), min(seconds, MOST_FAILURES * between)),
    )
