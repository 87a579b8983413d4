"""Times and sizes are written with the unit that suits them."""

import pytest

from paceline.config.units import duration, size


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (3.4e-4, "340 µs"),
        (2e-8, "0.02 µs"),
        (0.0125, "12.5 ms"),
        (0.99951, "1 s"),
        (0.9994, "999 ms"),
        (51.3, "51.3 s"),
        (119.0, "119 s"),
        (200.0, "3 min 20 s"),
        (3600.0, "1 h 0 min"),
        (7505.0, "2 h 5 min"),
    ],
)
def test_a_time_has_a_unit_that_suits_it(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 bytes"), (812, "812 bytes"), (3200, "3.2 kB"), (25e6, "25 MB"), (4.5e10, "45 GB")]
)
def test_a_size_has_a_unit_that_suits_it(count: float, words: str) -> None:
    assert size(count) == words
