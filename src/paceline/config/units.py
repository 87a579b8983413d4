"""Times and sizes for people, with the unit that suits them."""

from __future__ import annotations

_TIMES = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_SIZES = ((1e3, "kB"), (1e6, "MB"), (1e9, "GB"))


def duration(seconds: float) -> str:
    """`340 µs`, `12.5 ms`, `51.3 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds >= 3600:
        return f"{seconds // 3600:,.0f} h {seconds % 3600 // 60:.0f} min"
    if seconds >= 119.5:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    if seconds == 0:
        return "0 s"
    unit, name = next(((unit, name) for unit, name in reversed(_TIMES) if seconds >= 0.9995 * unit), _TIMES[0])
    return f"{seconds / unit:.3g} {name}"


def size(count: float) -> str:
    """`812 bytes`, `3.2 kB`, `25 MB`."""
    unit, name = next(((unit, name) for unit, name in reversed(_SIZES) if count >= 0.9995 * unit), (1.0, "bytes"))
    return f"{count / unit:.3g} {name}"
