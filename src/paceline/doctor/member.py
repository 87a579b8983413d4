"""The script of every worker of `paceline doctor`.

The lead prints what it is doing, a line each, and at the end the diagnosis as one line of JSON.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from paceline.config import Place
from paceline.doctor.findings import Diagnosis
from paceline.doctor.links import NetworkProbe
from paceline.doctor.machine import examine


def diagnose(place: Place, tick: Callable[[str], None] = lambda _words: None) -> Diagnosis | None:
    """Diagnose this machine, or with other workers all machines and their links; None unless this is the lead.

    tick: is told what is done.
    """
    if place.world_size == 1:
        return Diagnosis(machines=[examine(tick=tick)])
    network = NetworkProbe(place)
    result = network.measure(examine(tick=tick) if place.local_rank == 0 else None, tick)
    return None if result is None else Diagnosis(machines=result[0], links=result[1])


if __name__ == "__main__":
    place = Place.from_environment()
    diagnosis = diagnose(place, lambda words: print(words, flush=True) if place.rank == 0 else None)
    if diagnosis is not None:
        print(msgspec.json.encode(diagnosis).decode(), flush=True)
