"""Messages between two processes of one machine, through shared memory.

For each pair and direction there is a ring of envelopes. A small tensor travels inside its envelope, and its sender is
done at once. A large one stays where it is: the envelope says where, the receiver copies it from there, and signs for
it. A word per member, its bell, is what it sleeps on until something comes or is signed for.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from paceline.config import Timeouts
from paceline.errors import Mismatch, TeamError, TeamTimeout, WorkerLost, names
from paceline.transport import segments
from paceline.transport.futex import FutexArray
from paceline.transport.memory import Memory
from paceline.transport.peer_memory import PeerMemory, bytes_of
from paceline.transport.step_counter import StepCounter

ANY = -1
"""As a source: whoever sends first."""
_ENVELOPES, _TICKETS = 16, 2048
_INLINE = 16 * 1024
_HEADER = 64
_ENVELOPE = _HEADER + _INLINE
_FIXED = 64 + 64 + 8 * _TICKETS  # head, tail, signatures
_RING = -(-(_FIXED + _ENVELOPES * _ENVELOPE) // 4096) * 4096
_OPEN, _SIGNED, _REFUSED = range(3)
_SLICE = 0.1
_SPINS = 300
_GRACE = 0.0005
"""How long the thread in the background leaves a message to whoever may be about to wait for it."""


class Transfer:
    """A message that is sent or awaited."""

    def __init__(self, mailbox: Mailbox, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self.peer, self.tensor, self.tag = peer, tensor, tag
        self.done = False
        self.error: Exception | None = None
        self.told: Callable[[], None] | None = None
        """Called once it is done, from whatever thread found that out."""
        self._mailbox = mailbox

    def look(self) -> None:
        """Do what can be done without waiting."""
        self._mailbox.look()

    def wait(self, timeout: float | None = None) -> None:
        """Until it is done; raises what went wrong."""
        if not self.done:
            self._mailbox.wait(self, timeout)
        if self.error is not None:
            raise self.error


class SendTransfer(Transfer):
    """On its way to `peer`."""


class ReceiveTransfer(Transfer):
    """Awaited from `peer`, or from anybody; then `peer` is who sent it."""


class _Ring:
    """The envelopes from one member to another."""

    def __init__(self, memory: Memory, start: int) -> None:
        control = memory.bytes(start, _FIXED)
        self._counts = control.cast("q")
        self.signatures = control[128:].cast("q")
        begin = start + _FIXED
        spots = [begin + _ENVELOPE * number for number in range(_ENVELOPES)]
        self._headers = [memory.bytes(spot, _HEADER).cast("q") for spot in spots]
        self._spots, self._memory = spots, memory

    @property
    def head(self) -> int:
        """Envelopes that were ever put in."""
        return self._counts[0]

    @head.setter
    def head(self, value: int) -> None:
        self._counts[0] = value

    @property
    def tail(self) -> int:
        """Envelopes that were ever taken out."""
        return self._counts[8]

    @tail.setter
    def tail(self, value: int) -> None:
        self._counts[8] = value

    def header(self, number: int) -> memoryview:
        return self._headers[number % _ENVELOPES]

    def payload(self, number: int, size: int) -> torch.Tensor:
        return self._memory.tensor(self._spots[number % _ENVELOPES] + _HEADER, size, torch.uint8)


class _Message:
    """What came and was not asked for yet."""

    __slots__ = ("content", "dtype", "size", "source", "tag", "ticket", "where")

    def __init__(self, source: int, header: memoryview) -> None:
        self.source = source
        self.tag, self.size, self.dtype, self.ticket = header[0], header[1], header[2], header[3]
        self.where = (header[4], header[5], header[6])
        self.content: torch.Tensor | None = None


class Mailbox:
    """One member's messages, to and from all others and itself."""

    def __init__(
        self, memory: Memory, start: int, steps: StepCounter, reach: PeerMemory, dtypes: list[torch.dtype]
    ) -> None:
        self.rank, self.size = steps.rank, steps.size
        self._steps, self._reach, self._dtypes = steps, reach, dtypes
        self._numbers = {dtype: number for number, dtype in enumerate(dtypes)}
        self._bells = FutexArray(memory.bytes(start, FutexArray.STRIDE * self.size), self.size)
        rings = start + -(-FutexArray.STRIDE * self.size // 4096) * 4096
        self._out = [_Ring(memory, rings + _RING * (self.rank * self.size + peer)) for peer in range(self.size)]
        self._in = [_Ring(memory, rings + _RING * (peer * self.size + self.rank)) for peer in range(self.size)]
        self._lock = threading.Lock()
        self._rung = 0
        self._unsent: list[deque[SendTransfer]] = [deque() for _ in range(self.size)]
        self._unsigned: list[dict[int, SendTransfer]] = [{} for _ in range(self.size)]
        self._tickets = [list(range(_TICKETS)) for _ in range(self.size)]
        self._awaited: list[ReceiveTransfer] = []
        self._unasked: list[_Message] = []
        self._finished: list[Transfer] = []
        self._waiting = 0
        self._needed = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._crowded = self.size > len(os.sched_getaffinity(0))

    @staticmethod
    def memory_size(size: int) -> int:
        return -(-FutexArray.STRIDE * size // 4096) * 4096 + _RING * size * size

    @property
    def timeouts(self) -> Timeouts:
        return self._steps.timeouts

    @property
    def unsent(self) -> bool:
        """Whether something is to be sent that there was no room for yet."""
        return any(self._unsent)

    def send(self, peer: int, tensor: torch.Tensor, tag: int = 0) -> SendTransfer:
        """Begin to send a contiguous tensor."""
        sending = SendTransfer(self, peer, tensor, tag)
        with self._lock:
            self._unsent[peer].append(sending)
            self._post(peer)
            finished = self._take_finished()
        _tell(finished)
        return sending

    def receive(self, peer: int, tensor: torch.Tensor, tag: int = 0) -> ReceiveTransfer:
        """Begin to wait for a message; it will be put into this contiguous tensor."""
        receiving = ReceiveTransfer(self, peer, tensor, tag)
        with self._lock:
            for message in self._unasked:
                if _fits(receiving, message):
                    self._unasked.remove(message)
                    self._deliver(receiving, message)
                    break
            else:
                self._awaited.append(receiving)
            finished = self._take_finished()
        _tell(finished)
        return receiving

    def attend(self) -> None:
        """From now on let a thread look after what is not waited for."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_after, name="paceline-mailbox", daemon=True)
            self._thread.start()
        if not self._needed.is_set():
            self._needed.set()

    def wait(self, transfer: Transfer, timeout: float | None = None) -> None:
        limit = self.timeouts.barrier if timeout is None else timeout
        since, spins = time.monotonic(), _SPINS
        with self._lock:
            self._waiting += 1
        try:
            while not transfer.done:
                seen = self._bells.values[self.rank * self._bells.step]
                self.look()
                if transfer.done:
                    return
                if spins:
                    spins -= 1
                    if self._crowded:
                        os.sched_yield()
                    continue
                self._bells.sleep(self.rank, seen, min(_SLICE, limit))
                waited = time.monotonic() - since
                if waited > _SLICE / 2 and not transfer.done:
                    self._check(transfer, waited, limit)
        except BaseException:
            self._withdraw(transfer)  # nobody will look for it any more, so it must not take the next message
            raise
        finally:
            with self._lock:
                self._waiting -= 1

    def look(self) -> None:
        """Take what has come, and send what could not be sent before."""
        with self._lock:
            for source, ring in enumerate(self._in):
                if ring.tail < ring.head:
                    self._open(source, ring)
            for peer in range(self.size):
                if self._unsigned[peer]:
                    self._collect(peer)
                if self._unsent[peer]:
                    self._post(peer)
            finished = self._take_finished()
        _tell(finished)

    def close(self) -> None:
        self._closed = True
        self._needed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            with self._lock:
                self._ring(self.rank)
            thread.join(1.0)

    # -- sending -----------------------------------------------------------------------------------------------------

    def _post(self, peer: int) -> None:
        ring, queue = self._out[peer], self._unsent[peer]
        posted = False
        while queue and ring.head - ring.tail < _ENVELOPES:
            sending = queue[0]
            tensor, number = sending.tensor, ring.head
            header = ring.header(number)
            header[0], header[1], header[2] = sending.tag, tensor.nbytes, self._numbers[tensor.dtype]
            if tensor.nbytes <= _INLINE:
                header[3] = -1
                if tensor.nbytes:
                    ring.payload(number, tensor.nbytes).copy_(bytes_of(tensor))
                self._finish(sending)
            else:
                if not self._tickets[peer]:
                    break
                ticket = self._tickets[peer].pop()
                if not self._reach.private and segments.find(tensor) is None:
                    sending.tensor = segments.empty(tensor.nbytes, dtype=torch.uint8).view(tensor.dtype)
                    sending.tensor.copy_(tensor.view(-1))
                _, where = self._reach.expose(sending.tensor)
                header[3], header[4], header[5], header[6] = ticket, *where
                ring.signatures[ticket] = _OPEN
                self._unsigned[peer][ticket] = sending
            queue.popleft()
            ring.head = number + 1
            posted = True
        if posted:
            self._ring(peer)

    def _collect(self, peer: int) -> None:
        ring = self._out[peer]
        for ticket in list(self._unsigned[peer]):
            signature = ring.signatures[ticket]
            if signature != _OPEN:
                sending = self._unsigned[peer].pop(ticket)
                self._tickets[peer].append(ticket)
                refused = None
                if signature & 3 == _REFUSED:
                    wanted = f"{signature >> 10} x {self._dtypes[signature >> 2 & 255]}"
                    refused = Mismatch(
                        f"rank {self._ranks[self.rank]} sent {sending.tensor.numel()} x {sending.tensor.dtype} to rank "
                        f"{self._ranks[peer]}, which expects {wanted}",
                        [self._ranks[peer]],
                    )
                self._finish(sending, refused)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _open(self, source: int, ring: _Ring) -> None:
        number, head = ring.tail, ring.head
        first = number
        while number < head:
            message = _Message(source, ring.header(number))
            if message.ticket < 0:
                message.content = ring.payload(number, message.size)
            receiving = next((awaited for awaited in self._awaited if _fits(awaited, message)), None)
            if receiving is not None:
                self._awaited.remove(receiving)
                self._deliver(receiving, message)
            else:
                if message.content is not None:
                    message.content = message.content.clone()  # the envelope will be used again
                self._unasked.append(message)
            number += 1
            ring.tail = number
        if ring.head - first >= _ENVELOPES:  # it was full meanwhile: its sender may wait for room
            self._ring(source)

    def _deliver(self, receiving: ReceiveTransfer, message: _Message) -> None:
        tensor, source = receiving.tensor, message.source
        receiving.peer = source
        error: Exception | None = None
        if message.size != tensor.nbytes or self._dtypes[message.dtype] != tensor.dtype:
            sent = self._dtypes[message.dtype]
            error = Mismatch(
                f"rank {self._ranks[source]} sent {message.size // sent.itemsize} x {sent} to rank "
                f"{self._ranks[self.rank]}, which expects {tensor.numel()} x {tensor.dtype}",
                [self._ranks[source]],
            )
        else:
            try:
                if message.content is not None:
                    if message.size:
                        bytes_of(tensor).copy_(message.content)
                else:
                    self._reach.view(source, message.where).copy(0, tensor)
            except (TeamError, OSError) as failure:
                reason = self._steps.gone_soon(source)
                who, here = self._ranks[source], self._ranks[self.rank]
                words = f"rank {who} {reason or failure}; its message to rank {here} is lost"
                error = WorkerLost(words, [who]) if reason else TeamError(words, [who])
        if message.ticket >= 0:
            wanted = tensor.numel() << 10 | self._numbers[tensor.dtype] << 2
            self._in[source].signatures[message.ticket] = _REFUSED | wanted if error else _SIGNED
            self._ring(source)
        self._finish(receiving, error)

    # -- what these have in common -----------------------------------------------------------------------------------

    def _ring(self, peer: int) -> None:
        # Never the same number twice in a row, whoever rings: a change is all that the bell tells.
        self._rung += 1
        self._bells.write(peer, (self._rung * self.size + self.rank) & 0xFFFFFFFF)

    def _finish(self, transfer: Transfer, error: Exception | None = None) -> None:
        if transfer.done:  # given up before; what comes of it now is of no interest
            return
        transfer.error = error
        transfer.done = True
        if transfer.told is not None:
            self._finished.append(transfer)

    def _take_finished(self) -> list[Transfer]:
        if not self._finished:
            return []
        finished, self._finished = self._finished, []
        return finished

    def _check(self, transfer: Transfer, waited: float, limit: float) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        peers = others if transfer.peer == ANY else [transfer.peer]
        gone = [self._steps.gone(peer) for peer in peers]
        here, ranks = self._ranks[self.rank], [self._ranks[peer] for peer in peers]
        if peers and all(gone):
            self.look()  # it may have sent, and only then ended
            if not transfer.done:
                error = WorkerLost(
                    f"rank {ranks[0]} {gone[0]}; rank {here} was waiting for {self._spoken(transfer)}", ranks
                )
                self._abandon(transfer, error)
        elif waited >= limit:
            error_late = TeamTimeout(
                f"rank {here} waited {waited:.1f} s for {self._spoken(transfer)} ({names(ranks)}); the timeout is "
                f"{limit:g} s",
                ranks,
            )
            self._abandon(transfer, error_late)

    @property
    def _ranks(self) -> Sequence[int]:
        """What the members are called."""
        return self._steps.ranks

    def _spoken(self, transfer: Transfer) -> str:
        who = "anybody" if transfer.peer == ANY else f"rank {self._ranks[transfer.peer]}"
        return f"a message {'to' if isinstance(transfer, SendTransfer) else 'from'} {who}"

    def _abandon(self, transfer: Transfer, error: Exception) -> None:
        with self._lock:
            if isinstance(transfer, ReceiveTransfer) and transfer in self._awaited:
                self._awaited.remove(transfer)
            if not transfer.done:
                self._finish(transfer, error)
            finished = self._take_finished()
        _tell(finished)

    def _withdraw(self, transfer: Transfer) -> None:
        if isinstance(transfer, ReceiveTransfer):
            here = self._ranks[self.rank]
            self._abandon(transfer, TeamError(f"the wait of rank {here} for {self._spoken(transfer)} was interrupted"))

    def _look_after(self) -> None:
        while not self._closed:
            if not self._outstanding():
                self._needed.clear()
                if not self._outstanding():
                    self._needed.wait()
                time.sleep(_GRACE)
                continue
            if self._waiting:
                # Whoever waits looks, too.
                time.sleep(_GRACE)
                continue
            seen = self._bells.values[self.rank * self._bells.step]
            self.look()
            if not self._outstanding():
                continue
            self._bells.sleep(self.rank, seen, _SLICE)
            for transfer in self._outstanding():
                if not self._waiting:
                    self._check(transfer, 0.0, math.inf)

    def _outstanding(self) -> list[Transfer]:
        with self._lock:
            sending = [item for queue in self._unsent for item in queue]
            unsigned = [item for known in self._unsigned for item in known.values() if not item.done]
            return [*self._awaited, *sending, *unsigned]


def _fits(receiving: ReceiveTransfer, message: _Message) -> bool:
    return receiving.tag == message.tag and receiving.peer in (ANY, message.source)


def _tell(finished: list[Transfer]) -> None:
    for transfer in finished:
        if transfer.told is not None:
            transfer.told()
