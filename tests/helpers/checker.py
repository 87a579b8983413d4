"""Finds from the events of a run alone what it did wrong, under any policy.

`violations` knows no code of the package but the schema of events: it replays what the server wrote down, and
recomputes what must always hold.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from helpers.support import Outcome
from paceline.events import Cancel, Epoch, Event, Join, LeaseGiven, Leave, Push, Return, Roster, Seen, Update, decode

# -- what a policy promises ------------------------------------------------------------------------------------------

_FRESH = ("sync", "k-sync", "k-batch-sync")
_BATCHES = ("k-batch-sync", "k-batch-async")


@dataclasses.dataclass(frozen=True)
class Promise:
    """A strategy spec, taken apart."""

    family: str
    """Of those who push: of the groups, where there are groups."""
    k: int
    """How many pushes make an update; to begin with, if it grows."""
    bound: int | None
    """Steps that nobody may be ahead of the slowest."""
    size: int
    """Workers that push as one."""
    grows: bool
    grouped: bool = False

    @classmethod
    def of(cls, spec: str, workers: int) -> Promise:
        name, _, rest = spec.partition(":")
        size, grouped = 1, name == "groups"
        if grouped:
            rest, _, between = rest.partition(",between=")
            size = int(rest.removeprefix("size="))
            name, _, rest = (between or "async").partition(":")
        options = dict(part.split("=") for part in rest.split(",") if part)
        grows = name == "adaptive"
        if grows:
            name, options = options.get("of", "k-async"), {"k": options.get("start", "1")}
        k = -(-workers // size) if name == "sync" else int(options.get("k", 1))
        return cls(name, k, int(options["s"]) if name == "ssp" else None, size, grows, grouped)

    def lockstep(self, workers: int) -> bool:
        """Whether everybody is in every update, each with samples of its own."""
        return not self.grows and self.family in ("sync", "k-sync", "k-async") and self.k == -(-workers // self.size)


# -- what must always hold -------------------------------------------------------------------------------------------


def violations(events: Iterable[Event], spec: str | None = None) -> list[str]:
    """All that a run did wrong, one sentence each. Without a spec, the strategy is the one that its workers name."""
    ordered = list(events)
    spec = spec or next(event.strategy for event in ordered if isinstance(event, Join))
    # A worker that was killed may not have written down anything itself.
    workers = 1 + max(event.rank for event in ordered)
    began = next((len(event.workers) for event in ordered if isinstance(event, Roster)), workers)
    return _Replay(spec, workers, began).over(ordered)


class _Replay:
    """One run, event by event."""

    def __init__(self, spec: str, workers: int, began: int) -> None:
        """workers: how many ranks there ever were; began: how many of them from the start."""
        self.promise, self.workers = Promise.of(spec, began), workers
        self.lockstep = self.promise.lockstep(began)
        self.found: list[str] = []
        self._say = self.found.append
        self.version = 0
        self.k = self.promise.k
        self.most = self.k
        """The largest K since the last update, where K follows the workers."""
        self.here = set(range(began))
        self.late: set[int] = set()
        self.fresh: set[int] = set()
        """Who has joined while the run went on; nobody waits for the fresh of them, who have trained on nothing yet."""
        self.changed = False
        """Whether workers have come or gone."""
        self.groups = -(-began // self.promise.size)
        self.unit = {rank: rank * self.groups // began for rank in range(began)}
        """Which group each worker is in, or the worker itself."""
        self.gone_since_update = False
        self.pushes: dict[int, Push] = {}
        self.free_at: dict[int, int] = {}
        """By ticket: samples that could be given out when it came."""
        self.ended: dict[int, str] = {}
        """By ticket: used, dropped or skipped."""
        self.leases: dict[int, LeaseGiven] = {}
        self.state: dict[int, str] = {}
        self.out: set[int] = set()
        """By number of the lease: out, pushed, done or returned; and those that are out."""
        self.taken: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        """By loader and epoch: which lease has each sample, by place."""
        self.done: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self.epochs: dict[tuple[int, int], Epoch] = {}
        self.over_at: set[tuple[int, int]] = set()
        self.abandoned: set[tuple[int, int]] = set()
        self.again: set[int] = set()
        """Leases that were returned and that nobody has got since."""
        self.cancelled: dict[int, int] = {}
        """Leases of steps that were cancelled, by who says so."""
        self.given_back: set[int] = set()
        self.last_version = dict.fromkeys(range(workers), 0)
        units = range(-(-max(workers, began) // self.promise.size))
        self.at_least, self.at_most = dict.fromkeys(units, 0), dict.fromkeys(units, 0)
        """Bounds of the steps that each has finished: who had nothing to compute need not catch up."""
        self.starved: set[int] = set()
        self.quit: set[int] = set()
        self.carries = False

    def over(self, events: Sequence[Event]) -> list[str]:
        # Gradients of several minibatches may span two epochs: then samples are counted over the whole run.
        self.carries = any(isinstance(event, Push) and len(event.leases) > 1 for event in events)
        pushed = {number for event in events if isinstance(event, Push) for number in event.leases}
        self.training = {event.loader for event in events if isinstance(event, LeaseGiven) and event.number in pushed}
        left = {event.rank for event in events if isinstance(event, Leave)}
        last = {event.rank: place for place, event in enumerate(events) if event.rank not in left and event.rank >= 0}
        for place, event in enumerate(events):
            for rank in [rank for rank in self.here if last.get(rank, place) < place]:
                self.here.discard(rank)  # killed: it never said that it leaves
                self.gone_since_update = True
            match event:
                case Push():
                    self._push(event)
                case Update():
                    self._update(event)
                case LeaseGiven():
                    self._lease(event)
                case Return():
                    self._return(event)
                case Seen():
                    self._finish(event.leases, f"Seen by rank {event.rank}", "out")
                case Epoch():
                    self._epoch(event)
                case Roster():
                    self._roster(event)
                case Cancel():
                    self.cancelled |= dict.fromkeys(event.leases, event.rank)
            self._note_who_starves()
        self._end()
        return self.found

    def _roster(self, roster: Roster) -> None:
        """Somebody has come, or gone. Who comes is in the smallest group."""
        now = set(roster.workers)
        if now == self.here:
            return
        if roster.version != self.version:
            self._say(f"the workers changed at version {self.version}, not {roster.version}")
        self.changed = True
        self.gone_since_update = self.gone_since_update or bool(self.here - now)
        for rank in sorted(now - self.here):
            sizes = Counter(self.unit[other] for other in self.here)
            groups = range(self.groups)
            self.unit[rank] = min(groups, key=lambda unit: (sizes[unit], unit)) if self.promise.grouped else rank
            if not self.promise.grouped:
                self.at_least[rank] = self.at_most[rank] = 0
            self.late.add(rank)
            self.fresh.add(rank)
            self.starved.add(rank)
            self.here.add(rank)
        self.here = now
        self.fresh &= now
        if self.promise.family == "sync":
            self.k = len({self.unit[rank] for rank in now}) or 1
            self.most = max(self.most, self.k)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _push(self, push: Push) -> None:
        who = f"push {push.ticket} of rank {push.rank}"
        if push.ticket in self.pushes:
            self._say(f"{who} came twice")
            return
        self.pushes[push.ticket] = push
        self.free_at[push.ticket] = self._free()
        if push.staleness != self.version - push.version:
            self._say(f"{who} is {self.version - push.version} versions stale, not {push.staleness}")
        if not self.last_version[push.rank] <= push.version <= self.version:
            self._say(f"{who} is of version {push.version}, after {self.last_version[push.rank]}")
        self.fresh.discard(push.rank)
        self.last_version[push.rank] = max(push.version, self.last_version[push.rank])
        for number in push.leases:
            if self.state.get(number) != "out" or self.leases[number].rank != push.rank:
                self._say(f"{who} has lease {number}, which is not its own to train on")
            self._turn(number, "pushed")
        if push.leases and push.samples != sum(self.leases[n].samples for n in push.leases if n in self.leases):
            self._say(f"{who} has {push.samples} samples, which is not what its leases have")
        late = self.promise.family in _FRESH and push.version != self.version
        if late and push.outcome != "dropped":
            self._say(f"{who} was {push.outcome}, though it is of version {push.version}, not {self.version}")
        if push.outcome == "dropped":
            self.ended[push.ticket] = "dropped"
        elif push.outcome == "skipped":
            self.ended[push.ticket] = "skipped"
            self._finish(push.leases, who, "pushed")

    def _update(self, update: Update) -> None:
        what = f"update {update.version}"
        if update.version != self.version + 1:
            self._say(f"{what} came after version {self.version}: versions rise by one")
        used = []
        for ticket in update.pushes:
            if ticket not in self.pushes:
                self._say(f"{what} uses push {ticket}, which never came")
                continue
            push = self.pushes[ticket]
            if ticket in self.ended:
                self._say(f"{what} uses push {ticket}, which was {self.ended[ticket]} before")
            if any(number in self.cancelled for number in push.leases):
                self._say(f"{what} uses push {ticket}, whose step was cancelled")
            if self.promise.family in _FRESH and push.version != self.version:
                self._say(f"{what} uses push {ticket}, which is of version {push.version}, not {self.version}")
            used.append(push)
        if update.workers != len(update.pushes):
            self._say(f"{what} is said to be of {update.workers} gradients, and names {len(update.pushes)}")
        self._check_count(what, used)
        self._check_groups(what, used)
        self._check_bound(what, used)
        for push in used:
            self.ended[push.ticket] = "used"
            self._finish(push.leases, f"push {push.ticket}", "pushed")
        self.version = update.version
        self.gone_since_update = False
        self.most = self.k

    def _check_count(self, what: str, used: list[Push]) -> None:
        """As many as the policy promises; fewer only if no more could have come."""
        promise = self.promise
        units = [self.unit[push.rank] for push in used]
        # A rank may have been another worker's before, and a group may have grown.
        again = any(push.rank in self.late for push in used)
        if promise.family not in _BATCHES and len(set(units)) * promise.size < len(used) and not again:
            self._say(f"{what} uses several gradients of one worker")
        count = len(set(units)) if promise.grouped else len(used)
        if promise.grows:
            self.k = self.most = max(self.k, count)
        if count > (self.workers if promise.grows else self.most):
            self._say(f"{what} is of {count}, and {self.k} are enough")
        if count >= self.k:
            return
        present = len({self.unit[rank] for rank in self.here - self.fresh})
        if promise.family not in _BATCHES and count >= present:
            return
        if self.gone_since_update or (promise.family in _BATCHES and not self.here):
            return
        if self.lockstep and not self._last_of_epoch(used):
            self._say(f"{what} is of {count} of {self.k}, and is not the last of its epoch")
        if not self.lockstep and self._free_for(used):
            self._say(f"{what} is of {count} of {self.k}, though there are samples left to train on")
        if not self.carries and (late := self._holders() - {push.rank for push in used}):
            self._say(f"{what} is of {count} of {self.k}, though rank {min(late)} is not done")

    def _check_groups(self, what: str, used: list[Push]) -> None:
        present = {push.rank for push in used}
        for group in {self.unit[rank] for rank in present} if self.promise.grouped else ():
            # Who has left its loop, and so given its samples back, computes no more; that it goes is heard later.
            members = {rank for rank in self.here - self.late - self.quit if self.unit[rank] == group}
            for rank in members - present:
                computes = rank in self._holders() and not self.carries
                if computes or not (self._free_for(used) == 0 or self.gone_since_update):
                    self._say(f"{what} uses group {group} without rank {rank}")

    def _check_bound(self, what: str, used: list[Push]) -> None:
        if self.promise.bound is None:
            return
        holders = self._holders() - {push.rank for push in used}
        active = {self.unit[rank] for rank in holders}
        for unit in {self.unit[push.rank] for push in used}:
            slowest = min((self.at_most[other] for other in active if other != unit), default=self.at_least[unit])
            if self.at_least[unit] - slowest > self.promise.bound:
                ahead = self.at_least[unit] - slowest
                self._say(f"{what} is a step of {unit} begun {ahead} ahead of the slowest; {self.promise.bound} may be")
            self.at_least[unit] += 1
            self.at_most[unit] += 1

    # -- samples -----------------------------------------------------------------------------------------------------

    def _lease(self, lease: LeaseGiven) -> None:
        self.quit.discard(lease.rank)
        key = (lease.loader, lease.epoch)
        what = f"lease {lease.number} of rank {lease.rank}"
        if lease.number in self.leases:
            self._say(f"{what} has a number that was given before")
        # What somebody left of a window when its script ended goes to whoever is still there.
        if key not in self.epochs or (key in self.over_at and not self.carries):
            self._say(f"{what} is of epoch {lease.epoch}, which is not open")
        for place in range(lease.first, lease.first + lease.samples):
            owner = self.taken[key].get(place)
            if owner is not None and not self.carries:
                self._say(f"{what} has sample {place}, which lease {owner} has")
                break
        self.taken[key] |= dict.fromkeys(range(lease.first, lease.first + lease.samples), lease.number)
        for number in list(self.again):
            old = self.leases[number]
            same = (old.loader, old.first, old.samples) == (lease.loader, lease.first, lease.samples)
            if same and (old.epoch == lease.epoch or self.carries):
                self.again.discard(number)
                break
        if lease.rank in self.starved:
            self.starved.discard(lease.rank)
            self._wake(self.unit[lease.rank], lease.rank in self.fresh)
        self.fresh.discard(lease.rank)
        self.leases[lease.number] = lease
        self._turn(lease.number, "out")

    def _turn(self, number: int, state: str) -> None:
        self.state[number] = state
        (self.out.add if state == "out" else self.out.discard)(number)

    def _wake(self, unit: int, joined: bool) -> None:
        """Who had nothing to compute was not waited for; it need not catch up, but is waited for again.

        Who has joined counts as the slowest of the others.
        """
        if self.promise.bound is None:
            return
        floor = max(self.at_most.values()) - self.promise.bound - 1
        active = [self.at_most[self.unit[rank]] for rank in self._holders()]
        if joined:
            floor = max(floor, min(active) if active else max(self.at_most.values()))
        self.at_most[unit] = max(self.at_most[unit], floor)

    def _finish(self, numbers: Iterable[int], who: str, before: str) -> None:
        """These have been trained on, or looked at."""
        for number in numbers:
            lease = self.leases.get(number)
            if lease is None or self.state[number] != before:
                self._say(f"{who} has lease {number}, which is {self.state.get(number, 'unknown')}")
            if lease is not None:
                self._turn(number, "done")
                self.done[lease.loader, lease.epoch].update(range(lease.first, lease.first + lease.samples))

    def _return(self, back: Return) -> None:
        if back.why == "abandoned":
            self.quit.add(back.rank)
        for number in back.leases:
            lease = self.leases.get(number)
            if lease is None or self.state[number] not in ("out", "pushed") or lease.rank != back.rank:
                self._say(f"rank {back.rank} returns lease {number}, which it does not have")
                continue
            if back.why == "dropped":
                for ticket, push in self.pushes.items():
                    if number in push.leases and ticket not in self.ended:
                        self.ended[ticket] = "dropped"
            elif self.state[number] == "pushed":
                self._say(f"lease {number} was returned ({back.why}) though its gradient is with the server")
            self._turn(number, "returned")
            self.given_back.add(number)
            self.again.add(number)
            if back.why == "abandoned":
                self.abandoned.add((lease.loader, lease.epoch))
            for place in range(lease.first, lease.first + lease.samples):
                self.taken[lease.loader, lease.epoch].pop(place, None)

    def _epoch(self, epoch: Epoch) -> None:
        key = (epoch.loader, epoch.epoch)
        if not epoch.over:
            running = [k for k in self.epochs if k[0] == epoch.loader and k not in self.over_at | self.abandoned]
            if running:
                self._say(f"epoch {epoch.epoch} begins before {running[0][1]} is over")
            self.epochs[key] = epoch
            return
        self.over_at.add(key)
        if self.carries or key in self.abandoned:
            return
        self._check_covered(key, "when it ends")

    def _check_covered(self, key: tuple[int, int], when: str) -> None:
        samples = self.epochs[key].samples
        places = self.done[key]
        missing = [place for place in range(samples) if not places[place]]
        twice = [place for place, times in places.items() if times > 1]
        strange = [place for place in places if place >= samples]
        for found, how in ((missing, "not trained on"), (twice, "trained on twice"), (strange, "not its own")):
            if found:
                self._say(f"epoch {key[1]}: {len(found)} samples are {how} {when}, the first is {found[0]}")

    # -- who could do what -------------------------------------------------------------------------------------------

    def _holders(self) -> set[int]:
        """Who has samples and no gradient of them yet."""
        return {self.leases[number].rank for number in self.out} & self.here

    def _free(self) -> int:
        """Samples that could be given out."""
        return sum(
            epoch.samples - len(self.taken[key])
            for key, epoch in self.epochs.items()
            if key not in self.over_at and key[0] in self.training
        )

    def _free_for(self, used: list[Push]) -> int:
        """As many when an update was decided, if that was by a push: what this drops is free only after it."""
        newest = max(used, key=lambda push: push.ticket, default=None)
        return self._free() if newest is None else min(self._free(), self.free_at[newest.ticket])

    def _last_of_epoch(self, used: list[Push]) -> bool:
        left = sum(
            epoch.samples - sum(self.done[key].values())
            for key, epoch in self.epochs.items()
            if key not in self.over_at and key[0] in self.training
        )
        return left <= sum(push.samples for push in used)

    def _note_who_starves(self) -> None:
        if not self._free():
            self.starved |= self.here - self._holders()

    def _end(self) -> None:
        forgotten = [ticket for ticket in self.pushes if ticket not in self.ended]
        if forgotten:
            self._say(f"push {forgotten[0]} was neither used nor dropped in the end")
        for number, rank in self.cancelled.items():
            if number not in self.given_back:
                self._say(f"rank {rank} was cancelled, and lease {number} did not go back")
        if unended := self.epochs.keys() - self.over_at - self.abandoned:
            self._say(f"epoch {min(unended)[1]} was never over")
        if self.carries:
            # What a script had summed up when it ended was never a gradient.
            trained = sum(sum(places.values()) for places in self.done.values())
            left = sum(self.leases[n].samples for n in self.out | self.again)
            due = sum(epoch.samples for epoch in self.epochs.values())
            if trained + left != due:
                self._say(f"{trained} samples were trained on, {left} were left in the end, and there were {due}")
            return
        for key in self.epochs.keys() - self.abandoned:
            self._check_covered(key, "in the end")
        for number in self.again:
            lease = self.leases[number]
            if (lease.loader, lease.epoch) not in self.abandoned:
                self._say(f"lease {number} was returned, and nobody got its samples")


# -- reading a run --------------------------------------------------------------------------------------------------


def events_of(outcome: Outcome, name: str) -> list[Event]:
    lines = (outcome.run.cwd / "runs" / name / "events.jsonl").read_bytes().splitlines()
    return [decode(line) for line in lines]
