"""Finds from a run's events alone whether every update of a mesh was made of whole gradients, each of one replica."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from paceline.events import Brought, Event, Push, Update


def parts_amiss(events: Iterable[Event], replicas: Sequence[Sequence[int]], apart: Sequence[int] = ()) -> list[str]:
    """All that was wrong, one sentence each.

    replicas: the ranks of each; a server calls it by its first rank.
    apart: those on other machines than the server's, whose times are only as exact as two clocks can be compared.
    """
    known = list(events)
    index = {ranks[0]: number for number, ranks in enumerate(replicas)}
    brought: dict[tuple[int, int], list[Brought]] = defaultdict(list)
    for event in known:
        if isinstance(event, Brought):
            brought[event.replica, event.push].append(event)
    pushes = sorted((event for event in known if isinstance(event, Push)), key=lambda event: event.ticket)
    count: dict[int, int] = defaultdict(int)
    found, good = [], set()
    before: dict[int, float] = {}
    for push in pushes:
        replica = index[push.rank]
        count[replica] += 1
        parts = brought[replica, count[replica]]
        ranks = sorted(part.rank for part in parts)
        what = f"push {count[replica]} of replica {replica}"
        problems = []
        if ranks != list(replicas[replica]):
            problems.append(f"{what} has parts of ranks {ranks}")
        if {part.version for part in parts} != {push.version}:
            problems.append(f"{what} is of version {push.version}, its parts of {[part.version for part in parts]}")
        if sum(part.parts for part in parts) != max((part.of for part in parts), default=0):
            problems.append(f"{what} has {sum(part.parts for part in parts)} parts")
        same_clock = [part for part in parts if part.rank not in apart]
        if any(part.start > push.start for part in same_clock):
            problems.append(f"{what} was made before all of its parts were there")
        if any(part.start < before.get(replica, 0.0) for part in same_clock):
            problems.append(f"{what} has parts from before the last one")
        before[replica] = push.start
        found += problems
        if not problems:
            good.add(push.ticket)
    for update in known:
        if isinstance(update, Update):
            found += [f"version {update.version} is made of push {one}" for one in update.pushes if one not in good]
    return found
