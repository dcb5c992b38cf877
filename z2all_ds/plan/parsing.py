"""Numbers as people write them."""

import re

from z2all_ds.errors import ConfigError

_TIMES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(text: str, name: str) -> int:
    """'300B' is 300 x 10^9; a bare number is itself."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", text.strip().replace(",", "").replace("_", ""), re.IGNORECASE)
    count = int(float(found[1]) * _TIMES[found[2].upper()]) if found else 0
    if count < 1:
        rule = "must be a positive number, alone or with K, M, B (10^9) or T (10^12)"
        raise ConfigError(f"{name} {text!r}", rule, f"For example {name} 300B.")
    return count
