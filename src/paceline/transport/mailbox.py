"""Messages between two processes of one machine, through shared memory.

For each pair and direction there is a ring of slots (`message_ring`). A small tensor is copied into its slot, and its
sender is done at once. A large one stays where it is: the slot names its address, and the receiver copies it from there
and writes a receipt. Each member has a futex on which it sleeps until a message or a receipt comes.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from paceline.errors import Mismatch, TeamError, TeamTimeout, WorkerLost, names
from paceline.transport import fence, segments
from paceline.transport.futex import FutexArray
from paceline.transport.memory import Memory
from paceline.transport.message_ring import (
    HEAD,
    INLINE,
    PENDING,
    REFUSED,
    RING,
    SLOTS,
    TAIL,
    TAKEN,
    TICKETS,
    IncomingMessage,
    MessageRing,
)
from paceline.transport.peer_memory import PeerMemory, bytes_of
from paceline.transport.step_counter import StepCounter

ANY = -1
"""As a source: the first member that sends."""
_SLICE = 0.1
_SPINS = 300
_GRACE = 0.0005
"""Seconds for which the background thread leaves a message to a thread that may be about to wait for it."""


class Post(Protocol):
    """What takes care of a transfer."""

    @property
    def ranks(self) -> Sequence[int]:
        """The members' ranks in the team."""

    def look(self) -> None: ...

    def wait(self, transfer: Transfer, timeout: float | None = None) -> None: ...


