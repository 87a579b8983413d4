"""A launcher handles SIGINT and SIGTERM while its run goes on, loses none, and then leaves them as they were."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from paceline.cluster.supervision import Interrupted, interruptible

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of before, which every test must leave there."""
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == before


def stop(number: int) -> None:
    raise Interrupted(number)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_during_the_run_calls_the_handler(number: signal.Signals) -> None:
    with pytest.raises(Interrupted) as found, interruptible(stop):
        signal.raise_signal(number)
    assert found.value.number == number


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_during_the_clean_up_interrupts_after_it(number: signal.Signals) -> None:
    cleaned = False
    with pytest.raises(Interrupted) as found, interruptible(stop) as postpone:
        postpone()
        signal.raise_signal(number)
        cleaned = True
    assert cleaned
    assert found.value.number == number


def test_an_error_on_its_way_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="of the run"), interruptible(stop) as postpone:
        postpone()
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the run")


def test_in_another_thread_signals_are_left_alone() -> None:
    seen = []

    def run() -> None:
        with interruptible(stop) as postpone:
            postpone()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
