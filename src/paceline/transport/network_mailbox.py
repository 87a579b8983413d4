"""Messages between workers on different machines, with the surface of `Mailbox`.

Each worker has a connection to every other one, proven and encrypted as all connections of the run. A thread sends what
is queued and takes what comes, so that messages travel while the worker computes. A tensor travels in pieces, each a
numbered and checked frame, and stays as it is until the last piece has gone. What comes before it is expected is kept:
as much as the schedule of a pipeline lets a stage be ahead, which are values that the receiver will need for its
backward passes anyway.

A worker can also ask another one for bytes, such as its parameters: the other's thread answers, whatever its script is
doing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from paceline.config import Timeouts
from paceline.errors import Mismatch, TeamError, TeamTimeout, WorkerLost
from paceline.transport.machines_barrier import DIED
from paceline.transport.mailbox import ReceiveTransfer, SendTransfer, Transfer
from paceline.transport.peer_memory import bytes_of
from paceline.transport.poller import Poller
from paceline.transport.step_counter import LEFT
from paceline.transport.tcp_connection import TcpConnection, damage, make_frame, read_header

_PIECE = 1 << 20
"""Bytes of a tensor in one frame."""
_LARGEST = 2 * _PIECE
_MESSAGE = struct.Struct("!BqBQQd")
"""Kind, tag or number of the question, dtype, bytes of all pieces, first byte of this one, when it was sent."""
_SLICE = 0.1
_BYTES = 255
"""As a dtype: an answer, or a question."""


class _Kind(IntEnum):
    TENSOR = 1
    QUESTION = 2
    ANSWER = 3
    BYE = 4
    """The sender's script has ended."""


class _Outgoing:
    """Something that is being sent to one peer."""

    def __init__(self, kind: _Kind, tag: int, dtype: int, data: memoryview, transfer: SendTransfer | None) -> None:
        self.kind, self.tag, self.dtype, self.data, self.transfer = kind, tag, dtype, data, transfer
        self.moment = time.perf_counter()
        """When it was given to be sent."""
        self.sent = 0
        self.complete = False
        """True if the connection has been given its last piece."""


class _Incoming:
    """A message of which some pieces have come."""

    def __init__(
        self, kind: _Kind, tag: int, dtype: int, data: memoryview, transfer: ReceiveTransfer | None = None
    ) -> None:
        """transfer: the one into whose tensor it comes."""
        self.kind, self.tag, self.dtype, self.data, self.transfer = kind, tag, dtype, data, transfer
        self.filled = 0


class ReceivedTensor(NamedTuple):
    """A tensor that has come from another worker."""

    source: int
    """The rank of the sender."""
    tag: int
    sent: float
    came: float
    """When it was given to be sent, and when all of it was here, by this machine's clock."""
    bytes: int
    dtype: torch.dtype


class _Peer:
    """The connection to one worker, and what is under way on it."""

    def __init__(self) -> None:
        self.connection: TcpConnection | None = None
        self.queue: deque[_Outgoing] = deque()
        self.incoming: _Incoming | None = None
        self.sent = self.received = 0
        self.left = False
        self.lost = ""
        """Why it cannot be reached any more."""


