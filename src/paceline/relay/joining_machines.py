"""Machines that join a running team: which places they get, and who is told of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from paceline.relay.context import RelayContext
from paceline.relay.coordinator_sessions import CoordinatorSessions
from paceline.relay.door import Answer, AskPlaces, PlacesGiven, PlacesRefused, Request
from paceline.relay.messages import MachineJoined, RelayAddress

_encode = msgspec.msgpack.Encoder().encode


class JoiningMachines:
    """Answers the requests that come through the door, on the coordinator's machine."""

    def __init__(
        self,
        context: RelayContext,
        coordinator: CoordinatorSessions,
        meet: Callable[[int, RelayAddress], None],
    ) -> None:
        """meet: connects to the relay of a machine that joins."""
        self._context, self._coordinator, self._meet = context, coordinator, meet
        state = context.record.state
        state.places = state.places or sum(1 for peer in context.config.peers if peer.address)
        self._promised: dict[int, float] = {}
        """By rank, until when its place is kept for a worker that was given it."""

    def answer(self, request: Request) -> Answer:
        if isinstance(request, AskPlaces):
            return self._give_places(request.workers)
        config = self._context.config
        if not 0 < request.machine < self._context.record.state.places or config.peers[request.machine].address:
            return PlacesRefused("its relay is not the one that was asked for")
        for sender in self._context.control.values():
            sender.send(_encode(MachineJoined(request.machine, request.relay)))
        self._meet(request.machine, request.relay)
        return request

    def _give_places(self, workers: int) -> Answer:
        config, now = self._context.config, time.monotonic()
        if not self._coordinator.reachable():
            return PlacesRefused("the run is about to end")
        if self._context.record.state.places >= len(config.peers):
            return PlacesRefused("as many machines have joined the run as it has room for over its whole time")
        first = config.spec.workers
        free = [
            rank
            for rank in (*range(first, config.spec.capacity), *(() if config.spec.restarts else range(first)))
            if self._coordinator.may_join(rank) and self._promised.get(rank, 0.0) < now
        ]
        if workers > len(free):
            room = f"it has room for {config.spec.capacity} workers, and {len(free)} places are free"
            return PlacesRefused(f"{room}; ask for fewer with --workers" if free else room)
        ranks = free[:workers]
        self._promised |= dict.fromkeys(ranks, now + config.spec.timeouts.join)
        record = self._context.record
        machine, record.state.places = record.state.places, record.state.places + 1
        record.save()
        return PlacesGiven(ranks, msgspec.structs.replace(config, machine=machine, late=True))
