"""Signs of life between relays: who is silent, and how far the machines' clocks are apart."""

from __future__ import annotations

import time

import msgspec

from paceline.events.forwarding import FIRST_MACHINE
from paceline.relay.context import RelayContext
from paceline.relay.messages import Ping, Pong
from paceline.transport.links import LinkReceiver

PING_INTERVAL = 0.5
"""Seconds between signs of life."""
_SILENT = 3 * PING_INTERVAL
"""Seconds of silence after which a machine is lost if its relay's port is closed."""

_encode = msgspec.msgpack.Encoder().encode


class PeerLiveness:
    """One relay's view of the others."""

    def __init__(self, context: RelayContext, receivers: dict[str, LinkReceiver]) -> None:
        self._context, self._receivers = context, receivers
        self._clocks: dict[int, tuple[float, float]] = {}
        """By machine: seconds of the quickest round trip, and by how many its clock was ahead of this one's then."""

    def lost(self, machine: int) -> str:
        """Why a machine that is needed must be given up; empty if it need not."""
        context, sender = self._context, self._context.control[machine]
        heard = [sender.heard, *(receiver.heard[machine] for receiver in self._receivers.values())]
        silent = time.monotonic() - max(heard)
        timeouts = context.config.spec.timeouts
        limit = timeouts.barrier if context.came else timeouts.join
        if silent > limit:
            return f"was not heard of for {silent:.1f} s; the timeout is {limit:g} s"
        if context.came and silent > _SILENT and sender.refused:
            return "is there, but its relay, through which its workers are reached, has died"
        return ""

    def clock_ahead(self, machine: int) -> float | None:
        """By how many seconds a machine's clock is ahead of this one's; None if that is not known."""
        return self._clocks[machine][1] if machine in self._clocks else None

    def take_ping(self, machine: int, ping: Ping) -> None:
        if machine == FIRST_MACHINE:
            self._context.flags.present = ping.present
        self._context.control[machine].send(_encode(Pong(ping.sent, time.perf_counter())))

    def take_pong(self, machine: int, pong: Pong) -> None:
        now = time.perf_counter()
        best = self._clocks.get(machine, (float("inf"), 0.0))
        taken = (now - pong.sent, pong.at - (now + pong.sent) / 2)
        # The best one ages a little each time, so that drift is followed.
        self._clocks[machine] = min((best[0] * 1.01, best[1]), taken)
