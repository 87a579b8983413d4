"""The process group of `torch.distributed.init_process_group("paceline")`: set-up, barriers and messages.

Its collectives are in `collective_methods`.
"""

from __future__ import annotations

import datetime
import sys
import time
from typing import Any

import torch
from torch import distributed
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]

from paceline.cluster.membership import machine
from paceline.collectives.collective_methods import CollectiveMethods
from paceline.collectives.devices import by_device, keep_out_of_graphs
from paceline.collectives.group import Group, StoreExchange
from paceline.collectives.hierarchical import HierarchicalGroup
from paceline.collectives.tensors import Filled, Tensors, given
from paceline.collectives.work import GlooWork, P2PWork, PacelineWork, QueuedWork
from paceline.config import Timeouts
from paceline.errors import TeamTimeout, UsageError, WorkerLost, names
from paceline.transport.mailbox import ANY

_CPU = torch.device("cpu")
_CALL = -(1 << 40)
"""Tags of a monitored barrier; users' tags are not negative."""


class PacelineProcessGroup(CollectiveMethods):
    """One member's process group: over shared memory on one machine, and gloo between machines."""

    has_monitored_barrier = True
    supports_splitting = supports_coalescing = False

    def __init__(
        self, store: Store, rank: int, size: int, timeout: datetime.timedelta, others: dict[str, str] | None = None
    ) -> None:
        """others: the backends of devices other than the CPU."""
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._name = self._description = ""
        self._store, self._timeout, self._others = store, timeout, others or {}
        self._elsewhere: dict[str, distributed.ProcessGroup] = {}
        seconds = timeout.total_seconds()
        store.set_timeout(timeout)
        timeouts = Timeouts(join=seconds, barrier=seconds, notice=max(30.0, seconds / 10))
        exchange = StoreExchange(store, rank, size, timeouts)
        machines = [place.decode() for place in exchange(machine().encode())]
        self._hierarchy = HierarchicalGroup(store, rank, machines, timeouts, say) if len(set(machines)) > 1 else None
        self.group = self._hierarchy.group if self._hierarchy else Group(rank, size, exchange, timeouts, say)
        """The members on this machine."""
        exchange.forget()
        self._barriers = 0
        self.communicator: Any = None
        """This group's `Communicator`, once `paceline.collectives` is used."""
        self._shared = self._hierarchy or self.group.shared
        self._queue = self._hierarchy.queue if self._hierarchy else self.group.queue
        self._gloo = self._hierarchy.gloo if self._hierarchy else None
        self._mailbox = self.group.mailbox

    @property
    def on_one_machine(self) -> bool:
        return self._hierarchy is None

    # -- identity, under each name that torch.distributed uses -------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "paceline"

    getRank, getSize = rank, size  # noqa: N815
    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def bound_device_id(self) -> torch.device | None:
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        """Ignored: a group has no device."""

    def getGroupName(self) -> Any:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    group_name = property(getGroupName)
    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._description = desc

    group_desc = property(getGroupDesc)
    _set_group_desc = setGroupDesc

    def _get_backend(self, device: torch.device) -> Any:
        return self

    # -- barriers ----------------------------------------------------------------------------------------------------

    @keep_out_of_graphs
    def barrier(self, opts: Any = None, timeout: Any = None) -> PacelineWork:  # type: ignore[override]
        return self._start(self._shared.barrier, opts, [])

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier at which rank 0 finds the missing members; the group stays usable for the others."""
        if self._gloo is not None:
            self._gloo.monitored_barrier(timeout or self._timeout, wait_all_ranks)
            return
        limit = timeout.total_seconds() if timeout is not None else self.group.control.timeouts.barrier
        # Every barrier has its own tags: a late message of one must not count for the next.
        self._barriers += 1
        call, answer = _CALL - 2 * self._barriers, _CALL - 2 * self._barriers - 1
        nothing, missing = torch.empty(0, dtype=torch.uint8), torch.zeros(self._size, dtype=torch.bool)
        if self._rank:
            self._mailbox.send(0, nothing, call)
            self._mailbox.receive(0, missing, answer).wait(2 * limit + 1.0)
        else:
            self._receive_calls(call, limit, wait_all_ranks, missing)
            for rank in range(1, self._size):
                self._mailbox.send(rank, missing, answer)
        late = [rank for rank in range(self._size) if missing[rank]]
        if late:
            raise TeamTimeout(f"{names(late)} did not come to the monitored barrier in {limit:g} s", late)

    def _receive_calls(self, tag: int, limit: float, all_ranks: bool, missing: torch.Tensor) -> None:
        """Rank 0 waits for the others, and marks the missing ones: the first, or all of them."""
        until = time.monotonic() + limit
        nothing = torch.empty(0, dtype=torch.uint8)
        for rank in range(1, self._size):
            try:
                self._mailbox.receive(rank, nothing, tag).wait(max(0.01, until - time.monotonic()))
            except (TeamTimeout, WorkerLost):
                missing[rank] = True
                if not all_ranks:
                    return

    # -- messages ----------------------------------------------------------------------------------------------------

    @by_device
    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        if self._gloo is not None and self._peer(peer) != self._rank:
            return self._gloo.send([given(tensor)], peer, tag)
        sending = self._mailbox.send(self._box(peer), given(tensor), tag)
        if not sending.done:
            self._mailbox.attend()
        return P2PWork(sending, tensors)

    @by_device
    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> PacelineWork:
        filled = Filled(tensors)
        if self._gloo is not None and peer != self._rank:
            asked = (filled.parts, tag) if peer == ANY else (filled.parts, self._peer(peer), tag)
            begin = self._gloo.recv_anysource if peer == ANY else self._gloo.recv
            return GlooWork(begin(*asked), filled.back)
        receiving = self._mailbox.receive(self._box(peer), filled.parts[0], tag)
        work = P2PWork(receiving, tensors, filled.back if filled.copies else None)
        if not receiving.done:
            self._mailbox.attend()
        return work

    def _box(self, peer: int) -> int:
        """A member's number in the mailbox; between machines the mailbox only has messages of a member to itself."""
        if self._gloo is not None:
            return self.group.rank
        return peer if peer == ANY else self._peer(peer)

    @by_device
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> PacelineWork:
        return self.recv(tensors, ANY, tag)

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise UsageError(f"there is no rank {rank} in this group; ranks are 0 to {self._size - 1}")
        return rank

    # -- other methods of c10d ---------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Does nothing: operations inside a coalescing block are begun at once."""

    def _end_coalescing(self, device: torch.device) -> PacelineWork:
        return QueuedWork(self._queue, lambda: None, [])

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, *(torch.device(device) for device in self._others)]

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        control = self.group.control
        control.timeouts = Timeouts(barrier=timeout.total_seconds(), notice=control.timeouts.notice)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        (self._hierarchy or self.group).close()

    def abort(self) -> None:
        self.group.control.fail("the process group was aborted")
        self.shutdown()

    def elsewhere(self, device: str) -> distributed.ProcessGroup:
        """The group for tensors of another device, created when all members first use it."""
        if device not in self._others:
            raise UsageError(
                f"the process group 'paceline' is for CPU tensors; for {device} give its backend, too: "
                f"init_process_group('cpu:paceline,{device}:…')"
            )
        if device not in self._elsewhere:
            group, _ = distributed_c10d._new_process_group_helper(
                self._size,
                self._rank,
                [],
                f"{device}:{self._others[device]}",
                self._store,
                distributed_c10d.GroupName(f"{self.group_name}/{device}"),
                timeout=self._timeout,
            )
            self._elsewhere[device] = group
        return self._elsewhere[device]


def say(message: str) -> None:
    print(f"paceline: {message}", file=sys.stderr, flush=True)
