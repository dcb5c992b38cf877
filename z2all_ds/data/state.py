"""The state of the data as small JSON: put together from the ranks, and checked against the run that goes on with it.

All functions are pure and know no ranks: a state of all lanes can be dealt out to any world size that divides the
number of lanes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from z2all_ds.base.errors import DataError
from z2all_ds.data.lanes import LaneState
from z2all_ds.data.packing import Cursor, fresh_cursor

STATE_VERSION = 2


class StageState(TypedDict):
    """What decides the samples of a stage."""

    name: str
    sequence_length: int
    shares: dict[str, float]


class StreamState(TypedDict):
    """Belongs to the last batch consumed. `position` and `lanes` say how far it is, the rest which data it is."""

    version: int
    position: int
    """Number of the next global sample."""
    num_lanes: int
    seed: int
    packing: str
    tokenizer_fingerprint: str
    domains: dict[str, list[Any]]
    """Documents and fingerprint of each domain that is read in some stage, by sorted name."""
    stage: StageState
    """Of the last sample consumed; before the first, of that one. Later stages may still be changed."""
    skip: list[list[int]]
    """Ranges [first, end) of global samples that are left out."""
    lanes: dict[str, LaneState]
    """By number of the lane, as text because JSON has no other keys; the cursors are in the order of `domains`."""


_ALWAYS_THE_SAME = ("version", "num_lanes", "seed", "packing", "tokenizer_fingerprint")
_SAME_IN_ALL_RANKS = ("position", *_ALWAYS_THE_SAME, "domains", "stage", "skip")


def merge_states(rank_states: Sequence[StreamState]) -> StreamState:
    """One state with all lanes from the states of all ranks, taken after the same step."""
    if not rank_states:
        raise DataError("data state", "there is no rank's state to merge", "Gather state_dict() from every rank.")
    first = rank_states[0]
    lanes: dict[str, LaneState] = {}
    for rank, state in enumerate(rank_states):
        for key in _SAME_IN_ALL_RANKS:
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
        fix = "Merge the states of all ranks of one step: merge_states([...])."
        raise DataError(f"data state with {len(lanes)} lanes", f"lanes {_short(missing)} are missing", fix)


def adopt_lanes(saved: StreamState, here: StreamState, allow_data_change: bool) -> dict[int, LaneState]:
    """The saved cursors of the lanes that `here` has, for its domains.

    `here` is the state a stream of this run would have at the saved position. Stops with all differences in one
    message. With `allow_data_change` a changed corpus or mixture passes: a domain that is still the same goes on where
    it was, one that is new or was changed begins at its first document.
    """
    check_same_data(saved, here, allow_data_change)
    wanted = [int(lane) for lane in here["lanes"]]
    check_lanes_present(saved["lanes"], wanted)
    old_names = list(saved["domains"])
    places = [
        old_names.index(name) if _same_domain(saved, here, name) else None for name in here["domains"]
    ]  # of each domain of this run among the saved ones
    fresh: Cursor = fresh_cursor(here["packing"])
    return {
        lane: [
            list(fresh) if place is None else list(saved["lanes"][str(lane)][place]) for place in places
        ]
        for lane in wanted
    }  # fmt: skip


def check_same_data(saved: StreamState, here: StreamState, allow_data_change: bool) -> None:
    if saved.get("version") != STATE_VERSION:
        rule = f"this package goes on with version {STATE_VERSION}"
        fix = "Go on with the package that began the run, or begin a new one from its weights."
        raise DataError(f"data state of version {saved.get('version')}", rule, fix)
    fixed = [_was_and_is(key, saved[key], here[key]) for key in _ALWAYS_THE_SAME if saved[key] != here[key]]  # type: ignore[literal-required]
    changed = [] if allow_data_change else [*_changed_domains(saved, here), *_changed_stage(saved, here)]
    if not fixed and not changed:
        return
    fix = "Set it back to go on, or begin a new run."
    if not fixed:
        fix = "Set it back, or go on with the new data from here: data.allow_change=true."
    raise DataError(f"data state: {'; '.join(fixed + changed)}", "a run goes on only with the data it began with", fix)


def _changed_domains(saved: StreamState, here: StreamState) -> list[str]:
    """Only what the run has read matters: a domain that comes with a later stage is no change."""
    lines = []
    for name in saved["stage"]["shares"]:
        if name not in here["domains"]:
            lines.append(f"domain {name!r} is gone")
        elif not _same_domain(saved, here, name):
            before, now = saved["domains"][name][0], here["domains"][name][0]
            what = f"{before} documents, now {now}" if before != now else f"{now} documents, other text"
            lines.append(f"domain {name!r} was changed ({what})")
    return lines


def _changed_stage(saved: StreamState, here: StreamState) -> list[str]:
    old, new = saved["stage"], here["stage"]
    lines = []
    if old["sequence_length"] != new["sequence_length"]:
        lines.append(_was_and_is("sequence_length", old["sequence_length"], new["sequence_length"]))
    if old["shares"] != new["shares"]:
        lines.append(f"the shares of the domains were {_short(old['shares'])} and are {_short(new['shares'])}")
    return lines


def _same_domain(saved: StreamState, here: StreamState, name: str) -> bool:
    return name in saved["domains"] and saved["domains"][name] == here["domains"][name]


def check_world_size(position: int, num_lanes: int, world_size: int) -> None:
    """A run stopped before sample k can go on where k and the lanes both deal out evenly."""
    if position % world_size:
        allowed = divisors(math.gcd(position, num_lanes))
        raise DataError(
            f"world_size={world_size}",
            f"{position} samples were consumed, which do not deal out evenly to so many ranks",
            f"Go on with one of these world sizes: {', '.join(map(str, allowed))}.",
        )


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _was_and_is(what: str, was: Any, now: Any) -> str:
    return f"{what} was {_short(was)} and is {_short(now)}"


def _short(value: Any, limit: int = 80) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
