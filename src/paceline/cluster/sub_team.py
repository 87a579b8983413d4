"""Some workers of a team on several machines as a team of their own, with barriers that do not concern the others."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.cluster.membership import LivenessMonitor, Members
from paceline.cluster.rendezvous import MemberList, exchange_ports
from paceline.transport import Barrier, BarrierKind, MachinesBarrier, Memory
from paceline.transport.peer_connections import connect

_CLOCK = struct.Struct("=d")


def join_part(members: Members, each: int, say: Callable[[str], None]) -> Members:
    """This worker's part of a team that is cut into parts of so many consecutive ranks; all workers call it.

    A member's rank is its place in the part; messages name its rank in the team.
    """
    assert members.store is not None
    part = members.rank // each
    ranks = range(part * each, (part + 1) * each)
    here = [rank for rank in members.machines[members.machine] if rank in ranks]
    local, wide = None, None
    for other in sorted({rank // each for rank in members.machines[members.machine]}):
        count = sum(rank // each == other for rank in members.machines[members.machine])
        memories = [members.share(Barrier.memory_size(count)), members.share(MachinesBarrier.memory_size(each))]
        if other == part:
            local, wide = memories
    assert local is not None and wide is not None
    inner = Barrier(local, here.index(members.rank), len(here), members.barrier.timeouts, say)
    inner.ranks = here
    inner.crowd(members.local.size)
    inner.sign_in()
    aheads = members.gather(_CLOCK.pack(members.ahead), BarrierKind.ALLOCATE)  # after which all have signed in
    inner.watch = liveness = LivenessMonitor(inner)
    members.barrier.wait(BarrierKind.ALLOCATE)
    neighbours = Members(inner.rank, inner.size, inner, liveness, members.store)
    found = neighbours
    machines = [number for number, there in enumerate(members.machines) if any(rank in ranks for rank in there)]
    if len(machines) > 1:
        found = _over_machines(members, neighbours, ranks, machines, wide, say)
    found.secret, found.ahead = members.secret, _CLOCK.unpack(aheads[members.machines[members.machine][0]])[0]
    found.store = PrefixStore(f"part/{part}", members.store)
    return found


def _over_machines(
    members: Members,
    neighbours: Members,
    ranks: Sequence[int],
    machines: Sequence[int],
    wide: Memory,
    say: Callable[[str], None],
) -> Members:
    assert members.store is not None and members.secret is not None
    hosts = [members.hosts[number] for number in machines]
    places = [[ranks.index(rank) for rank in members.machines[number] if rank in ranks] for number in machines]
    timeouts, connections, inner = members.barrier.timeouts, None, neighbours.barrier
    assert isinstance(inner, Barrier)
    inner.place = f" on {members.hosts[members.machine]}"
    if inner.rank == 0:
        ways = exchange_ports(PrefixStore(f"part/{ranks[0]}/barrier", members.store), timeouts)
        patience = (timeouts.join, timeouts.barrier)
        connections = connect(machines.index(members.machine), hosts, members.secret, *ways, patience)
    place = ranks.index(members.rank)
    barrier = MachinesBarrier(place, places, hosts, inner, wide, connections, say)
    barrier.ranks = ranks
    return Members(
        place,
        len(ranks),
        barrier,
        neighbours._liveness,
        members.store,
        roster=MemberList(places, hosts),
        local=neighbours,
        connections=connections,
    )
