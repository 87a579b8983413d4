"""Collectives of all workers of a team on several machines, with errors that name the lost worker.

gloo only reports that a connection was closed, and only to workers that waited on it. So a worker that gets this error
closes its own connections: workers that wait for it get an error in turn, and so on, within milliseconds. Then all of
them come to a barrier, which finds who is missing.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from paceline.cluster.membership import Members
from paceline.collectives.gloo import init_default_group, open_gloo
from paceline.errors import TeamError, UsageError
from paceline.transport import BarrierKind
from paceline.transport.peer_memory import bytes_of

_ROLL_CALL = 15.0
"""Seconds in which the others must come to the barrier after a connection was lost."""


class WorldGroup:
    """One worker's collectives with all others."""

    def __init__(self, members: Members, device: torch.device, told: Callable[[float, int], None]) -> None:
        """told: is called for each exchange with its seconds and the bytes received."""
        self._members, self._told = members, told
        self.rank, self.size = members.rank, members.size
        self._own = not distributed.is_initialized()
        """True if this made torch's default group, and must end it."""
        timeouts = members.barrier.timeouts
        limit = datetime.timedelta(seconds=0.9 * timeouts.barrier)
        patience = datetime.timedelta(seconds=max(timeouts.join, timeouts.barrier))
        assert members.store is not None  # through which the machines found each other
        store = PrefixStore(f"everybody/{next(members.numbers)}", members.store)
        if self._own:
            init_default_group(device, PrefixStore("torch", store), self.rank, self.size, patience)
        elif (distributed.get_rank(), distributed.get_world_size()) != (self.rank, self.size):
            raise UsageError(
                f"torch's default process group has {distributed.get_world_size()} members and this is number "
                f"{distributed.get_rank()}; in the team it is {self.rank} of {self.size}, and both must be the same"
            )
        self.mesh = DeviceMesh.from_group(distributed.group.WORLD, device.type)  # type: ignore[arg-type]
        """All workers, as torch's own distributed tensors know them."""
        # On CPUs a group of our own, since the connections of torch's cannot be closed alone.
        self._gloo: Any = None
        if device.type == "cpu":
            host = members.hosts[members.machine]
            self._gloo = open_gloo(PrefixStore("gloo", store), self.rank, self.size, host, patience, limit)
        self.open = True

    # -- exchanging --------------------------------------------------------------------------------------------------

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Gathers all workers' parts, by rank."""
        with self._named(whole.nbytes - part.nbytes):
            if self._gloo is None:
                distributed.all_gather_into_tensor(whole, part)
            else:
                self._gloo._allgather_base(bytes_of(whole), bytes_of(part)).wait()

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Sums all workers' `whole`, of which this worker gets its part."""
        with self._named((self.size - 1) * part.nbytes):
            if self._gloo is None:
                distributed.reduce_scatter_tensor(part, whole)
            else:
                self._gloo._reduce_scatter_base(part, whole, distributed.ReduceScatterOptions()).wait()

    def mirror(self, tensor: torch.Tensor) -> None:
        """Copies rank 0's values to all."""
        with self._named(tensor.nbytes if self.rank else 0):
            if self._gloo is None:
                distributed.broadcast(tensor, 0)
            elif tensor.numel():
                options = distributed.BroadcastOptions()
                options.rootRank = 0
                self._gloo.broadcast([bytes_of(tensor)], options).wait()

    @contextlib.contextmanager
    def _named(self, read: int) -> Iterator[None]:
        """Turns errors of torch.distributed into ours."""
        if not self.open:
            raise TeamError("this worker has lost its team, and cannot exchange anything with it any more")
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            self.drop()
            self._call_roll()
            raise TeamError(
                f"rank {self.rank} could not exchange with the other workers: {str(error).splitlines()[0]}"
            ) from None
        self._told(time.perf_counter() - start, read)

    def _call_roll(self) -> None:
        """Comes to a barrier, whose error names the missing workers."""
        barrier = self._members.barrier
        timeouts = barrier.timeouts
        barrier.timeouts = msgspec.structs.replace(timeouts, barrier=min(_ROLL_CALL, timeouts.barrier))
        try:
            barrier.wait(BarrierKind.REDUCE)
        finally:
            barrier.timeouts = timeouts

    # -- the end -----------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Closes all connections, so that workers that wait for this one get an error."""
        self._gloo = None
        self.open = False

    def close(self) -> None:
        self.drop()
        if self._own and distributed.is_initialized():
            distributed.destroy_process_group()
        self._own = False
