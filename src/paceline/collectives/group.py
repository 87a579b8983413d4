"""The members of one machine that do collectives together, and how they come together."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable

import msgspec
import torch
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from paceline.cluster.membership import LivenessMonitor, machine
from paceline.collectives.op_queue import OpQueue
from paceline.collectives.operation import DTYPES, OpKind, operation
from paceline.collectives.shared_memory import SharedMemoryCollectives
from paceline.config import Timeouts
from paceline.errors import JoinError, names
from paceline.transport.control_block import ControlBlock
from paceline.transport.mailbox import Mailbox
from paceline.transport.memory import Memory
from paceline.transport.peer_memory import PeerMemory

Exchange = Callable[[bytes], list[bytes]]
"""Everybody's bytes, by rank: how members exchange addresses before they share memory."""
_MAGIC = 0x5061_6365


class _Card(msgspec.Struct, array_like=True):
    """What a member tells the others about itself."""

    machine: str
    pid: int
    descriptor: int
    address: int


class Group:
    """One member of a group on one machine: its place at the board, its mailbox, and the order of its operations."""

    def __init__(
        self, rank: int, size: int, exchange: Exchange, timeouts: Timeouts, say: Callable[[str], None]
    ) -> None:
        self.rank, self.size = rank, size
        mail = -(-ControlBlock.memory_size(size) // 4096) * 4096
        made = Memory.create(mail + Mailbox.memory_size(size)) if rank == 0 else None
        signature = torch.tensor([_MAGIC + rank])
        card = _Card(machine(), os.getpid(), made.descriptor if made else -1, signature.data_ptr())
        cards = [msgspec.json.decode(text, type=_Card) for text in exchange(msgspec.json.encode(card))]
        memory = made or _map(cards[0], rank)
        self.board = ControlBlock(memory, rank, size, Timeouts(barrier=timeouts.join, notice=timeouts.notice), say)
        self.board.sign_in()
        self.reach = PeerMemory([card.pid for card in cards])
        self.shared = SharedMemoryCollectives(self.board, self.reach)
        permitted = self.reach.permit([card.address for card in cards], _MAGIC)
        coming = operation(OpKind.BARRIER, torch.uint8, 0)
        self.board.row[1] = permitted
        self.reach.private = all(row[1] for row in self.shared.come(*coming))
        # Nobody goes on before all have taken the liveness of all: a process id must not be reused in between.
        self.board.watch = self._liveness = LivenessMonitor(self.board)
        self.shared.come(*coming)
        memory.close_descriptor()
        self.board.timeouts = timeouts
        letters = PeerMemory([card.pid for card in cards])
        letters.private = self.reach.private
        self.mailbox = Mailbox(memory, mail, self.board, letters, DTYPES)
        self.lane = OpQueue(self.shared, self.board.fail)
        self._end = weakref.finalize(self, _end, self.board, self.lane, self.mailbox, os.getpid())

    def close(self) -> None:
        """Tell the others that this member does nothing more with them."""
        self._end()
        self._liveness.close()


def _end(board: ControlBlock, lane: OpQueue, mailbox: Mailbox, process: int) -> None:
    """Also when a script ends without a word: it has left then, not died. And its threads must end before it does."""
    if os.getpid() != process:  # a fork of a member is not a member
        return
    board.sign_out()
    board.closing = True
    mailbox.close()
    lane.close(2.0)


def _map(card: _Card, rank: int) -> Memory:
    try:
        return Memory.of(card.pid, card.descriptor)
    except OSError as error:
        raise JoinError(f"rank {rank} cannot map the memory of rank 0: {error}", [0]) from None


class StoreExchange:
    """Members find each other through torch's key-value store."""

    def __init__(self, store: Store, rank: int, size: int, timeouts: Timeouts) -> None:
        self._store, self._rank, self._size, self._timeouts = store, rank, size, timeouts
        self._round = 0

    def __call__(self, payload: bytes) -> list[bytes]:
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], payload.decode())
        try:
            return [self._store.get(key) for key in keys]
        except DistStoreError:
            late = [rank for rank, key in enumerate(keys) if not self._store.check([key])] or [self._rank]
            raise JoinError(
                f"rank {self._rank} did not hear from {names(late)} in {self._timeouts.join:g} s", late
            ) from None

    def forget(self) -> None:
        """Once all have come together: a later group may find the same store, and must not find what was said here."""
        for number in range(1, self._round + 1):
            with contextlib.suppress(RuntimeError):  # some stores only grow
                self._store.delete_key(f"{number}/{self._rank}")
