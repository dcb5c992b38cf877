"""The state of the data as small JSON: put together from the ranks, checked against a run, counted up.

All functions are pure and know no ranks: a state of all lanes can be dealt out to any world size that divides the
number of lanes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from z2all_ds.data.lanes import LaneState, carry_over
from z2all_ds.errors import DataError

STATE_VERSION = 1


class StreamState(TypedDict):
    """Belongs to the last batch consumed. Fields up to `weights` say which data it is, `lanes` how far each lane is."""

    version: int
    samples_consumed_global: int
    num_lanes: int
    sequence_length: int
    corpus_fingerprint: str
    tokenizer_fingerprint: str
    seed: int
    domains: list[str]
    weights: list[float]
    lanes: dict[str, LaneState]
    """By number of the lane, as text because JSON has no other keys."""


_ALWAYS_THE_SAME = ("version", "num_lanes", "sequence_length", "seed", "tokenizer_fingerprint")
_MAY_BE_CHANGED = ("corpus_fingerprint", "domains", "weights")


@dataclass(frozen=True)
class DomainTokens:
    """What a domain was asked to give and what it gave."""

    tokens: int
    """Taken since the mixture last changed."""
    asked_share: float
    realised_share: float


def merge_states(rank_states: Sequence[StreamState]) -> StreamState:
    """One state with all lanes from the states of all ranks, taken after the same step."""
    if not rank_states:
        raise DataError("data state", "there is no rank's state to merge", "Gather state_dict() from every rank.")
    first = rank_states[0]
    lanes: dict[str, LaneState] = {}
    for rank, state in enumerate(rank_states):
        for key in ("samples_consumed_global", *_ALWAYS_THE_SAME, *_MAY_BE_CHANGED):
            if state[key] != first[key]:  # type: ignore[literal-required]
                raise DataError(
                    f"data state of rank {rank}: {key}={_short(state[key])}",  # type: ignore[literal-required]
                    f"rank 0 has {_short(first[key])}",  # type: ignore[literal-required]
                    "Take the states of all ranks after the same step of the same run.",
                )
        twice = sorted(set(lanes) & set(state["lanes"]), key=int)
        if twice:
            rule = f"lanes {_short(twice)} were given twice"
            raise DataError(f"data state of rank {rank}", rule, "Merge each rank once.")
        lanes.update(state["lanes"])
    check_lanes_present(lanes, range(first["num_lanes"]))
    merged = first.copy()
    merged["lanes"] = {lane: lanes[lane] for lane in sorted(lanes, key=int)}
    return merged


def check_lanes_present(lanes: Mapping[str, LaneState], wanted: Sequence[int]) -> None:
    missing = [lane for lane in wanted if str(lane) not in lanes]
    if missing:
        fix = "Merge the states of all ranks with merge_states first."
        raise DataError("data state", f"lanes {_short(missing)} are missing", fix)


def adopt_lanes(saved: StreamState, here: StreamState, allow_data_change: bool) -> dict[int, LaneState]:
    """The saved lanes for the stream whose own state is `here` (its lanes are the ones wanted).

    Stops with all differences in one message. `allow_data_change` lets a changed corpus or mixture pass: see
    `carry_over` for what then goes on and what starts again.
    """
    _check_same_data(saved, here, allow_data_change)
    wanted = [int(lane) for lane in here["lanes"]]
    check_lanes_present(saved["lanes"], wanted)
    states = {lane: saved["lanes"][str(lane)] for lane in wanted}
    if all(saved[key] == here[key] for key in _MAY_BE_CHANGED):  # type: ignore[literal-required]
        return states
    corpus_changed = saved["corpus_fingerprint"] != here["corpus_fingerprint"]
    return {
        lane: carry_over(state, saved["domains"], here["domains"], corpus_changed) for lane, state in states.items()
    }


def _check_same_data(saved: StreamState, here: StreamState, allow_data_change: bool) -> None:
    keys = _ALWAYS_THE_SAME if allow_data_change else (*_ALWAYS_THE_SAME, *_MAY_BE_CHANGED)
    changed = [key for key in keys if saved.get(key) != here.get(key)]
    if not changed:
        return
    what = "; ".join(f"{key} was {_short(saved.get(key))} and is {_short(here.get(key))}" for key in changed)
    fix = "Set it back to go on, or begin a new run."
    if set(changed) <= set(_MAY_BE_CHANGED):
        fix = "Set it back, or go on with the new data from here: data.allow_change=true."
    raise DataError(f"data state: {what}", "a run goes on only with the data it began with", fix)


def check_world_size(samples_consumed_global: int, num_lanes: int, world_size: int) -> None:
    """A run stopped after k samples can go on where k and the lanes both deal out evenly."""
    if samples_consumed_global % world_size:
        allowed = divisors(math.gcd(samples_consumed_global, num_lanes))
        raise DataError(
            f"world_size={world_size}",
            f"{samples_consumed_global} samples were consumed, which do not deal out evenly to so many ranks",
            f"Go on with one of these world sizes: {', '.join(map(str, allowed))}.",
        )


def tokens_per_domain(state: StreamState) -> dict[str, DomainTokens]:
    """Tokens and shares of each domain over the lanes of a state: of one rank, or merged of all."""
    tokens = [sum(lane["taken"][index] for lane in state["lanes"].values()) for index in range(len(state["domains"]))]
    total = max(sum(tokens), 1)
    return {
        name: DomainTokens(count, asked, count / total)
        for name, count, asked in zip(state["domains"], tokens, state["weights"], strict=True)
    }


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _short(value: Any, limit: int = 60) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
