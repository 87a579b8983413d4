"""The session of a replica with the server: its first worker calls the server, and passes the answer on to the others.

To the server a replica is one worker. Its workers all run the same script, so they come here for the same things in the
same order; what the first says counts. A push is said once all of them have written their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from paceline import errors
from paceline.cluster.membership import LivenessMonitor, Members
from paceline.cluster.sub_team import join_part
from paceline.errors import TeamError
from paceline.events.stopwatch import pause
from paceline.server.client import ServerClient
from paceline.server.messages import ToWorker
from paceline.strategies.mesh_coord import MeshCoord
from paceline.transport import Barrier, BarrierKind, MachinesBarrier, Memory, StepCounter


class ReplicaBarrier:
    """The barrier of the workers of a replica."""

    def __init__(self, members: Members, coord: MeshCoord, say: Callable[[str], None]) -> None:
        self._barrier: Barrier | MachinesBarrier
        if not coord.here:
            self.members = join_part(members, coord.shape.replica, say)
            self._barrier = self.members.barrier
            return
        ranks = coord.replica_ranks()
        size = len(ranks)
        memories = [members.share(Barrier.memory_size(size)) for _ in coord.here]
        memory: Memory = memories[coord.local_replica]
        self._barrier = barrier = Barrier(memory, coord.place, size, members.barrier.timeouts, say)
        barrier.ranks = ranks
        barrier.crowd(members.local.size)
        barrier.sign_in()
        members.barrier.wait(BarrierKind.ALLOCATE)
        barrier.watch = liveness = LivenessMonitor(barrier)
        members.barrier.wait(BarrierKind.ALLOCATE)
        self.members = Members(coord.place, size, barrier, liveness, None)
        """The workers of the replica, by their places in it."""

    @property
    def steps(self) -> StepCounter:
        local = self.members.local.barrier
        assert isinstance(local, Barrier)
        return local

    def gather(self, payload: bytes, intent: BarrierKind = BarrierKind.GATHER) -> list[bytes]:
        """All workers' payloads, each at most as long as a note."""
        barrier = self._barrier
        if len(payload) > barrier.CAPACITY:
            raise TeamError(
                f"what a replica's first worker was told takes {len(payload)} bytes, more than can be passed on"
            )
        barrier.note[: len(payload)] = payload
        barrier.wait(intent, len(payload))
        return [bytes(note[: barrier.length(place)]) for place, note in enumerate(barrier.notes)]

    def leave(self) -> None:
        self._barrier.sign_out()


class _ReplicaMessage(msgspec.Struct, array_like=True):
    """An answer or an error of the server, passed on by the first worker."""

    answer: ToWorker | None = None
    kind: str = ""
    message: str = ""
    ranks: list[int] = []


class ReplicaClient:
    """As `ServerClient`, for all workers of a replica."""

    def __init__(self, client: ServerClient | None, barrier: ReplicaBarrier | None) -> None:
        """client: the first worker's; None on the others."""
        self.client, self._barrier = client, barrier
        self.shared = barrier is not None

    def from_first(self, payload: bytes) -> bytes:
        """The first worker's payload for an evaluation, on all workers; in parts, as it may be longer than a note."""
        if self._barrier is None:
            return payload
        whole, start, more = bytearray(), 0, True
        while more:
            end = start + Barrier.CAPACITY - 1
            part = bytes([end < len(payload)]) + payload[start:end] if self.client is not None else b""
            told = self._barrier.gather(part, BarrierKind.EVALUATE)[0]
            more, start = bool(told[0]), end
            whole += told[1:]
        return bytes(whole)

    def from_replica(self, payload: bytes) -> list[bytes]:
        """The payloads of all workers of the replica, each at most as long as a note."""
        return [payload] if self._barrier is None else self._barrier.gather(payload)

    def call(self, message: msgspec.Struct) -> Any:
        """Sends a request, and waits for its reply."""
        return self._pass_on(lambda client: client.call(message))

    def call_in_parts(self, data: bytes) -> Any:
        return self._pass_on(lambda client: client.call_in_parts(data))

    def wait_until_ready(self) -> None:
        self._pass_on(lambda client: client.wait_until_ready())

    def detach(self) -> None:
        if self.client is not None:
            self.client.detach()

    def send(self, message: msgspec.Struct) -> None:
        if self.client is not None:
            self.client.send(message)

    def _pass_on(self, ask: Callable[[ServerClient], Any]) -> Any:
        word, caught = _ReplicaMessage(), None
        if self.client is not None:
            try:
                word = _ReplicaMessage(ask(self.client))
            except TeamError as error:
                caught = error
                word = _ReplicaMessage(None, type(error).__name__, str(error), list(error.ranks))
        told = b""
        if self._barrier is not None:
            payload = msgspec.msgpack.encode(word) if self.client is not None else b""
            told = self._barrier.gather(payload, BarrierKind.PUBLISH)[0]
        if caught is not None:
            raise caught
        if self.client is None:
            word = msgspec.msgpack.decode(told, type=_ReplicaMessage)
        if word.kind:
            raise getattr(errors, word.kind, TeamError)(word.message, word.ranks)
        return word.answer

    def cancelled(self, _version: int) -> bool:
        """False: a replica's step is not cancelled in its middle, where its workers depend on each other."""
        return False

    def sleep(self, seconds: float, _version: int | None) -> bool:
        pause(seconds)
        return False

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
