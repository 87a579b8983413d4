"""Parsers of sizes, rates and times with units."""

from __future__ import annotations

import math
import re

from paceline.config.distributions import LONGEST
from paceline.errors import UsageError

_SIZES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0, "d": 86400.0}
_RATES = {"": 1.0, "bit/s": 1 / 8, "kbit/s": 125.0, "mbit/s": 125e3, "gbit/s": 125e6}
_RATES |= {f"{unit}/s": size for unit, size in _SIZES.items() if unit}


def size(name: str, text: str) -> float:
    """Bytes."""
    return _quantity(name, text, _SIZES, "a size, as 25MB")


def seconds(name: str, text: str) -> float:
    told = _quantity(name, text, _TIMES, "a time, as 2ms or 0.5")
    if told > LONGEST:
        raise UsageError(f"{name} is '{text}'; it must be at most {LONGEST:g} s")
    return told


def rate(name: str, text: str) -> float:
    """Bytes per second."""
    if text.strip().lower() in ("inf", "unlimited"):
        return math.inf
    return _quantity(name, text, _RATES, "a rate, as 1Gbit/s or 100MB/s")


def _quantity(name: str, text: str, units: dict[str, float], what: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([a-zµ/]*)", text.strip().lower())
    if match is None or match[2] not in units:
        raise UsageError(f"{name} is '{text}'; it must be {what}")
    return float(match[1]) * units[match[2]]
