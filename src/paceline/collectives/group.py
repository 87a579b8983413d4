"""A group of members on one machine, and how it is set up."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable

import msgspec
import torch
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from paceline.cluster.membership import LivenessMonitor
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
"""Returns all members' bytes, by rank: how members exchange addresses before they share memory."""
_MAGIC = 0x5061_6365


class _MemberInfo(msgspec.Struct, array_like=True):
    """A member's process and memory, for the other members."""

    pid: int
    descriptor: int
    address: int


class Group:
    """One member of a group on one machine: its control block, mailbox and queue of operations."""

    def __init__(
        self, rank: int, size: int, exchange: Exchange, timeouts: Timeouts, say: Callable[[str], None]
    ) -> None:
        self.rank, self.size = rank, size
        mailbox_at = -(-ControlBlock.memory_size(size) // 4096) * 4096
        made = Memory.create(mailbox_at + Mailbox.memory_size(size)) if rank == 0 else None
        signature = torch.tensor([_MAGIC + rank])
        info = _MemberInfo(os.getpid(), made.descriptor if made else -1, signature.data_ptr())
        infos = [msgspec.json.decode(text, type=_MemberInfo) for text in exchange(msgspec.json.encode(info))]
        memory = made or _map(infos[0], rank)
        self.control = ControlBlock(memory, rank, size, Timeouts(barrier=timeouts.join, notice=timeouts.notice), say)
        self.control.sign_in()
        self.peers = PeerMemory([info.pid for info in infos])
        self.shared = SharedMemoryCollectives(self.control, self.peers)
        permitted = self.peers.permit([info.address for info in infos], _MAGIC)
        barrier = operation(OpKind.BARRIER, torch.uint8, 0)
        self.control.row[1] = permitted
        self.peers.private = all(row[1] for row in self.shared.agree(*barrier))
        # A second step, after all have opened all pidfds: a process id must not be reused in between.
        self.control.watch = self._liveness = LivenessMonitor(self.control)
        self.shared.agree(*barrier)
        memory.close_descriptor()
        self.control.timeouts = timeouts
        mail_peers = PeerMemory([info.pid for info in infos])
        mail_peers.private = self.peers.private
        self.mailbox = Mailbox(memory, mailbox_at, self.control, mail_peers, DTYPES)
        self.queue = OpQueue(self.shared, self.control.fail)
        self._end = weakref.finalize(self, _end, self.control, self.queue, self.mailbox, os.getpid())

    def close(self) -> None:
        """Leaves the group."""
        self._end()
        self._liveness.close()


def _end(control: ControlBlock, queue: OpQueue, mailbox: Mailbox, process: int) -> None:
    """Signs out, also at the end of a script that does not close its group; its threads must end first."""
    if os.getpid() != process:  # a fork of a member is not a member
        return
    control.sign_out()
    control.closing = True
    mailbox.close()
    queue.close(2.0)


def _map(info: _MemberInfo, rank: int) -> Memory:
    try:
        return Memory.of(info.pid, info.descriptor)
    except OSError as error:
        raise JoinError(f"rank {rank} cannot map the memory of rank 0: {error}", [0]) from None


class StoreExchange:
    """An exchange through torch's key-value store."""

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
        """Deletes this member's keys, which a later group with the same store must not find."""
        for number in range(1, self._round + 1):
            with contextlib.suppress(RuntimeError):  # some stores only grow
                self._store.delete_key(f"{number}/{self._rank}")
