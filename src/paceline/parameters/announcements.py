"""Announcements: which buckets of gradients the workers of a machine have made, told while the backward pass runs.

Each worker counts its buckets in a word of shared memory, in an order that is the same for all, and the owner of a
bucket sleeps until all workers of the machine have it. What a worker announces must be what its optimizer steps with.
No worker knows that in advance, since a script may go on with another backward pass, or change a gradient by hand. So a
gradient is announced when its hook has run as often as in the rounds before; and when the worker comes to the
exchange, it compares the tensors with what they were. If one has been changed, or the weight of the loss, all workers
exchange again.

A round ends with the exchange of all buckets: before an update, or when a script looks at gradients or clips them.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from paceline.cluster.membership import Members
from paceline.parameters.buckets import Bucket
from paceline.parameters.gradients import GRAD, Gradients
from paceline.parameters.layout import Slot
from paceline.transport.futex import FutexArray

_HEADER = struct.Struct("=qdqd")  # whether it counts, share, kind and count of the loss
_WRAP = 1 << 32
_MOST = 64
"""Rounds without announcements in the backward pass, after several that were wrong."""


class Header(NamedTuple):
    """What the weight of a worker's gradient follows from."""

    share: float
    kind: int
    items: float


class RoundBoard:
    """The words, flags and headers that the workers of a machine share."""

    def __init__(self, members: Members, parameters: int) -> None:
        self.base = 0
        """The count at which the round starts."""
        self._here = members.machines[members.machine]
        self.place, room = members.local.rank, members.local.room
        words = FutexArray.STRIDE * (room + 1)
        flags, own = parameters * room, _HEADER.size * max(map(len, members.machines))
        memory = members.share(words + flags + own + _HEADER.size * members.size)
        self.words = FutexArray(memory.bytes(0, words), room + 1)
        """By worker, how far it is; the last one: how far the headers of all machines are."""
        self.flags = [memory.bytes(words + parameters * place, parameters) for place in range(room)]
        """By worker, a byte per parameter: 1 if it has a gradient."""
        self.headers = memory.bytes(words + flags, own)
        """Of the workers of this machine."""
        self._all = memory.bytes(words + flags + own, _HEADER.size * members.size)
        self._known = room
        self._machines = members.machines
        self._left = list(range(len(members.machines))), list(range(members.size))

    def form(self, machines: Sequence[int], ranks: Sequence[int]) -> None:
        """These machines and workers are left of an elastic team."""
        self._left = list(machines), list(ranks)

    def write(self, count: int) -> None:
        self.words.write(self.place, count % _WRAP)

    def reached(self, place: int, count: int) -> int | None:
        """The word of a worker if it is not as far as this; else None."""
        value = int(self.words.values[place * self.words.step])
        return value if (value - count) % _WRAP >= _WRAP // 2 else None

    def head(self, header: Header | None) -> None:
        """Write this worker's header; None: the weights come with the barrier."""
        entry = (0, 0.0, 0, 0.0) if header is None else (1, *header)
        _HEADER.pack_into(self.headers, _HEADER.size * self.place, *entry)

    def spread(self, base: int, texts: Sequence[torch.Tensor]) -> None:
        """Write the headers of all machines, for the workers of this one."""
        for machine, text in zip(self._left[0], texts, strict=True):
            for place, rank in enumerate(self._machines[machine]):
                entry = bytes(text[_HEADER.size * place : _HEADER.size * (place + 1)].numpy())
                self._all[_HEADER.size * rank : _HEADER.size * (rank + 1)] = entry
        self.words.write(self._known, (base + 1) % _WRAP)

    @property
    def known(self) -> int:
        """The number of the word that tells that the headers of all machines are there."""
        return self._known

    def used(self) -> list[bytes]:
        """By rank, a byte per parameter, 1 if it has a gradient; for workers of this machine, as far as announced."""
        found = [b""] * sum(map(len, self._machines))
        for place, rank in enumerate(self._here):
            found[rank] = bytes(self.flags[place])
        return found

    def all_headers(self) -> list[tuple[int, Header]] | None:
        """By rank; None if one does not count."""
        found = [(rank, _HEADER.unpack_from(self._all, _HEADER.size * rank)) for rank in self._left[1]]
        counts = all(entry[0] for _, entry in found)
        return [(rank, Header(*entry[1:])) for rank, entry in found] if counts else None


