"""Whole numbers as people write them: 8192, 8k, 8K, 25.6k."""

import re
from decimal import Decimal

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {unit.upper(): 2 ** (10 * power) for power, unit in enumerate(UNITS, start=1)}
"""Small letters are powers of 1000, capitals of 1024."""


def read_size(text: str) -> int:
    """Return the number; a fraction of a unit is cut to a whole number.

    Raises:
        ValueError: it is not written like one.
    """
    found = re.fullmatch(r"([+-]?[0-9]+)|([0-9]+(?:\.[0-9]+)?)([a-zA-Z])", text.strip())
    if found is None or (found[3] and found[3] not in UNITS):
        raise ValueError(f"{text!r} is not a whole number, such as 8192, 8k (8000) or 8K (8192)")
    return int(found[1]) if found[1] else int(Decimal(found[2]) * UNITS[found[3]])
