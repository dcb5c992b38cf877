"""What failures cost a run: how many to expect, how often to save, and which share of the time ends up as training.

Failures come at random and independently, at a rate that grows with the number of GPUs. Work since the last checkpoint
is lost, and starting again takes a while, in which the next failure may come. For the plainest case (nodes are replaced
at once) there is a closed form, Daly's (2006): a stretch that needs `s` seconds without a failure takes on average
M e^(r/M) (e^(s/M) - 1), with M between failures and r to start again. `simulate` needs no such plainness: nodes are
away for repair, spares take their place, fewer nodes go on more slowly, and a checkpoint counts only once written.
"""

import math
import random
import statistics
from dataclasses import dataclass

from z2all_ds.base.errors import ConfigError

GPU_HOURS_PER_FAILURE = 50_000.0
"""Llama 3: 419 unexpected interruptions in 54 days of 16,384 H100s, one in 50,700 GPU hours."""
HOUR = 3600.0


@dataclass(frozen=True)
class Interruptions:
    """How often a fleet is interrupted, and what that takes. Times in seconds."""

    between: float
    """Mean time between failures of the whole fleet."""
    restart: float
    """From a failure to the next counted step: noticed, nodes looked at, started, checkpoint read."""
    save: float
    """For which a checkpoint holds up training."""
    write: float = 0.0
    """After which, beside training, a checkpoint is safe on disk."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("time between failures", self.between, "more than zero"),
            ("restart time", self.restart, "zero or more"),
            ("time a save takes", self.save, "zero or more"),
            ("time until a save is written", self.write, "zero or more"),
        ):
            if not math.isfinite(value) or value < 0 or (value == 0 and least == "more than zero"):
                raise ConfigError(f"{name} = {value} s", f"must be {least}", "Give it in seconds.")


def seconds_between_failures(num_gpus: int, gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE) -> float:
    if num_gpus < 1:
        raise ConfigError(f"number of GPUs = {num_gpus}", "must be at least 1", "Give a positive number.")
    if not gpu_hours_per_failure > 0:
        raise ConfigError(
            f"GPU hours per failure = {gpu_hours_per_failure}", "must be more than zero", "Llama 3 saw 50,000."
        )
    return gpu_hours_per_failure * HOUR / num_gpus


def failure_probability(seconds: float, between: float) -> float:
    """That at least one failure comes within this time."""
    return -math.expm1(-seconds / between)


def best_interval(of: Interruptions) -> float:
    """Seconds of training between saves that lose least in all.

    The derivative of the closed form is zero where (1 - x) e^x = e^(-c), with x and c the interval and the save in
    units of the time between failures. Up to x = 1 the left side falls, from 1 to 0: one root, found by halving. How
    long the write takes does not matter: it makes every failure lose as much more, however often is saved.
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
    """Share of the time that is training that counts, where a node that fails is replaced at once."""
    if not interval > 0:
        raise ConfigError(f"interval between saves = {interval} s", "must be more than zero", "Give it in seconds.")
    # What is written beside training is safe late: a failure loses that much more, as if starting again took longer.
    stretch = (interval + of.save) / of.between
    again = (of.restart + of.write) / of.between
    if stretch + again > 700:  # e^700 is the end of what a float holds, and of any hope
        return 0.0
    return interval / (of.between * math.exp(again) * math.expm1(stretch))


@dataclass(frozen=True)
class Nodes:
    """Who trains, who waits to, and how long a node is away once it has failed."""

    training: int
    spare: int = 0
    least: int = 1
    """With fewer than this, training waits; with fewer than `training` it goes on, as much more slowly."""
    repair: float = 0.0
    """Seconds until a failed node is back."""

    def __post_init__(self) -> None:
        if self.training < 1 or self.spare < 0 or self.repair < 0 or not 1 <= self.least <= self.training:
            raise ConfigError(
                f"{self.training} nodes, {self.spare} spare, at least {self.least}, repaired in {self.repair} s",
                "at least one must train, none of the others may be negative, and `least` is at most all of them",
                "Give numbers of nodes that can be.",
            )


@dataclass(frozen=True)
class Simulated:
    """Over several simulated runs."""

    goodput: float
    """Mean share of a whole fleet's time that became training that counts."""
    error: float
    """Standard error of that mean."""
    failures: float
    """Mean number in a run."""


def simulate(
    of: Interruptions, interval: float, nodes: Nodes, seconds: float, runs: int = 20, seed: int = 0
) -> Simulated:
    """Runs of `seconds` each, failure by failure; `of.between` is for all of the training nodes at work."""
    if runs < 2 or not seconds > 0 or not interval > 0:
        raise ConfigError(
            f"{runs} simulated runs of {seconds} s, saving every {interval} s",
            "there must be at least two runs, and times must be more than zero",
            "Give more.",
        )
    numbers = random.Random(seed)
    found = [_one_run(of, interval, nodes, seconds, numbers) for _ in range(runs)]
    shares = [share for share, _ in found]
    error = statistics.stdev(shares) / math.sqrt(runs)
    return Simulated(statistics.mean(shares), error, statistics.mean(count for _, count in found))


def _one_run(
    of: Interruptions, interval: float, nodes: Nodes, seconds: float, numbers: random.Random
) -> tuple[float, int]:
    """(share of the time, failures). From each failure to the next there is nothing to be drawn: it is arithmetic."""
    now, done, failures = 0.0, 0.0, 0
    returns: list[float] = []
    """When those in repair will be back, soonest first. They are taken in again at the next restart."""
    while now < seconds:
        returns = [moment for moment in returns if moment > now]
        while nodes.training + nodes.spare - len(returns) < nodes.least:
            now = returns.pop(0)
        at_work = min(nodes.training, nodes.training + nodes.spare - len(returns)) / nodes.training
        failed = now + numbers.expovariate(at_work / of.between)
        begun = now + (of.restart if failures else 0.0)
        stretch = min(failed, seconds) - begun
        if stretch > 0:
            done += at_work * _safe_work(stretch, of, interval, ended=failed >= seconds)
        now = failed
        failures += failed < seconds
        returns.append(failed + nodes.repair)
    return done / seconds, failures


def _safe_work(stretch: float, of: Interruptions, interval: float, ended: bool) -> float:
    """Seconds of training in a stretch that a failure cannot take back; of one that reached the run's end, all."""
    whole, rest = divmod(stretch, interval + of.save)
    if ended:
        return whole * interval + min(rest, interval)
    # The last save before the failure may not have been written by then.
    return max(0.0, math.floor((stretch - of.write) / (interval + of.save))) * interval
