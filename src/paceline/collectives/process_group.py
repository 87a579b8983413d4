"""The process group of `torch.distributed.init_process_group("paceline")`: set-up, barriers and messages.

Its collectives are in `collective_methods`.
"""

from __future__ import annotations

import datetime
import sys
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Backend
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]

from paceline.cluster.compiler import keep_out_of_graphs
from paceline.cluster.membership import machine
from paceline.collectives import functional_ops, profiling
from paceline.collectives.calls import c10d_call
from paceline.collectives.collective_methods import CollectiveMethods
from paceline.collectives.group import Group, StoreExchange
from paceline.collectives.hierarchical import HierarchicalGroup
from paceline.collectives.instruments import instrumented
from paceline.collectives.monitored_barrier import MonitoredBarrier
from paceline.collectives.tensors import Filled, Tensors, given
from paceline.collectives.work import GlooWork, P2PWork, PacelineWork, QueuedWork
from paceline.config import Timeouts
from paceline.errors import InvalidCall, UsageError
from paceline.transport.mailbox import ANY

_CPU = torch.device("cpu")


@instrumented
class PacelineProcessGroup(CollectiveMethods):
    """One member's process group: over shared memory on one machine, and gloo between machines."""

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(
        self, store: Store, rank: int, size: int, timeout: datetime.timedelta, others: dict[str, str] | None = None
    ) -> None:
        """others: the backends of devices other than the CPU."""
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._sequence = rank, size, 0
        self.options = Backend.Options("paceline", timeout)
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
        self.communicator: Any = None
        """This group's `Communicator`, once `paceline.collectives` is used."""
        self._shared = self._hierarchy or self.group.shared
        self._queue = self._hierarchy.queue if self._hierarchy else self.group.queue
        self._gloo = self._hierarchy.gloo if self._hierarchy else None
        self._mailbox = self.group.mailbox
        self._monitored_barrier = MonitoredBarrier(self._mailbox)

    @property
    def on_one_machine(self) -> bool:
        return self._hierarchy is None

    # -- identity, under each name that torch.distributed uses -------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        """Torch's name for all groups of a registered backend; `distributed.get_backend` has the backend's own."""
        return "custom"

    def getBackendName(self) -> str:  # noqa: N802
        return "paceline"

    getRank, getSize = rank, size  # noqa: N815
    _get_backend_name = getBackendName

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
        self.options.group_name = distributed_c10d.GroupName(name)

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

    def get_group_store(self) -> Store:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: all members count from zero."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # -- barriers ----------------------------------------------------------------------------------------------------

    @keep_out_of_graphs
    def barrier(self, opts: Any = None, timeout: Any = None) -> PacelineWork:  # type: ignore[override]
        return self._start(self._shared.barrier, opts, [], timeout=timeout)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier at which rank 0 finds the missing members; the group stays usable for the others."""
        self._sequence += 1
        if self._gloo is not None:
            self._gloo.monitored_barrier(timeout or self._timeout, wait_all_ranks)
        else:
            limit = timeout.total_seconds() if timeout is not None else self.group.control.timeouts.barrier
            self._monitored_barrier.wait(limit, wait_all_ranks)

    # -- messages ----------------------------------------------------------------------------------------------------

    @c10d_call
    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        (tensor,) = self._single("send", tensors)
        self._sequence += 1
        if self._gloo is not None and self._peer(peer) != self._rank:
            return self._gloo.send([given(tensor)], peer, tag)
        sending = self._mailbox.send(self._box(peer), given(tensor), tag)
        if not sending.done:
            self._mailbox.attend()
        return P2PWork(sending, tensors, record=profiling.take())

    @c10d_call
    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> PacelineWork:
        return self._receive(tensors, peer, tag)

    @c10d_call
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> PacelineWork:
        return self._receive(tensors, ANY, tag)

    def _receive(self, tensors: Tensors, peer: int, tag: int) -> PacelineWork:
        filled = Filled(self._single("recv", tensors))
        self._sequence += 1
        if self._gloo is not None and peer != self._rank:
            asked = (filled.parts, tag) if peer == ANY else (filled.parts, self._peer(peer), tag)
            begin = self._gloo.recv_anysource if peer == ANY else self._gloo.recv
            return GlooWork(begin(*asked), filled.back)
        receiving = self._mailbox.receive(self._box(peer), filled.parts[0], tag)
        work = P2PWork(receiving, tensors, filled.back if filled.copies else None, profiling.take())
        if not receiving.done:
            self._mailbox.attend()
        return work

    def _box(self, peer: int) -> int:
        """A member's number in the mailbox; between machines the mailbox only has messages of a member to itself."""
        if self._gloo is not None:
            return self.group.rank
        return peer if peer == ANY else self._peer(peer)

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise InvalidCall(f"there is no rank {rank} in this group; ranks are 0 to {self._size - 1}")
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
        self._timeout = self.options._timeout = timeout
        if self._gloo is not None:
            self._gloo._set_default_timeout(timeout)

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


functional_ops.register()


def say(message: str) -> None:
    print(f"paceline: {message}", file=sys.stderr, flush=True)
