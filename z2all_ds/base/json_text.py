"""Reads JSON from files that others may have changed: any text gives a value or a ValueError."""

import json
from typing import Any


def load_json(text: str | bytes) -> Any:
    """Return the value; deep nesting is a ValueError, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