class BucketAnnouncer:
    """Announces one worker's gradients, from the hooks of its parameters."""

    def __init__(
        self, gradients: Gradients, board: RoundBoard, buckets: Sequence[Bucket], header: Callable[[], Header]
    ) -> None:
        """buckets: of all workers of the machine, in the order in which they are exchanged; header: of the gradient."""
        self._gradients, self._board, self._header = gradients, board, header
        slots: Sequence[Slot] = gradients.layout.slots
        self._cut(buckets)
        self._frozen = list(slots)
        """Parameters without a hook, which they can have only once they are trained."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._calls = [0] * len(slots)
        """By parameter, how often its hook has run in this round."""
        self._recent: list[list[int]] = []
        """The same for the last two rounds."""
        self._expected: list[int] | None = None
        """How often hooks run before a gradient is announced; None if nothing is announced in the backward pass."""
        self._kept: list[torch.Tensor | None] = [None] * len(slots)
        """By parameter, the gradient that was announced, which others may be reading."""
        self._before = self._kept
        """The same of a wrong announcement."""
        self.early = True
        """True if the backward pass may announce."""
        self._pause = self._rest = 0
        """Rounds without announcements in the backward pass: after the next wrong one; still to come."""
        self._ahead = False
        """True if the backward pass has announced in this round."""
        self._start()

    def _cut(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._of: list[list[int]] = [[] for _ in self._gradients.layout.slots]
        """By parameter, the numbers of its buckets."""
        for number, bucket in enumerate(buckets):
            for index in bucket.slots:
                self._of[index].append(number)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def made(_: torch.Tensor) -> None:
            calls = self._calls
            calls[index] += 1
            if self._expected is not None and calls[index] == self._expected[index]:
                self._complete(index)

        return made

    def next(self, *, wrong: bool = False, buckets: Sequence[Bucket] | None = None) -> None:
        """A round is over. wrong: its announcements were, on some worker; buckets: other ones from now on."""
        self._recent = [*self._recent[-1:], self._calls]
        self._rest = max(0, self._rest - 1)
        if wrong:
            self._rest = self._pause = min(_MOST, max(1, 2 * self._pause))
        elif self._ahead:
            self._pause = 0
        self._board.base += len(self._buckets) + 1
        if buckets is not None:
            self._cut(buckets)
        self._start(self._kept if wrong else [])

    def _start(self, before: Sequence[torch.Tensor | None] = ()) -> None:
        """Begin a round. before: gradients that others may still be reading."""
        for slot in [slot for slot in self._frozen if slot.parameter.requires_grad]:
            self._frozen.remove(slot)
            self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(self._hook(slot.index)))
        count = len(self._kept)
        self._calls, self._expected = [0] * count, None
        if self._recent and not self._rest and self.early:
            self._expected = [max(calls) for calls in zip(*self._recent, strict=True)]
            self._open = [sum(self._expected[index] > 0 for index in bucket.slots) for bucket in self._buckets]
        self._before, self._kept = list(before), [None] * count
        self._versions, self._published = [0] * count, bytearray(count)
        self._begun = self._ahead = self._doubted = False
        self._announced = 0
        self._told: Header | None = None

    def gradient(self, slot: Slot) -> torch.Tensor | None:
        """This worker's gradient as it was announced."""
        return self._kept[slot.index]

    def doubt(self) -> None:
        """The script holds gradients: not every change of it, as through `.data`, changes a tensor's version."""
        self._doubted = True

    def enter(self) -> None:
        """A backward pass begins: tell the weight now, if it should be the last one of the round."""
        expected = self._expected
        if expected is not None and not self._begun and all(map(operator.le, expected, [n + 1 for n in self._calls])):
            self._begin(self._header())

    def _complete(self, index: int) -> None:
        for number in self._of[index]:
            self._open[number] -= 1
        first = last = self._announced
        while last < len(self._open) and not self._open[last]:
            last += 1
        if last > first:
            self._ahead = True
            if not self._begun:
                self._begin(self._header())
            self._announce(last)

    def _begin(self, header: Header | None) -> None:
        self._begun, self._told = True, header
        if self._gradients.places is not None:
            self._gradients.places.clear()
        self._board.head(header)
        self._board.write(self._board.base + 1)

    def _announce(self, last: int) -> None:
        named = (index for bucket in self._buckets[self._announced : last] for index in bucket.slots)
        self._publish([index for index in dict.fromkeys(named) if not self._published[index]])
        self._announced = last
        self._board.write(self._board.base + 1 + last)

    def _publish(self, indices: Sequence[int]) -> None:
        """Let the others of the machine read these gradients."""
        flags = self._board.flags[self._board.place]
        having = self._gradients.take(indices)
        for index in indices:
            gradient = GRAD.__get__(self._gradients.layout.slots[index].parameter)
            self._kept[index] = gradient
            self._versions[index] = 0 if gradient is None else gradient._version
            self._published[index] = 1
            flags[index] = index in having

    # -- at the exchange ---------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """True if something of this round is announced."""
        return self._begun

    @property
    def finished(self) -> bool:
        """True if all of this round is announced."""
        return self._begun and self._announced == len(self._buckets) and all(self._published)

    def finish(self, header: Header | None) -> tuple[bytes, bool]:
        """Announce what is left; returns a byte per parameter, 1 if it has a gradient, and True if a part was wrong.

        header: None if this worker knows the weight of its gradient only from the barrier.
        """
        if not self._begun:
            self._begin(header)
        doubted = self._doubted and any(self._published)
        wrong = doubted or self._told != header or any(map(self._differs, range(len(self._published))))
        if wrong:
            self._before, self._kept = self._kept, [None] * len(self._kept)
            self._board.flags[self._board.place][:] = self._gradients.collect()
            self._published = bytearray(len(self._published))
        self._announce_rest()
        return bytes(self._board.flags[self._board.place]), wrong

    def _differs(self, index: int) -> bool:
        """True if a gradient is not what was announced."""
        if not self._published[index]:
            return False
        gradient, kept = GRAD.__get__(self._gradients.layout.slots[index].parameter), self._kept[index]
        return gradient is not kept or (kept is not None and kept._version != self._versions[index])

    def _announce_rest(self) -> None:
        self._publish([index for index, published in enumerate(self._published) if not published])
        self._announced = len(self._buckets)
        self._board.write(self._board.base + 1 + self._announced)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
