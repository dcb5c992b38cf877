"""Numbers as people write them."""

import re
from fractions import Fraction

from z2all_ds.errors import ConfigError

_TIMES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = r"((?:[0-9]+|[0-9]{1,3}(?:[,_][0-9]{3})+)(?:\.[0-9]+)?)\s*([KMBT]?)"
"""Commas go between thousands only: 1,5B may mean 1.5 or 15."""
MOST = 10**18


def parse_count(text: str, name: str) -> int:
    """'300B' is 300 x 10^9; a bare number is itself."""
    found = re.fullmatch(_NUMBER, text.strip(), re.IGNORECASE) if len(text) < 100 else None
    count = int(Fraction(re.sub("[,_]", "", found[1])) * _TIMES[found[2].upper()]) if found else 0
    if not 1 <= count <= MOST:
        rule = "must be a positive number up to 10^18, alone or with K, M, B (10^9) or T (10^12)"
        raise ConfigError(f"{name} {text!r}", rule, f"For example {name} 300B.")
    return count
