"""How the members of a team find each other on one machine, and how they notice that one has died."""

from __future__ import annotations

import datetime
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.config import Launch, Place, Timeouts
from paceline.errors import JoinError, TeamTimeout, UsageError
from paceline.transport import Intent, Meeting, Memory, Steps


class Pulse:
    """Watches the processes of the other members through pidfds: ready to read once the process has died."""

    def __init__(self, meeting: Steps) -> None:
        self._descriptors: dict[int, int] = {}
        self._gone: set[int] = set()
        for rank in range(meeting.size):
            if rank == meeting.rank:
                continue
            try:
                self._descriptors[rank] = os.pidfd_open(meeting.pid(rank))
            except ProcessLookupError:
                self._gone.add(rank)
        self.close = weakref.finalize(self, _close, list(self._descriptors.values()))
        """Stop watching."""

    def lost(self, rank: int) -> str | None:
        if not self.close.alive:
            return None
        if rank in self._gone:
            return "died"
        descriptor = self._descriptors.get(rank)
        if descriptor is None:
            return None
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if poll.poll(0):
            self._gone.add(rank)
            return "died"
        return None


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Members:
    """This process among the others: a chair at their meetings, and shared memory on demand."""

    def __init__(self, place: Place, meeting: Meeting, pulse: Pulse, store: Store | None) -> None:
        self.rank, self.size = place.rank, place.world_size
        self.meeting = meeting
        self._pulse = pulse
        self._store = store  # rank 0 may be its host, and goes on being it as long as the team lasts

    def share(self, size: int, *, keep: bool = False) -> Memory:
        """New memory that all members map; all must ask for it, with the same size.

        keep: its descriptor stays open, to hand it on to others.
        """
        if self.size == 1:
            return Memory.create(size)
        meeting = self.meeting
        memory = None
        if self.rank == 0:
            memory = Memory.create(size)
            meeting.note[:8] = memory.descriptor.to_bytes(8, "little")
        meeting.meet(Intent.ALLOCATE, 8)
        descriptor = int.from_bytes(meeting.notes[0][:8], "little")
        if memory is None:
            memory = Memory.of(meeting.pid(0), descriptor)
        meeting.meet(Intent.ALLOCATE)
        if not keep:
            memory.close_descriptor()
        return memory

    def mirror(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every member the lead's values of these."""
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            payload = b""
            if self.rank == 0:
                payload = bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            value = self.gather(payload, Intent.ALLOCATE)[0]
            if self.rank != 0:
                with torch.no_grad():
                    tensor.copy_(torch.frombuffer(bytearray(value), dtype=tensor.dtype).view(tensor.shape))

    def gather(self, payload: bytes, intent: Intent = Intent.GATHER) -> list[bytes]:
        """Everybody's payload, by rank; of any length, also of different ones. Passive members bring nothing."""
        if self.size == 1:
            return [payload]
        meeting = self.meeting
        parts: list[list[bytes]] = [[] for _ in range(self.size)]
        start = 0
        left = 1
        while left:
            piece = payload[start : start + meeting.CAPACITY - 8]
            start += len(piece)
            meeting.note[:8] = (len(payload) - start).to_bytes(8, "little")
            meeting.note[8 : 8 + len(piece)] = piece
            meeting.meet(intent, 8 + len(piece))
            left = 0
            for rank, note in enumerate(meeting.notes):
                length = meeting.length(rank)
                if length > 8:
                    parts[rank].append(bytes(note[8:length]))
                if length >= 8:
                    left = max(left, int.from_bytes(note[:8], "little"))
        return [b"".join(part) for part in parts]

    def leave(self) -> None:
        """Tell the others that this member will not come again."""
        global _current
        self.meeting.sign_out()
        if _current is self:
            _current = None

    def wait_until_left(self, seconds: float = 10.0) -> None:
        """Until all others have left or died, but not for ever."""
        until = time.monotonic() + seconds
        for rank in range(self.size):
            while rank != self.rank and time.monotonic() < until:
                if self.meeting.has_left(rank) or self._pulse.lost(rank):
                    break
                time.sleep(0.02)


_current: Members | None = None


def current() -> Members | None:
    """The team that this process is in, if it has come together."""
    return _current


def come_together(place: Place, launch: Launch, timeouts: Timeouts, say: Callable[[str], None]) -> Members:
    """Meet the other members of this team; a second time there is nothing left to do."""
    global _current
    if _current is not None:
        return _current
    if launch.joins is not None:
        _current = _on_its_own(place, timeouts, say)
        return _current
    if place.local_world_size != place.world_size:
        raise UsageError(
            f"this team has {place.world_size} workers of which {place.local_world_size} on this machine; "
            "a team must be on one machine"
        )
    memory, store = _control_memory(place, launch, timeouts)
    patience = Timeouts(join=timeouts.join, meeting=timeouts.join, notice=timeouts.notice)
    meeting = Meeting(memory, place.rank, place.world_size, patience, say)
    meeting.sign_in()
    try:
        meeting.meet(Intent.BARRIER)
    except TeamTimeout as error:
        raise JoinError(f"{error}; raise it with --timeout if they only need longer", error.ranks) from None
    meeting.timeouts = timeouts
    meeting.watch = pulse = Pulse(meeting)
    # Nobody goes on before all have taken the pulse of all: a process id must not be reused in between.
    meeting.meet(Intent.BARRIER)
    memory.close_descriptor()
    _current = Members(place, meeting, pulse, store)
    return _current


def _on_its_own(place: Place, timeouts: Timeouts, say: Callable[[str], None]) -> Members:
    """Of one who joins a run that goes on: it meets nobody here, and hears of the others from the server."""
    meeting = Meeting(Memory.create(Meeting.memory_size(1)), 0, 1, timeouts, say)
    meeting.sign_in()
    alone = Place(rank=place.rank, local_rank=place.local_rank, world_size=1, local_world_size=1)
    return Members(alone, meeting, Pulse(meeting), None)


def _control_memory(place: Place, launch: Launch, timeouts: Timeouts) -> tuple[Memory, Store | None]:
    """The memory in which the team meets, and the store through which it was found."""
    if launch.control is not None:
        return Memory.inherited(launch.control), None
    size = Meeting.memory_size(place.world_size)
    if place.world_size == 1:
        return Memory.create(size), None
    store = _store(place, timeouts)
    if place.rank == 0:
        memory = Memory.create(size)
        store.set("control", f"{os.getpid()} {memory.descriptor} {machine()}")
        return memory, store
    try:
        pid, descriptor, where = store.get("control").decode().split()
        if where != machine():
            raise JoinError("this worker is not on rank 0's machine, or not in its pid namespace", [place.rank])
        return Memory.of(int(pid), int(descriptor)), store
    except DistStoreError as error:
        raise JoinError(f"rank {place.rank} did not hear from rank 0 in {timeouts.join:g} s: {error}") from None
    except OSError as error:
        raise JoinError(f"rank {place.rank} cannot map the memory of rank 0: {error}") from None


def _store(place: Place, timeouts: Timeouts) -> Store:
    """torch's key-value store at MASTER_ADDR and MASTER_PORT, hosted by torchrun's agent or else by rank 0."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UsageError(
            f"WORLD_SIZE is {place.world_size}, but MASTER_ADDR and MASTER_PORT do not say where rank 0 is; "
            "start the script with paceline run or torchrun"
        ) from None
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        host,
        port,
        place.world_size,
        is_master=place.rank == 0 and not hosted,
        timeout=datetime.timedelta(seconds=timeouts.join),
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"paceline/{attempt}", store)


def machine() -> str:
    """Equal in two processes exactly if they can find each other in /proc, and have the same network."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
        boot = file.read().strip()
    return "/".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])  # noqa: PTH115
