"""Shares of the domains, as requested and as counted."""

from collections.abc import Callable, Sequence
from typing import Any

from z2all_ds.track.fields import LOSS_PREFIX, TOKENS_PREFIX


def domains_in(names: Sequence[str]) -> list[str]:
    """Return the domains that these fields of metrics.jsonl belong to."""
    prefixes = (TOKENS_PREFIX, LOSS_PREFIX)
    return sorted({name.removeprefix(prefix) for name in names for prefix in prefixes if name.startswith(prefix)})


def stage_at(stages: Sequence[dict[str, Any]], step: float) -> dict[str, Any]:
    """Return the last stage that has begun; a stage's first_step is the number of steps before it."""
    begun = [stage for stage in stages if (stage.get("first_step") or 0) <= step]
    return begun[-1] if begun else next(iter(stages), {})


def mixture_of(
    stages: Sequence[dict[str, Any]],
    domains: Sequence[str],
    recent: Sequence[dict[str, Any]],
    total: Callable[[str], float],
    is_sample: bool = False,
) -> dict[str, Any]:
    """Return the mixture for the page.

    `total` sums a field over the run, or over a sample of it, which gives only shares; `recent` are the last records.
    """
    last = recent[-1] if recent else {}
    asked = stage_at(stages, last.get("step") or 0).get("shares") or {}
    names = [*dict.fromkeys([*asked, *domains])]
    tokens = {name: total(TOKENS_PREFIX + name) for name in names}
    lately = {name: sum(record.get(TOKENS_PREFIX + name) or 0 for record in recent) for name in names}
    all_tokens, all_lately = sum(tokens.values()), sum(lately.values())
    return {
        "position": last.get("data_position"),
        "stages": list(stages),
        "domains": [
            {
                "name": name,
                "asked": asked.get(name),
                "realised": tokens[name] / all_tokens if all_tokens else None,
                "recent": lately[name] / all_lately if all_lately else None,
                "tokens": None if is_sample else tokens[name] or None,
            }
            for name in names
        ],
    }
