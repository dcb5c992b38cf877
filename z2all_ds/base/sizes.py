"""Numbers and sizes as people write them."""

import math
import re
from fractions import Fraction

from z2all_ds.base.errors import ConfigError

_TIMES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = r"((?:[0-9]+|[0-9]{1,3}(?:[,_][0-9]{3})+)(?:\.[0-9]+)?)\s*([KMBT]?)"
"""Commas go between thousands only: 1,5B may mean 1.5 or 15."""
MOST = 10**18
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = _DECIMAL | _BINARY
MOST_BYTES = 10**19


def parse_count(text: str, name: str) -> int:
    """'300B' is 300 x 10^9; a bare number is itself."""
    found = re.fullmatch(_NUMBER, text.strip(), re.IGNORECASE) if len(text) < 100 else None
    count = int(Fraction(re.sub("[,_]", "", found[1])) * _TIMES[found[2].upper()]) if found else 0
    if not 1 <= count <= MOST:
        rule = "must be a positive number up to 10^18, alone or with K, M, B (10^9) or T (10^12)"
        raise ConfigError(f"{name} {text!r}", rule, f"For example {name} 300B.")
    return count


def parse_size(size: str | int | float) -> int:
    """Bytes. '80GB' is 80 x 10^9, '80GiB' is 80 x 2^30, a bare number counts GB."""
    text = str(size).strip()
    found = re.fullmatch(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([A-Za-z]*)", text)
    number = float(found[1]) if found and not isinstance(size, bool) else math.nan
    unit = (found[2] or "GB").upper() if found else ""
    if math.isnan(number) or unit not in _UNITS:
        raise ConfigError(
            f"memory size {size!r}",
            "must be a number with a unit: B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)",
            "Write it like 80GB or 80GiB; a bare number counts GB.",
        )
    size_bytes = int(number * _UNITS[unit]) if number < MOST_BYTES else MOST_BYTES
    if not 1 <= size_bytes < MOST_BYTES:
        rule = "must be more than zero" if size_bytes < 1 else "must be less than ten million TB"
        raise ConfigError(f"memory size {size!r}", rule, "Write it like 80GB or 80GiB.")
    return size_bytes
