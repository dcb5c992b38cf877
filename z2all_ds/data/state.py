"""The state of the data as small JSON: merged from the ranks, and compared with the run that continues from it.

All functions are pure and independent of ranks: the state of all lanes can be distributed to any world size up to the
number of lanes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from z2all_ds.base.errors import DataError
from z2all_ds.data.packing import LaneState, fresh_cursor

STATE_VERSION = 3
READABLE_VERSIONS = (2, STATE_VERSION)
"""Version 2 has no kind of order per domain: all are "strided"."""


class StageState(TypedDict):
    """The settings that decide the samples of a stage."""

    name: str
    sequence_length: int
    shares: dict[str, float]


class StreamState(TypedDict):
    """State after the last batch consumed. `position` and `lanes` are the progress, the rest identifies the data."""

    version: int
    position: int
    """Number of the next global sample."""
    num_lanes: int
    seed: int
    packing: str
    tokenizer_fingerprint: str
    domains: dict[str, list[Any]]
    """Documents, fingerprint and kind of order of each domain that some stage reads, by sorted name."""
    stage: StageState
    """Stage of the last sample consumed, or of the first sample. Later stages may still be changed."""
    skip: list[list[int]]
    """Ranges [first, end) of global samples that are left out."""
    sizes: NotRequired[dict[str, int]]
    """Sizes of all domains, for shares by size; not in states of earlier versions, as the next two."""
    longest_sample: NotRequired[int]
    """Sequence length of the longest stage when the run began."""
    begin_of_text: NotRequired[bool]
    """A begin-of-text token is before every document."""
    padding_lengths: NotRequired[dict[str, list[int]]]
    """Length of samples at the beginning of each epoch so far, of domains whose order depends on it."""
    lanes: dict[str, LaneState]
    """Cursors by lane number (a string, as in JSON), in the order of `domains`."""


_NEVER_CHANGES = ("version", "num_lanes", "seed", "packing", "tokenizer_fingerprint")
_EQUAL_ON_ALL_RANKS = ("position", *_NEVER_CHANGES, "domains", "stage", "skip")


def merge_states(rank_states: Sequence[StreamState]) -> StreamState:
    """Merge the states of all ranks after the same step into one state with all lanes."""
    if not rank_states:
        raise DataError("data state", "there is no state to merge", "Gather state_dict() from every rank.")
    first = rank_states[0]
    lanes: dict[str, LaneState] = {}
    for rank, state in enumerate(rank_states):
        for key in _EQUAL_ON_ALL_RANKS:
            if state[key] != first[key]:  # type: ignore[literal-required]
                raise DataError(
                    f"data state of rank {rank}: {key}={_short(state[key])}",  # type: ignore[literal-required]
                    f"rank 0 has {_short(first[key])}",  # type: ignore[literal-required]
                    "Take the states of all ranks after the same step of the same run.",
                )
        lanes.update(state["lanes"])
    check_lanes_present(lanes, range(first["num_lanes"]))
    merged = first.copy()
    merged["lanes"] = {lane: lanes[lane] for lane in sorted(lanes, key=int)}
    lengths = [state.get("padding_lengths", {}) for state in rank_states]  # some ranks have begun fewer epochs
    merged["padding_lengths"] = {name: max((one[name] for one in lengths), key=len) for name in lengths[0]}
    return merged


def upgraded(state: StreamState) -> StreamState:
    """Return a state of any readable version in the form of this one; another one unchanged."""
    if state.get("version") != 2:
        return state
    changed = state.copy()
    changed["version"] = STATE_VERSION
    changed["domains"] = {name: [*identity, "strided"] for name, identity in state["domains"].items()}
    return changed


def check_lanes_present(lanes: Mapping[str, LaneState], wanted: Sequence[int]) -> None:
    missing = [lane for lane in wanted if str(lane) not in lanes]
    if missing:
        fix = "Merge the states of all ranks of one step: merge_states([...])."
        raise DataError(f"data state with {len(lanes)} lanes", f"lanes {_short(missing)} are missing", fix)


def resumed_lanes(saved: StreamState, here: StreamState, allow_data_change: bool) -> dict[int, LaneState]:
    """Return the saved cursors of the lanes in `here`, for the domains of `here`.

    `here` is the state that this run would have at the saved position. Report all differences in one error. With
    `allow_data_change` the corpus and the mixture may differ: an unchanged domain continues, a new or changed one
    starts at its first document.
    """
    _check_same_data(saved, here, allow_data_change)
    wanted = [int(lane) for lane in here["lanes"]]
    check_lanes_present(saved["lanes"], wanted)
    numbers = {
        name: number
        for number, (name, identity) in enumerate(saved["domains"].items())
        if here["domains"].get(name) == identity
    }
    return {
        lane: [
            list(saved["lanes"][str(lane)][numbers[name]]) if name in numbers else fresh_cursor(here["packing"])
            for name in here["domains"]
        ]
        for lane in wanted
    }


def _check_same_data(saved: StreamState, here: StreamState, allow_data_change: bool) -> None:
    if saved.get("version") != STATE_VERSION:
        rule = f"this package continues from versions {' and '.join(map(str, READABLE_VERSIONS))}"
        fix = "Use the package version that started the run, or start a new run from its weights."
        raise DataError(f"data state of version {saved.get('version')}", rule, fix)
    fixed = _differences({"begin_of_text": False, **saved}, here, (*_NEVER_CHANGES, "begin_of_text"))
    changed = [] if allow_data_change else data_changes(saved, here)
    if fixed or changed:
        fix = "Restore it, or continue with the new data: data.allow_change=true."
        if fixed:
            lanes = f" (data.num_lanes={saved['num_lanes']})" if saved["num_lanes"] != here["num_lanes"] else ""
            fix = f"Restore it{lanes} to continue, or start a new run."
        what = f"data state: {'; '.join(fixed + changed)}"
        raise DataError(what, "a run continues only with the data it started with", fix)


def data_changes(saved: StreamState, here: StreamState) -> list[str]:
    """Describe changes of the stage and of the domains that the run has read; later stages may add domains."""
    saved, lines = upgraded(saved), []
    for name in saved["stage"]["shares"]:
        before, now = saved["domains"][name], here["domains"].get(name)
        if now is None:
            lines.append(f"domain {name!r} is missing")
        elif before[:2] == now[:2] and before != now:
            lines.append(f"domain {name!r} has tokens of an earlier version (`z2all corpus tokenize --replace`)")
        elif before != now:
            what = f"{before[0]} documents, now {now[0]}" if before[0] != now[0] else f"{now[0]} documents, other text"
            lines.append(f"domain {name!r} has changed ({what})")
    return lines + _differences(saved["stage"], here["stage"], ("sequence_length", "shares"))


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    changed = (name for name in names if saved[name] != here[name])
    return [f"{name} was {_short(saved[name])} and is {_short(here[name])}" for name in changed]


def _short(value: Any, limit: int = 80) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
