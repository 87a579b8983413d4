"""The parts of a loader's rounds that each worker gets, cut from one order that all have."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.balance import Balancer
from paceline.data.drawing import OrderDrawing
from paceline.data.keys import pack, pack_for_all, unpack
from paceline.data.orphaned_samples import OrphanedSamples
from paceline.data.split import even, scaled
from paceline.data.team_view import TeamView
from paceline.errors import UsageError


def rounds_ahead(loader: DataLoader[Any]) -> int:
    """The most rounds that the loader's processes fetch before they are trained on."""
    return 1 + loader.num_workers * (loader.prefetch_factor or 0)


class EpochShares:
    """One epoch of a loader: its order, the parts that the loader has taken, and how far the script is."""

    def __init__(self, first: int, left: list[Any] | None, *, drops: bool) -> None:
        """left: the order, if another run has begun the epoch; drops: a last round that is too small is left out."""
        self.first = first
        """The number of its first round, counted over all epochs."""
        self.given: deque[tuple[int, float, int, int]] = deque()
        """Samples, weight and round of each part that the loader has and the script has not, and the round's end."""
        self.left, self.drops = left, drops and left is None
        self.order: list[Any] | None = None
        """None until it is drawn."""
        self.start = 0
        """Where the first round begins in the order that the script has not got."""
        self.drawn = 0
        """Length of the order as it was drawn, without samples of lost workers."""
        self.next = first
        """The round that is cut next."""
        self.whole = False
        """True if all rounds are cut."""
        self.since = self.back = first
        """The first round that this worker takes part in, and the first that it has a part of: later ones if it has
        joined in the middle of the epoch. The rounds in between were cut before; it computes copies of weight 0, also
        of those that were cut with the lost worker of its rank, whose parts others train on."""


