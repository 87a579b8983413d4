"""What all tests share."""

from collections.abc import Iterator

import pytest
from alone import ROOM


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked `alone` runs when no other does."""
    ROOM.enter(alone=item.get_closest_marker("alone") is not None)
    try:
        return (yield)
    finally:
        ROOM.leave()
