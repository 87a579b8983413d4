"""Messages between the workers of a replica that is on several machines and the relays of their machines.

To the server the replica is one worker, for which its first worker speaks. The parts of its gradient, and of the
versions that it computes on, go between each of its workers and the servers.
"""

from __future__ import annotations

import msgspec


class _PartMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class PartHello(_PartMessage, frozen=True, gc=False):
    """Opens the connection of one worker of a replica."""

    rank: int
    """In the team."""


class HoldParameters(_PartMessage, frozen=True, gc=False):
    """The parameters that this worker computes with, by their numbers in the layout, from the next version on."""

    parameters: tuple[int, ...]


class PushPart(_PartMessage, frozen=True, gc=False):
    """The gradients of these parameters are in the replica's buffer of this machine."""

    parameters: tuple[int, ...]


class PullPart(_PartMessage, frozen=True, gc=False):
    """Requests this worker's part of a version."""

    buffer: int
    version: int


class PartDone(_PartMessage, frozen=True, gc=False):
    """What was requested is done: the part is with all servers that need it, or here."""


FromPart = PartHello | HoldParameters | PushPart | PullPart
