"""Names in the records of a run: fields that exist once per domain or probe, and titles of events."""

from collections.abc import Mapping
from typing import Any

from z2all_ds.base.console import human_seconds

LOSS_PREFIX = "loss_of_"
"""loss_of_X: the loss of domain X."""
TOKENS_PREFIX = "tokens_of_"
"""tokens_of_X: the number of its tokens in the step."""
EPOCHS_PREFIX = "epochs_of_"
"""epochs_of_X: how often domain X has been read."""
BAD_RECORDS_PREFIX = "bad_records_of_"
"""bad_records_of_X: the number of its records without a valid text that were skipped in the step."""
PROBE_PREFIX = "probe_"
"""probe_X: the value of probe X."""
AXES = {"step": "step", "tokens": "tokens_seen", "time": "time_unix"}
"""The field of metrics.jsonl on each x-axis."""
MARKED = (
    *("started", "stage", "checkpoint", "spike", "new_level", "rolled_back", "fault", "recovered"),
    *("stopped", "requeue", "done", "failed"),
)
"""Events that are shown on curves."""


def event_title(event: Mapping[str, Any], is_restart: bool = False) -> str:
    """Return a short description of an event of events.jsonl."""
    kind = event["event"]
    match kind:
        case "started":
            ranks = event.get("world_size")
            where = f" on {ranks} rank{'' if ranks == 1 else 's'}" if ranks else ""
            return f"restarted at step {event.get('step')}{where}" if is_restart else f"started{where}"
        case "stage":
            return f"stage {event.get('name', '')}".rstrip()
        case "checkpoint":
            return f"checkpoint {event.get('path', '')}".rstrip()
        case "spike":
            outliers = event.get("outliers")
            of_what = f" of {', '.join(map(str, outliers))}" if isinstance(outliers, list) and outliers else ""
            return f"spike{of_what}: {event.get('policy', '')}".rstrip(": ")
        case "rolled_back":
            to = f" to {event['step']}" if "step" in event else ""
            return f"rolled back from step {event.get('from_step')}{to}"
        case "fault":
            who = next((f" on {key} {event[key]}" for key in ("rank", "host") if event.get(key) is not None), "")
            return f"fault: {event.get('fault', 'unknown')}{who}"
        case "recovered":
            seconds = event.get("seconds")
            return f"recovered in {human_seconds(seconds)}" if isinstance(seconds, int | float) else "recovered"
        case "failed":
            return f"failed: {event.get('reason', 'unknown')}"
        case "requeue":
            return "stopped on request"
        case "done":
            share = event.get("goodput")
            return f"done, goodput {100 * share:.1f}%" if isinstance(share, int | float) else "done"
    return str(kind).replace("_", " ")
