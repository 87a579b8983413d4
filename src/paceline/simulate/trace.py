"""Records a simulated run as the events of a real one, for the same reports."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline import events
from paceline.events import Event
from paceline.policies import Arrival
from paceline.simulate.cluster import SimulatedCluster


class SimulatedTrace:
    """Collects the events of a simulation."""

    def __init__(self, cluster: SimulatedCluster, strategy: str) -> None:
        self._cluster, self._strategy = cluster, strategy
        self._samples = cluster.batch
        self._used: set[int] = set()
        self.events: list[Event] = [
            events.Join(rank, 0.0, 0, "simulated", "simulated", strategy, 0.0) for rank in range(cluster.workers)
        ]

    def computed(self, rank: int, began: float, end: float, version: int, core: float) -> None:
        self.events.append(events.Compute(rank, began, end - began, version, 1, self._samples, core=core))

    def arrived(self, push: Arrival, now: float, staleness: int) -> None:
        size, sent = int(self._cluster.size), int(self._cluster.pushed)
        self.events.append(
            events.Push(
                push.worker,
                now,
                push.ticket,
                push.version,
                staleness,
                self._samples,
                [],
                sent,
                size - sent,
                "held",
                "predicted",
            )
        )

    def updated(self, moment: float, seconds: float, version: int, used: tuple[Arrival, ...]) -> None:
        tickets = [push.ticket for push in used]
        self._used.update(tickets)
        self.events.append(events.Update(-1, moment, seconds, version, 0, len(used), pushes=tickets))

    def cancelled(self, rank: int, began: float, now: float, version: int) -> None:
        if now > began:
            self.events.append(events.Cancel(rank, began, now - began, version, []))

    def released(self, rank: int, since: float, start: float, version: int, by: int) -> None:
        """Records the release of a worker that has pushed."""
        if start > since:
            seconds = start - since
            self.events.append(
                events.Pull(rank, since, seconds, version) if by == rank else events.Wait(rank, since, seconds, by)
            )

    def over(self, end: float) -> None:
        self.events += [events.Leave(rank, end) for rank in range(self._cluster.workers)]

    def write(self, folder: Path, more: dict[str, object]) -> None:
        """Writes a run's folder, marked as predicted."""
        folder.mkdir(parents=True, exist_ok=True)
        encoder = msgspec.json.Encoder()
        ordered = sorted((self._settled(event) for event in self.events), key=lambda event: event.start)
        (folder / "events.jsonl").write_bytes(b"".join(encoder.encode(event) + b"\n" for event in ordered))
        config = {"strategy": self._strategy, "workers": self._cluster.workers, "predicted": True, **more}
        (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))

    def _settled(self, event: Event) -> Event:
        """A push with its final outcome."""
        if isinstance(event, events.Push):
            return msgspec.structs.replace(event, outcome="used" if event.ticket in self._used else "dropped")
        return event
