"""The script of every worker of `paceline doctor`; the lead prints the diagnosis as one line of JSON."""

from __future__ import annotations

import msgspec

from paceline.config import Place
from paceline.doctor.findings import Diagnosis
from paceline.doctor.links import NetworkProbe
from paceline.doctor.machine import examine


def diagnose(place: Place) -> Diagnosis | None:
    """Diagnose this machine, or with other workers all machines and their links; None unless this is the lead."""
    if place.world_size == 1:
        return Diagnosis(machines=[examine()])
    network = NetworkProbe(place)
    result = network.measure(examine() if place.local_rank == 0 else None)
    return None if result is None else Diagnosis(machines=result[0], links=result[1])


if __name__ == "__main__":
    diagnosis = diagnose(Place.from_environment())
    if diagnosis is not None:
        print(msgspec.json.encode(diagnosis).decode(), flush=True)