class Transfer:
    """A message that is sent or expected."""

    def __init__(self, mailbox: Post, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self.peer, self.tensor, self.tag = peer, tensor, tag
        self.done = False
        self.error: Exception | None = None
        self.told: Callable[[], None] | None = None
        """Called once it is done, from the thread that found that out."""
        self._mailbox = mailbox

    @property
    def who(self) -> int:
        """The rank in the team of the member at the other end."""
        return self._mailbox.ranks[self.peer]

    def look(self) -> None:
        """Does what can be done without waiting."""
        self._mailbox.look()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it is done; raises its error."""
        if not self.done:
            self._mailbox.wait(self, timeout)
        if self.error is not None:
            raise self.error


class SendTransfer(Transfer):
    """A message to `peer`."""


class ReceiveTransfer(Transfer):
    """A message from `peer`, or from anybody; then `peer` becomes its sender."""


class Mailbox:
    """One member's messages, to and from all others and itself."""

    def __init__(
        self, memory: Memory, start: int, steps: StepCounter, reach: PeerMemory, dtypes: list[torch.dtype]
    ) -> None:
        self.rank, self.size = steps.rank, steps.size
        self._steps, self._reach, self._dtypes = steps, reach, dtypes
        self._numbers = {dtype: number for number, dtype in enumerate(dtypes)}
        self._wakeups = FutexArray(memory.bytes(start, FutexArray.STRIDE * self.size), self.size)
        rings = start + -(-FutexArray.STRIDE * self.size // 4096) * 4096
        self._out = [MessageRing(memory, rings + RING * (self.rank * self.size + peer)) for peer in range(self.size)]
        self._in = [MessageRing(memory, rings + RING * (peer * self.size + self.rank)) for peer in range(self.size)]
        self._lock = threading.Lock()
        self._wake_count = 0
        self._unsent: list[deque[SendTransfer]] = [deque() for _ in range(self.size)]
        self._without_receipt: list[dict[int, SendTransfer]] = [{} for _ in range(self.size)]
        self._tickets = [list(range(TICKETS)) for _ in range(self.size)]
        self._expected: list[ReceiveTransfer] = []
        self._unexpected: list[IncomingMessage] = []
        self._finished: list[Transfer] = []
        self._waiting = 0
        self._needed = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._crowded = self.size > len(os.sched_getaffinity(0))

    @staticmethod
    def memory_size(size: int) -> int:
        return -(-FutexArray.STRIDE * size // 4096) * 4096 + RING * size * size

    @property
    def unsent(self) -> bool:
        """True if something is to be sent for which there was no room yet."""
        return any(self._unsent)

    def send(self, peer: int, tensor: torch.Tensor, tag: int = 0) -> SendTransfer:
        """Begins to send a contiguous tensor."""
        sending = SendTransfer(self, peer, tensor, tag)
        with self._lock:
            self._unsent[peer].append(sending)
            self._post(peer)
            finished = self._take_finished()
        _tell(finished)
        return sending

    def receive(self, peer: int, tensor: torch.Tensor, tag: int = 0) -> ReceiveTransfer:
        """Begins to receive a message into this contiguous tensor."""
        receiving = ReceiveTransfer(self, peer, tensor, tag)
        with self._lock:
            for message in self._unexpected:
                if _fits(receiving, message):
                    self._unexpected.remove(message)
                    self._deliver(receiving, message)
                    break
            else:
                self._expected.append(receiving)
            finished = self._take_finished()
        _tell(finished)
        return receiving

    def attend(self) -> None:
        """Lets a thread take care, from now on, of transfers that no other thread waits for."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_thread, name="paceline-mailbox", daemon=True)
            self._thread.start()
        if not self._needed.is_set():
            self._needed.set()

    def wait(self, transfer: Transfer, timeout: float | None = None) -> None:
        limit = self._steps.timeouts.barrier if timeout is None else timeout
        since, spins = time.monotonic(), _SPINS
        with self._lock:
            self._waiting += 1
        try:
            while not transfer.done:
                seen = self._wakeups.values[self.rank * self._wakeups.step]
                self.look()
                if transfer.done:
                    return
                if spins:
                    spins -= 1
                    if self._crowded:
                        os.sched_yield()
                    continue
                self._wakeups.sleep(self.rank, seen, min(_SLICE, limit))
                waited = time.monotonic() - since
                if waited > _SLICE / 2 and not transfer.done:
                    self._check(transfer, waited, limit)
        except BaseException:
            if isinstance(transfer, ReceiveTransfer):  # it must not take the next message
                what = f"the wait of rank {self.ranks[self.rank]} for {self._describe(transfer)}"
                self._abandon(transfer, TeamError(f"{what} was interrupted"))
            raise
        finally:
            with self._lock:
                self._waiting -= 1

    def look(self) -> None:
        """Takes what has come, and sends what could not be sent before."""
        with self._lock:
            for source, ring in enumerate(self._in):
                if ring.counts[TAIL] < ring.counts[HEAD]:
                    self._open(source, ring)
            for peer in range(self.size):
                if self._without_receipt[peer]:
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
                self._wake(self.rank)
            thread.join(1.0)

    # -- sending -----------------------------------------------------------------------------------------------------

    def _post(self, peer: int) -> None:
        ring, queue = self._out[peer], self._unsent[peer]
        posted = False
        while queue and ring.counts[HEAD] - ring.counts[TAIL] < SLOTS:
            if fence.WEAK:
                fence.fence()
            sending = queue[0]
            tensor, number = sending.tensor, ring.counts[HEAD]
            header = ring.header(number)
            header[0], header[1], header[2] = sending.tag, tensor.nbytes, self._numbers[tensor.dtype]
            if tensor.nbytes <= INLINE:
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
                ring.receipts[ticket] = PENDING
                self._without_receipt[peer][ticket] = sending
            queue.popleft()
            if fence.WEAK:
                fence.fence()
            ring.counts[HEAD] = number + 1
            posted = True
        if posted:
            self._wake(peer)

    def _collect(self, peer: int) -> None:
        ring = self._out[peer]
        for ticket in list(self._without_receipt[peer]):
            receipt = ring.receipts[ticket]
            if receipt != PENDING:
                if fence.WEAK:
                    fence.fence()
                sending = self._without_receipt[peer].pop(ticket)
                self._tickets[peer].append(ticket)
                refused = None
                if receipt & 3 == REFUSED:
                    wanted = f"{receipt >> 10} x {self._dtypes[receipt >> 2 & 255]}"
                    refused = Mismatch(
                        f"rank {self.ranks[self.rank]} sent {sending.tensor.numel()} x {sending.tensor.dtype} to rank "
                        f"{self.ranks[peer]}, which expects {wanted}",
                        [self.ranks[peer]],
                    )
                self._finish(sending, refused)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _open(self, source: int, ring: MessageRing) -> None:
        number, head = ring.counts[TAIL], ring.counts[HEAD]
        first = number
        if fence.WEAK:
            fence.fence()
        while number < head:
            message = IncomingMessage(source, ring.header(number))
            if message.ticket < 0:
                message.content = ring.payload(number, message.size)
            receiving = next((expected for expected in self._expected if _fits(expected, message)), None)
            if receiving is not None:
                self._expected.remove(receiving)
                self._deliver(receiving, message)
            else:
                if message.content is not None:
                    message.content = message.content.clone()  # the slot will be used again
                self._unexpected.append(message)
            number += 1
            if fence.WEAK:
                fence.fence()
            ring.counts[TAIL] = number
        if ring.counts[HEAD] - first >= SLOTS:  # it was full meanwhile: its sender may wait for room
            self._wake(source)

    def _deliver(self, receiving: ReceiveTransfer, message: IncomingMessage) -> None:
        tensor, source = receiving.tensor, message.source
        receiving.peer = source
        error: Exception | None = None
        if message.size != tensor.nbytes or self._dtypes[message.dtype] != tensor.dtype:
            sent = self._dtypes[message.dtype]
            error = Mismatch(
                f"rank {self.ranks[source]} sent {message.size // sent.itemsize} x {sent} to rank "
                f"{self.ranks[self.rank]}, which expects {tensor.numel()} x {tensor.dtype}",
                [self.ranks[source]],
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
                who, here = self.ranks[source], self.ranks[self.rank]
                words = f"rank {who} {reason or failure}; its message to rank {here} is lost"
                error = WorkerLost(words, [who]) if reason else TeamError(words, [who])
        if message.ticket >= 0:
            wanted = tensor.numel() << 10 | self._numbers[tensor.dtype] << 2
            if fence.WEAK:
                fence.fence()
            self._in[source].receipts[message.ticket] = REFUSED | wanted if error else TAKEN
            self._wake(source)
        self._finish(receiving, error)

    # -- both --------------------------------------------------------------------------------------------------------

    def _wake(self, peer: int) -> None:
        # Never the same number twice in a row, by any member: a sleeper only sees that it changes.
        self._wake_count += 1
        self._wakeups.write(peer, (self._wake_count * self.size + self.rank) & 0xFFFFFFFF)

    def _finish(self, transfer: Transfer, error: Exception | None = None) -> None:
        if transfer.done:  # it was given up before
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
        here, ranks = self.ranks[self.rank], [self.ranks[peer] for peer in peers]
        if peers and all(gone):
            self.look()  # it may have sent, and only then ended
            if not transfer.done:
                lost = f"rank {ranks[0]} {gone[0]}; rank {here} was waiting for {self._describe(transfer)}"
                self._abandon(transfer, WorkerLost(lost, ranks))
        elif waited >= limit:
            who = f"{self._describe(transfer)} ({names(ranks)})"
            late = f"rank {here} waited {waited:.1f} s for {who}; the timeout is {limit:g} s"
            self._abandon(transfer, TeamTimeout(late, ranks))

    @property
    def ranks(self) -> Sequence[int]:
        """The members' ranks in the team."""
        return self._steps.ranks

    def _describe(self, transfer: Transfer) -> str:
        who = "anybody" if transfer.peer == ANY else f"rank {self.ranks[transfer.peer]}"
        return f"a message {'to' if isinstance(transfer, SendTransfer) else 'from'} {who}"

    def _abandon(self, transfer: Transfer, error: Exception) -> None:
        with self._lock:
            if isinstance(transfer, ReceiveTransfer) and transfer in self._expected:
                self._expected.remove(transfer)
            if not transfer.done:
                self._finish(transfer, error)
            finished = self._take_finished()
        _tell(finished)

    def _run_thread(self) -> None:
        while not self._closed:
            if not self._outstanding():
                self._needed.clear()
                if not self._outstanding():
                    self._needed.wait()
                time.sleep(_GRACE)
                continue
            if self._waiting:
                # The waiting thread takes care of all transfers.
                time.sleep(_GRACE)
                continue
            seen = self._wakeups.values[self.rank * self._wakeups.step]
            self.look()
            if not self._outstanding():
                continue
            self._wakeups.sleep(self.rank, seen, _SLICE)
            for transfer in self._outstanding():
                if not self._waiting:
                    self._check(transfer, 0.0, math.inf)

    def _outstanding(self) -> list[Transfer]:
        with self._lock:
            sending = [item for queue in self._unsent for item in queue]
            untaken = [item for known in self._without_receipt for item in known.values() if not item.done]
            return [*self._expected, *sending, *untaken]


def _fits(receiving: ReceiveTransfer, message: IncomingMessage) -> bool:
    return receiving.tag == message.tag and receiving.peer in (ANY, message.source)


def _tell(finished: list[Transfer]) -> None:
    for transfer in finished:
        if transfer.told is not None:
            transfer.told()