class Shares:
    """A batch sampler of this worker's part of every round, which keeps the size of each part until it is used."""

    def __init__(
        self, loader: DataLoader[Any], team: TeamView, balancer: Balancer, total: int, number: int, *, per_worker: bool
    ) -> None:
        """number: of the loader."""
        self._number = number
        self._loader, self._team, self._balancer, self._total = loader, team, balancer, total
        self._per_worker = per_worker
        self.orphans = OrphanedSamples(team.replicas, rounds_ahead(loader))
        self._custom = has_batch_sampler(loader)
        self._drawing = OrderDrawing(loader)
        self._epoch = EpochShares(0, None, drops=False)
        """The epoch that was begun last."""
        self.left: list[Any] | None = None
        """The order of an epoch that another run has begun: what is left of it."""
        self.entered: dict[str, Any] | None = None
        """The epoch that this worker begins by joining in its middle, as `state` of another worker has it."""

    def __len__(self) -> int:
        """Rounds in an epoch, with or without a part for this worker."""
        return rounds_of(self._loader, self._total, self._team.replicas, per_worker=self._per_worker)

    def begin(self, first: int) -> EpochShares:
        """Begins an epoch with this round."""
        left, self.left = self.left, None
        self._epoch = EpochShares(first, left, drops=bool(self._loader.drop_last))
        self._drawing.begin()
        if self.entered is None:
            self.orphans.begin(first)
        else:
            self._epoch.left = unpack(self.entered["order"])
            self._epoch.drops = self.entered["drops"]
            self._epoch.since, self._epoch.back = self.entered["since"], self.entered["back"]
            self.entered = None
        return self._epoch

    def state(self, epoch: EpochShares) -> dict[str, Any]:
        """An epoch that is drawn, for a worker that joins in its middle."""
        assert epoch.order is not None
        order = pack(epoch.order[: epoch.drawn], batches=self._custom)
        return {"first": epoch.first, "order": order, "drops": epoch.drops, **self.orphans.state()}

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts(self._epoch)  # of its own epoch, also where another one is begun meanwhile

    def _parts(self, epoch: EpochShares) -> Iterator[list[Any]]:
        """This worker's part of every round."""
        for number, (parts, end) in enumerate(self._rounds(epoch), epoch.first):
            epoch.next = number + 1
            if number < epoch.since:
                continue
            mine = parts[self._team.replica] if number >= epoch.back else []
            if mine:
                whole = sum(len(part) for part in parts)
                epoch.given.append((len(mine), len(mine) / whole, number, end))
                yield mine
            elif self._team.lockstep or self._custom or number < epoch.back or self._crowded(number):
                # A copy that does not count: without it this worker would be a round ahead of the others.
                epoch.given.append((0, 0.0, number, end))
                yield next(part for part in parts if part)
        epoch.whole = True

    def _crowded(self, number: int) -> bool:
        """True if so many workers have joined that a whole round has no part for each of them."""
        ranks = self.orphans.sharers(number)
        return len(ranks) > self._whole(ranks)

    def _rounds(self, epoch: EpochShares) -> Iterator[tuple[list[list[Any]], int]]:
        """Per round, one list of indices per replica, and where the next round begins."""
        order = epoch.order = self._order_of(epoch)
        epoch.drawn = len(order)
        number, start, orphans = epoch.first, 0, self.orphans
        while True:
            ranks = orphans.sharers(number)
            if len(order) - start < self._whole(ranks):
                if start >= len(order):
                    ranks = orphans.takers_of(number)
                # The samples of lost workers follow here: only the last round may be short, since a worker without a
                # part in it is done with the epoch.
                left = orphans.take()
                order += left if self._custom else [key for part in left for key in part]
            if start >= len(order):
                return
            parts, start = self._cut(order, start, number, ranks, drops=epoch.drops)
            if not parts:
                return
            yield orphans.note(number, parts), start
            number += 1

    def _order_of(self, epoch: EpochShares) -> list[Any]:
        """The order of an epoch that begins, or of what is left of it."""
        if epoch.left is not None:
            return epoch.left
        return self.draw(self._drawing, batches=self._custom)

    def rest(self, epoch: EpochShares) -> list[Any] | None:
        """The order of what the script has not got of an epoch; None if the epoch is not drawn yet."""
        order, start = epoch.order, epoch.start
        if order is None:
            return None
        whole = self._whole(self.orphans.takers)
        return order[start : start + (len(order) - start) // whole * whole if epoch.drops else len(order)]

    def _whole(self, ranks: list[int]) -> int:
        """Samples, or batches of a batch sampler, in a round of these workers."""
        if self._custom:
            return len(ranks) if self._per_worker else 1
        return len(ranks) if self._loader.batch_sampler is None else self._total

    def _cut(
        self, order: list[Any], start: int, number: int, ranks: list[int], *, drops: bool
    ) -> tuple[list[list[Any]], int]:
        """The next round: a batch, or a part of one, for each of these ranks, and the next start; empty if dropped."""
        parts: list[list[Any]] = [[] for _ in range(max(self._team.replicas, ranks[-1] + 1))]
        total = self._whole(ranks)
        end = self._end(start + total, len(order), len(ranks), drops=drops)
        if end - start < total and drops:
            return [], start
        drawn = order[start:end]
        if self._custom and self._per_worker and len(drawn) == len(ranks):
            for rank, batch in zip(ranks, drawn, strict=True):
                parts[rank] = batch
            return parts, end
        if self._custom:
            drawn = [key for batch in drawn for key in batch]
            if self._per_worker:
                check_suffices(len(drawn), len(ranks))
        first_ones = ranks == list(range(self._team.replicas))
        shares = self._balancer.shares(number) if first_ones else even(total, len(ranks))
        first = 0
        for rank, share in zip(ranks, scaled(shares, len(drawn)), strict=True):
            parts[rank] = drawn[first : first + share]
            first += share
        return parts, end

    def _end(self, end: int, count: int, workers: int, *, drops: bool) -> int:
        """The end of a round of an epoch; if every worker needs a part of each, a rest too small for that joins it."""
        if self._per_worker and not (self._custom or drops) and end < count < end + workers:
            return count
        return min(end, count)

    def draw(self, sampler: Any, *, batches: bool, evaluates: bool = False) -> list[Any]:
        """The order drawn by the lead's sampler, on every worker.

        evaluates: True if the model is only evaluated on it.
        """
        if self._team.size == 1:
            return list(sampler)
        payload = b""
        while True:
            if self._team.rank == self._team.lead:
                payload = pack_for_all(sampler, batches=batches)
            # The lead may be lost before it draws; then the next one does.
            if payload_of_lead := self._team.from_lead(payload, self._number, evaluates=evaluates):
                break
        return unpack(payload_of_lead)


def has_batch_sampler(loader: DataLoader[Any]) -> bool:
    """True if the loader was given a batch sampler. Then it has no batch size: not even with torch's BatchSampler."""
    return loader.batch_sampler is not None and loader.batch_size is None


def rounds_of(loader: DataLoader[Any], total: int, workers: int, *, per_worker: bool = False) -> int:
    """Rounds of an epoch, each of `total` samples or of a batch of a batch sampler, for all workers together.

    per_worker: a batch of a batch sampler is one worker's, and a rest of fewer samples than workers is no round.
    """
    if has_batch_sampler(loader):
        batches = len(loader.batch_sampler)  # type: ignore[arg-type]
        return math.ceil(batches / workers) if per_worker else batches
    rounds, rest = divmod(len(loader.sampler), total)  # type: ignore[arg-type]
    if loader.drop_last or not rest or (per_worker and rounds and rest < workers):
        return rounds
    return rounds + 1


def check_suffices(samples: int, workers: int) -> None:
    """Refuses samples that do not suffice for a batch of every worker, though all need equally many batches."""
    if 0 < samples < workers:
        raise UsageError(
            f"{samples} sample{'s' * (samples > 1)} at the end of an epoch cannot be divided among {workers} workers, "
            "which need equally many batches each; leave them out, or use fewer workers"
        )
