"""Requested and actual shares of domains."""

from typing import Any

from z2all_ds.track.board.mixture import domains_in, mixture_of, stage_at

STAGES = [
    {"name": "first", "first_step": 1, "shares": {"zh": 0.5, "en": 0.5}},
    {"name": "second", "first_step": 11, "shares": {"zh": 0.25, "en": 0.75}},
]


def test_the_stage_at_a_step() -> None:
    assert [stage_at(STAGES, step).get("name") for step in (0, 1, 10, 11, 99)] == [
        "first",
        "first",
        "first",
        "second",
        "second",
    ]
    assert stage_at([], 3) == {}


def test_requested_actual_and_recent_shares_of_domains() -> None:
    totals = {"tokens_of_zh": 300.0, "tokens_of_en": 100.0, "tokens_of_code": 0.0}
    recent: list[dict[str, Any]] = [
        {"step": 10, "tokens_of_zh": 10},
        {"step": 12, "tokens_of_en": 30, "tokens_of_zh": None, "data_position": 7},
    ]
    shown = mixture_of(STAGES, ["code", "en", "zh"], recent, lambda name: totals[name])
    assert shown["position"] == 7
    assert shown["domains"] == [
        {"name": "zh", "asked": 0.25, "realised": 0.75, "recent": 0.25, "tokens": 300.0},
        {"name": "en", "asked": 0.75, "realised": 0.25, "recent": 0.75, "tokens": 100.0},
        {"name": "code", "asked": None, "realised": 0.0, "recent": 0.0, "tokens": None},
    ]


def test_a_sample_gives_shares_but_no_token_counts() -> None:
    shown = mixture_of([], ["en", "zh"], [], lambda name: {"tokens_of_zh": 30.0, "tokens_of_en": 10.0}[name], True)
    assert [(one["name"], one["realised"], one["tokens"]) for one in shown["domains"]] == [
        ("en", 0.25, None),
        ("zh", 0.75, None),
    ]


def test_an_older_run_without_token_counts_has_no_shares() -> None:
    shown = mixture_of([], ["zh"], [], lambda name: 0.0)
    assert shown["domains"] == [{"name": "zh", "asked": None, "realised": None, "recent": None, "tokens": None}]


def test_domain_names_are_found_in_field_names() -> None:
    assert domains_in(["loss", "loss_of_百科", "tokens_of_百科", "tokens_of_a,b", "validation_loss_of_x"]) == [
        "a,b",
        "百科",
    ]
