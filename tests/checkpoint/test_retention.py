"""Retention of checkpoints: properties of the rules, and real folders."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.making import make, make_validated, names
from z2all_ds.base.config import load_run_config
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.layout import Checkpoint, find_latest
from z2all_ds.checkpoint.retention import Retention, Saved, prune, reasons_to_keep, retention_reasons

LAST_TWO = Retention(keep_last=2)


def damage(path: Path) -> None:
    with (path / "rng_rank_0000.pt").open("ab") as file:
        file.write(b"more")


# Properties of the rules


@st.composite
def saved_ones(draw: st.DrawFn) -> tuple[list[Saved], set[Path], int]:
    """Return checkpoints, the intact ones among them, and the step just saved."""
    steps = draw(st.lists(st.integers(0, 40), min_size=1, max_size=14, unique=True))
    losses = st.none() | st.sampled_from([1.5, 2.0, 2.31, 3.0])  # few values, so that some losses are equal
    saved = [
        Saved(Path(layout.step_name(step)), step, draw(losses) if is_readable else None, is_readable)
        for step in steps
        for is_readable in [draw(st.integers(0, 9)) > 0]
    ]
    newest = draw(st.sampled_from(steps))
    whole = {s.path for s in saved if s.step == newest or draw(st.integers(0, 4)) > 0}
    return saved, whole, newest


RETENTIONS = st.builds(Retention, st.integers(0, 6), st.integers(0, 12), st.integers(0, 5))
Situation = tuple[list[Saved], set[Path], int]


def gone_of(situation: Situation, retention: Retention) -> set[Path]:
    saved, whole, newest = situation
    reasons = reasons_to_keep(saved, retention, newest, whole.__contains__)
    assert reasons.keys() == {one.path for one in saved}
    return {path for path, why in reasons.items() if not why}


@settings(max_examples=400, deadline=None)
@given(saved_ones(), RETENTIONS)
def test_no_checkpoint_is_deleted_that_a_rule_keeps(situation: Situation, retention: Retention) -> None:
    saved, whole, newest = situation
    gone = gone_of(situation, retention)
    stay = [one for one in saved if one.path not in gone]
    assert newest in {one.step for one in stay}
    of_this_attempt = [one for one in saved if one.step <= newest]
    whole_before = [one for one in of_this_attempt if one.path in whole]
    whole_after = [one for one in stay if one in whole_before]
    assert len(whole_after) >= min(2, len(whole_before))
    for one in (one for one in saved if one.path in gone):
        assert one.step < newest
        assert sum(other.step > one.step for other in of_this_attempt) >= max(2, retention.keep_last)
        assert sum(other.step > one.step for other in whole_after) >= 2
        assert not retention.keep_every or one.step % retention.keep_every
        assert not retention.keep_best or one.is_readable
        if retention.keep_best and one.validation_loss is not None:
            better = [s for s in whole_after if s.validation_loss is not None and s.step != one.step]
            better = [s for s in better if (s.validation_loss or 0, s.step) < (one.validation_loss, one.step)]
            assert len(better) >= retention.keep_best


@settings(max_examples=200, deadline=None)
@given(saved_ones(), RETENTIONS)
def test_no_checkpoint_is_kept_without_a_rule(situation: Situation, retention: Retention) -> None:
    """If all checkpoints are intact and readable, each rule is one line of code below."""
    saved, _, newest = situation
    saved = [Saved(one.path, one.step, one.validation_loss) for one in saved]
    gone = gone_of((saved, {one.path for one in saved}, newest), retention)
    past = sorted((one for one in saved if one.step <= newest), key=lambda one: one.step)
    stay = {one.step for one in past[-max(2, retention.keep_last) :]}
    stay |= {one.step for one in past if retention.keep_every and one.step % retention.keep_every == 0}
    ranked = sorted((one.validation_loss, one.step) for one in past if one.validation_loss is not None)
    stay |= {step for _, step in ranked[: retention.keep_best]}
    assert gone == {one.path for one in past if one.step not in stay}


@settings(max_examples=200, deadline=None)
@given(saved_ones(), RETENTIONS, st.integers(0, 3), st.integers(0, 3), st.integers(2, 4))
def test_rules_that_keep_more_never_delete_more(
    situation: Situation, retention: Retention, more_last: int, more_best: int, times: int
) -> None:
    gone = gone_of(situation, retention)
    finer = Retention(retention.keep_last + more_last, retention.keep_every, retention.keep_best + more_best)
    assert gone_of(situation, finer) <= gone
    coarser = Retention(retention.keep_last, retention.keep_every * times, retention.keep_best)
    assert gone <= gone_of(situation, coarser)


@settings(max_examples=200, deadline=None)
@given(saved_ones(), RETENTIONS, st.randoms())
def test_a_second_pass_deletes_nothing_and_the_order_does_not_matter(
    situation: Situation, retention: Retention, chance: Any
) -> None:
    saved, whole, newest = situation
    gone = gone_of(situation, retention)
    left = [one for one in saved if one.path not in gone]
    assert gone_of((left, whole, newest), retention) == set()
    chance.shuffle(saved)
    assert gone_of((saved, whole, newest), retention) == gone


def test_pruning_after_each_save_keeps_the_last_the_regular_and_the_best(tmp_path: Path) -> None:
    losses = {100: 5.0, 200: 3.0, 300: 4.0, 400: None, 500: 2.5, 600: 2.9, 700: 3.5, 800: None, 900: 3.1}
    retention = Retention(keep_last=2, keep_every=400, keep_best=2)
    for step, loss in losses.items():
        make_validated(tmp_path, {step: loss})
        prune(tmp_path, retention, step)
    assert [(layout.step_of(path), *why) for path, why in retention_reasons(tmp_path, retention, 900).items()] == [
        (400, "every 400"),
        (500, "best 2.5"),
        (600, "best 2.9"),
        (800, "last", "every 400"),
        (900, "last"),
    ]


def test_retention_is_built_from_the_run_config() -> None:
    overrides = [
        "checkpoint.keep_last=3",
        "checkpoint.keep_every=10",
        "checkpoint.keep_best=4",
        "validation.corpus=held",
    ]
    assert Retention.of(load_run_config(None, overrides).checkpoint) == Retention(3, 10, 4)
    assert Retention.of(load_run_config().checkpoint) == LAST_TWO


# Real folders


@pytest.mark.parametrize(
    ("keep_last", "kept"), [(0, [4, 5]), (1, [4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_prune_keeps_the_newest_and_never_fewer_than_two(keep_last: int, kept: list[int], tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    gone = prune(tmp_path, Retention(keep_last), newest_step=5)
    assert names(tmp_path) == [layout.step_name(step) for step in kept]
    assert gone == [layout.step_name(step) for step in range(1, 6) if step not in kept]
    assert find_latest(tmp_path)[0] == Checkpoint(tmp_path / layout.step_name(5), 5)


def test_unsealed_folders_do_not_count_as_kept(tmp_path: Path) -> None:
    *_, torn = make(tmp_path, 1, 2, 3)
    (torn / layout.MANIFEST).unlink()
    assert prune(tmp_path, LAST_TWO, newest_step=3) == []
    assert find_latest(tmp_path)[0] == Checkpoint(tmp_path / "step_00000002", 2)


def test_damaged_later_checkpoints_do_not_displace_the_one_just_saved(tmp_path: Path) -> None:
    for later in make(tmp_path, 1, 2, 8, 9)[2:]:
        damage(later)
    make(tmp_path, 3)  # the run resumed from step 2 and saved again
    assert prune(tmp_path, LAST_TWO, newest_step=3) == ["step_00000001"]
    found, skipped = find_latest(tmp_path)
    assert found == Checkpoint(tmp_path / "step_00000003", 3)
    assert len(skipped) == 2


def test_a_damaged_earlier_checkpoint_is_not_one_of_the_two_to_keep(tmp_path: Path) -> None:
    damage(make(tmp_path, 1, 2, 3, 4)[2])
    assert prune(tmp_path, LAST_TWO, newest_step=4) == ["step_00000001"]
    assert layout.why_damaged(tmp_path / "step_00000002", verify_checksums=True) is None
    make(tmp_path, 5)
    assert prune(tmp_path, LAST_TWO, newest_step=5) == ["step_00000002", "step_00000003"]


def test_steps_with_nine_digits_are_ordered_by_number(tmp_path: Path) -> None:
    steps = [99_999_998, 99_999_999, 100_000_000, 100_000_001]
    make(tmp_path, *steps)
    assert [layout.step_of(path) for path in retention_reasons(tmp_path, LAST_TWO, steps[-1])] == steps
    assert prune(tmp_path, LAST_TWO, 100_000_001) == ["step_99999998", "step_99999999"]


@pytest.mark.parametrize(
    "content", ["", "{", "[2.5]", '{"validation_loss": "low"}', f'{{"validation_loss": 1{"0" * 400}}}', None, b"\xff"]
)
def test_a_checkpoint_with_an_unreadable_loss_is_kept_as_it_may_be_the_best(
    content: str | bytes | None, tmp_path: Path
) -> None:
    make_validated(tmp_path, dict.fromkeys(range(1, 6), 2.0))
    trainer = tmp_path / "step_00000002" / "trainer.json"
    trainer.unlink()
    if content is not None:
        trainer.write_bytes(content.encode() if isinstance(content, str) else content)
    assert prune(tmp_path, Retention(2, keep_best=1), 5) == ["step_00000003"]
    assert prune(tmp_path, LAST_TWO, 5) == ["step_00000001", "step_00000002"]  # no rule needs its loss


def test_a_loss_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    make_validated(tmp_path, {1: float("nan"), 2: float("-inf"), 3: 7.0, 4: 8.0, 5: None, 6: None})
    assert prune(tmp_path, Retention(2, keep_best=1), 6) == ["step_00000001", "step_00000002", "step_00000004"]


def test_a_damaged_best_checkpoint_does_not_displace_the_next_best(tmp_path: Path) -> None:
    make_validated(tmp_path, {1: 2.0, 2: 2.5, 3: 2.7, 4: 3.0, 5: 3.0})
    damage(tmp_path / "step_00000001")
    assert prune(tmp_path, Retention(2, keep_best=1), 5) == ["step_00000003"]


def test_listing_the_reasons_changes_no_file(tmp_path: Path) -> None:
    make_validated(tmp_path, {1: 2.0, 2: 2.5, 3: 2.7})
    before = {path: path.stat().st_ctime_ns for path in tmp_path.rglob("*")}
    assert [path.name for path, why in retention_reasons(tmp_path, LAST_TWO, 3).items() if not why] == ["step_00000001"]
    assert {path: path.stat().st_ctime_ns for path in tmp_path.rglob("*")} == before
    assert prune(tmp_path / "nothing", LAST_TWO, 3) == []