class NetworkMailbox:
    """One worker's messages to and from the workers that it has connections to."""

    def __init__(
        self,
        rank: int,
        sockets: dict[int, socket.socket],
        hosts: Sequence[str],
        ranks: Sequence[int],
        timeouts: Timeouts,
        dtypes: list[torch.dtype],
    ) -> None:
        """sockets: proven connections, by peer; hosts: of all members; ranks: theirs in the team."""
        self.rank, self.size, self.ranks = rank, len(hosts), ranks
        self._hosts, self._timeouts, self._dtypes = hosts, timeouts, dtypes
        self._numbers = {dtype: number for number, dtype in enumerate(dtypes)}
        self.look_around: Callable[[], None] = lambda: None
        """Called while this worker waits; may raise an error that ends the wait."""
        self.answer: Callable[[bytes], memoryview] = lambda _question: memoryview(b"")
        """Answers another worker's question; called by the mailbox's thread."""
        self.ahead = 0.0
        """Seconds by which the clock of rank 0's machine is ahead of this one's."""
        self.arrivals: deque[ReceivedTensor] | None = None
        """Tensors that have come, for a reader who takes them out; None if there is none."""
        self._changed = threading.Condition()
        self._peers = {peer: _Peer() for peer in sockets}
        self._expected: list[ReceiveTransfer] = []
        self._unexpected: dict[int, list[_Incoming]] = {peer: [] for peer in sockets}
        self._answers: dict[int, memoryview] = {}
        self._questions = 0
        self._died: list[int] = []
        """Workers whose connections have ended before their scripts, in this order."""
        self._closed = False
        self._poller = Poller()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.watch(self._wakeup, lambda _: None)
        for peer, connection in sockets.items():
            self._peers[peer].connection = TcpConnection(
                self._poller,
                connection,
                hosts[peer],
                timeouts.barrier,
                _LARGEST,
                lambda parts, peer=peer: self._take(peer, parts),  # type: ignore[misc]
                lambda error, peer=peer: self._end(peer, error),  # type: ignore[misc]
            )
        self._thread = threading.Thread(target=self._run, name="paceline-network", daemon=True)
        self._thread.start()

    # -- what a pipeline uses ----------------------------------------------------------------------------------------

    def send(self, peer: int, tensor: torch.Tensor, tag: int = 0) -> SendTransfer:
        """Begins to send a contiguous tensor."""
        transfer = SendTransfer(self, peer, tensor, tag)
        self._queue(peer, _Outgoing(_Kind.TENSOR, tag, self._numbers[tensor.dtype], _view(tensor), transfer))
        return transfer

    def receive(self, peer: int, tensor: torch.Tensor, tag: int = 0) -> ReceiveTransfer:
        """Begins to receive a message into this contiguous tensor."""
        transfer = ReceiveTransfer(self, peer, tensor, tag)
        with self._changed:
            for message in self._unexpected[peer]:
                if message.tag == tag:
                    self._unexpected[peer].remove(message)
                    self._deliver(transfer, message)
                    break
            else:
                self._expected.append(transfer)
        return transfer

    def look(self) -> None:
        """The thread does what can be done."""

    def wait(self, transfer: Transfer, timeout: float | None = None) -> None:
        limit = self._timeouts.barrier if timeout is None else timeout
        self._wait(lambda: transfer.done, transfer.peer, limit, f"a message {_direction(transfer)}", sends=True)

    def ask(self, peer: int, question: bytes) -> memoryview:
        """Another worker's answer."""
        with self._changed:
            self._questions += 1
            number = self._questions
        self._queue(peer, _Outgoing(_Kind.QUESTION, number, _BYTES, memoryview(question), None))
        self._wait(lambda: number in self._answers, peer, self._timeouts.barrier, "an answer from", sends=False)
        return self._answers.pop(number)

    def bye(self) -> None:
        """Tells the others that this worker's script has ended."""
        for peer in self._peers:
            self._queue(peer, _Outgoing(_Kind.BYE, 0, _BYTES, memoryview(b""), None))

    def wait_for_bye(self, peer: int, seconds: float) -> None:
        """Waits until a worker's script has ended, at most so long: until then it may ask."""
        until = time.monotonic() + seconds
        with self._changed:
            while not (self._peers[peer].left or self._peers[peer].lost) and time.monotonic() < until:
                self._changed.wait(_SLICE)

    def close(self) -> None:
        """Ends the connections, once what is queued has gone, or after a second."""
        until = time.monotonic() + 1.0
        with self._changed:
            if self._closed:
                return
            while any(peer.queue for peer in self._peers.values()) and time.monotonic() < until:
                self._changed.wait(_SLICE)
            self._closed = True
            os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        os.close(self._wakeup)
        self._poller.close()

    def check(self) -> None:
        """Raises WorkerLost if a worker has died: none of the others can go on."""
        for number in self._died[:1]:  # the others may have ended for this reason
            who = self.ranks[number]
            raise WorkerLost(f"rank {who} on {self._hosts[number]} {self._peers[number].lost}", [who])

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], peer: int, limit: float, what: str, *, sends: bool) -> None:
        """sends: False if a worker can do it whose script has ended."""
        since, known = time.monotonic(), self._peers[peer]
        while True:
            with self._changed:
                if done() or self._changed.wait_for(done, min(_SLICE, limit)):
                    return
            self.look_around()
            self.check()
            waited, who = time.monotonic() - since, self.ranks[peer]
            if why := known.lost or (LEFT if sends and known.left else ""):
                with self._changed:
                    if done():  # it may have sent, and only then ended
                        return
                raise WorkerLost(
                    f"rank {who} on {self._hosts[peer]} {why}; rank {self.ranks[self.rank]} was waiting for {what} it",
                    [who],
                )
            if waited >= limit:
                raise TeamTimeout(
                    f"rank {self.ranks[self.rank]} waited {waited:.1f} s for {what} rank {who} on {self._hosts[peer]}; "
                    f"the timeout is {limit:g} s",
                    [who],
                )

    # -- the thread --------------------------------------------------------------------------------------------------

    def _queue(self, peer: int, outgoing: _Outgoing) -> None:
        with self._changed:
            if why := self._peers[peer].lost:
                who = self.ranks[peer]
                self._finish(outgoing.transfer, WorkerLost(f"rank {who} on {self._hosts[peer]} {why}", [who]))
            else:
                self._peers[peer].queue.append(outgoing)
                self._wake()

    def _wake(self) -> None:
        """Wakes the thread; called while the lock is held."""
        if not self._closed:
            os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._poller.wait(1.0)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
                for peer in self._peers.values():
                    self._feed(peer)
        finally:
            with self._changed:
                for peer in self._peers.values():
                    if peer.connection is not None:
                        peer.connection.close()
                    peer.lost = peer.lost or "cannot be reached: the connections of this worker are closed"
                self._changed.notify_all()

    def _feed(self, peer: _Peer) -> None:
        """Gives a connection the next pieces, one at a time: so it is known when the last one has gone."""
        connection = peer.connection
        while connection is not None and connection.open and peer.queue and not connection.pending:
            outgoing = peer.queue[0]
            if outgoing.complete:
                with self._changed:
                    peer.queue.popleft()
                    self._finish(outgoing.transfer)
                continue
            start, size = outgoing.sent, len(outgoing.data)
            stop = min(start + _PIECE, size)
            moment = outgoing.moment + self.ahead
            head = _MESSAGE.pack(outgoing.kind, outgoing.tag, outgoing.dtype, size, start, moment)
            peer.sent += 1
            outgoing.sent, outgoing.complete = stop, stop == size
            connection.send(make_frame("", self.rank, peer.sent, head, outgoing.data[start:stop]))

    def _take(self, number: int, parts: list[Any]) -> None:
        """Takes a frame; TeamError if it is not one that this peer may send now."""
        peer, host = self._peers[number], self._hosts[number]
        try:
            header = read_header(parts)
            kind, tag, dtype, size, start, moment = _MESSAGE.unpack(parts[1])
            piece = parts[2]
        except (ValueError, IndexError, struct.error):
            raise TeamError(f"what came from {host} is not a frame of this team") from None
        if damage(header, parts):
            raise TeamError(f"a frame from {host} was damaged on its way")
        peer.received += 1
        message = peer.incoming
        if message is None:
            message = peer.incoming = self._begin(number, _Kind(kind), tag, dtype, size)
        follows = (message.kind, message.tag, message.filled, len(message.data)) == (kind, tag, start, size)
        if header.number != peer.received or not follows or start + len(piece) > size:
            raise TeamError(f"{host} has sent a piece of a message that does not follow its last one")
        message.data[start : start + len(piece)] = piece
        message.filled += len(piece)
        if message.filled == size:
            peer.incoming = None
            if self.arrivals is not None and message.kind is _Kind.TENSOR:
                now, who = time.perf_counter(), self.ranks[number]
                sent = min(moment - self.ahead, now)  # clocks are compared to some microseconds only
                self.arrivals.append(ReceivedTensor(who, tag, sent, now, size, self._dtypes[dtype]))
            self._complete(number, message)

    def _begin(self, number: int, kind: _Kind, tag: int, dtype: int, size: int) -> _Incoming:
        """A message that begins to come: into the tensor that expects it, if there is one already."""
        with self._changed:
            for transfer in self._expected if kind is _Kind.TENSOR else ():
                if (transfer.peer, transfer.tag) == (number, tag):
                    self._expected.remove(transfer)
                    fits = transfer.tensor.nbytes == size and self._numbers[transfer.tensor.dtype] == dtype
                    data = _view(transfer.tensor) if fits else memoryview(bytearray(size))
                    return _Incoming(kind, tag, dtype, data, transfer)
        return _Incoming(kind, tag, dtype, memoryview(bytearray(size)))

    def _complete(self, number: int, message: _Incoming) -> None:
        if message.kind is _Kind.QUESTION:
            answer = self.answer(bytes(message.data))
            self._peers[number].queue.append(_Outgoing(_Kind.ANSWER, message.tag, _BYTES, answer, None))
            return
        with self._changed:
            if message.kind is _Kind.BYE:
                self._peers[number].left = True
            elif message.kind is _Kind.ANSWER:
                self._answers[message.tag] = message.data
            elif message.transfer is None:
                for transfer in self._expected:  # it may be expected since its first piece has come
                    if (transfer.peer, transfer.tag) == (number, message.tag):
                        self._expected.remove(transfer)
                        self._deliver(transfer, message)
                        break
                else:
                    self._unexpected[number].append(message)
            else:
                self._deliver(message.transfer, message)
            self._changed.notify_all()

    def _deliver(self, transfer: ReceiveTransfer, message: _Incoming) -> None:
        tensor, sent = transfer.tensor, self._dtypes[message.dtype]
        error = None
        if tensor.nbytes != len(message.data) or tensor.dtype != sent:
            who = self.ranks[transfer.peer]
            error = Mismatch(
                f"rank {who} sent {len(message.data) // sent.itemsize} x {sent} to rank {self.ranks[self.rank]}, which "
                f"expects {tensor.numel()} x {tensor.dtype}",
                [who],
            )
        elif message.transfer is None:
            _view(tensor)[:] = message.data
        self._finish(transfer, error)

    def _finish(self, transfer: Transfer | None, error: Exception | None = None) -> None:
        if transfer is not None and not transfer.done:
            transfer.error = error
            transfer.done = True
            if transfer.told is not None:
                transfer.told()
        self._changed.notify_all()

    def _end(self, number: int, error: TeamError | None) -> None:
        """A connection has ended by itself."""
        peer, who = self._peers[number], self.ranks[number]
        with self._changed:
            peer.lost = DIED if error is None else f"was given up: {error}"
            if not peer.left:
                self._died.append(number)
            for outgoing in peer.queue:
                self._finish(outgoing.transfer, WorkerLost(f"rank {who} on {self._hosts[number]} {peer.lost}", [who]))
            peer.queue.clear()
            self._changed.notify_all()


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return bytes_of(tensor.detach()).numpy().data if tensor.numel() else memoryview(bytearray())


def _direction(transfer: Transfer) -> str:
    return "to" if isinstance(transfer, SendTransfer) else "from"
