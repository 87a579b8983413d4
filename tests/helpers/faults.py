"""What the tests of faults in collectives share: operations and what they must give, faults, and who was told what."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed

import paceline.collectives.process_group  # noqa: F401  (once here, not once in every fork)
from helpers.groups import Pool
from helpers.load import allowed
from helpers.support import answered, state_of, wait_until
from paceline.errors import TeamError
from paceline.transport.peer_memory import PeerMemory

SMALL, LARGE = 500, 100_000
"""Elements of a tensor that travels in its owner's slot, and of one that is read where it lies."""
SOON = 8.0
"""Seconds in which a death must be known on an idle machine; the timeouts of those tests are far longer."""
PATIENT, IMPATIENT = 120.0, 1.5
"""Timeouts: of groups in which somebody dies, and of groups in which somebody only stops."""
GARBAGE = -7777.0
Tensors = list[torch.Tensor]


# -- operations, with what they must give ------------------------------------------------------------------------------


class Case(NamedTuple):
    """One member's part in an operation."""

    call: Callable[[bool], Any]
    """Does it, or begins it."""
    given: Tensors
    filled: Tensors
    wanted: Tensors
    """What `filled` must be afterwards."""

    @property
    def right(self) -> bool:
        return all(torch.equal(seen, want) for seen, want in zip(self.filled, self.wanted, strict=True))

    def do(self, mode: str) -> None:
        if mode == "now":
            self.call(False)
        elif mode == "async":
            self.call(True).wait()
        else:
            self.call(True).get_future().wait()

    def scribble(self) -> None:
        """What a program may do with its tensors once it was told that the operation failed."""
        for tensor in [*self.given, *self.filled]:
            tensor.fill_(GARBAGE)


def part(count: int, rank: int, peer: int = 0) -> torch.Tensor:
    """Whole numbers, so that sums are exact."""
    return torch.arange(count, dtype=torch.float32) % 97 + 100 * rank + 1000 * peer


def prepared(kind: str, rank: int, size: int, count: int, root: int = 0) -> Case:  # noqa: PLR0911
    ranks = range(size)
    dist = distributed
    if kind == "barrier":
        return Case(lambda later: dist.barrier(async_op=later), [], [], [])
    if kind == "broadcast":
        tensor = part(count, rank)
        return Case(lambda later: dist.broadcast(tensor, root, async_op=later), [], [tensor], [part(count, root)])
    total = torch.stack([part(count, other) for other in ranks]).sum(0)
    if kind == "all_reduce":
        tensor = part(count, rank)
        return Case(lambda later: dist.all_reduce(tensor, async_op=later), [], [tensor], [total])
    if kind == "reduce":
        tensor = part(count, rank)
        own = total if rank == root else part(count, rank)
        return Case(lambda later: dist.reduce(tensor, root, async_op=later), [], [tensor], [own])
    outs = [torch.zeros(count) for _ in ranks]
    if kind == "all_gather":
        tensor = part(count, rank)
        wanted = [part(count, other) for other in ranks]
        return Case(lambda later: dist.all_gather(outs, tensor, async_op=later), [tensor], outs, wanted)
    if kind == "gather":
        tensor = part(count, rank)
        filled = outs if rank == root else []
        wanted = [part(count, other) for other in ranks] if rank == root else []
        return Case(lambda later: dist.gather(tensor, filled or None, root, async_op=later), [tensor], filled, wanted)
    parts = [part(count, rank, peer) for peer in ranks]
    if kind == "scatter":
        given = parts if rank == root else []
        out, wanted = outs[:1], [part(count, root, rank)]
        return Case(lambda later: dist.scatter(out[0], given or None, root, async_op=later), given, out, wanted)
    if kind == "reduce_scatter":
        wanted = [torch.stack([part(count, other, rank) for other in ranks]).sum(0)]
        return Case(lambda later: dist.reduce_scatter(outs[0], parts, async_op=later), parts, outs[:1], wanted)
    assert kind == "all_to_all"
    wanted = [part(count, other, rank) for other in ranks]
    return Case(lambda later: dist.all_to_all(outs, parts, async_op=later), parts, outs, wanted)


KINDS = ["all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all"]


def size_of(kind: str, large: bool) -> int:
    return 0 if kind == "barrier" else LARGE if large else SMALL


# -- striking ----------------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What a member was told, or how it went without a word."""

    kind: str
    text: str
    at: float
    ours: bool

    def names(self, rank: int) -> bool:
        return re.search(rf"\branks? (?:\d+(?:, | and ))*{rank}\b", self.text) is not None


def told(do: Callable[[], Any]) -> Told:
    try:
        result = do()
    except Exception as error:
        return Told(type(error).__name__, str(error), time.monotonic(), isinstance(error, TeamError))
    return Told("", f"no error, but {result!r}", time.monotonic(), False)


class Planted(Exception):
    """Raised on purpose."""


def strike(how: str, folder: Path) -> None:
    """Leave word, and let it happen."""
    (folder / "struck.partial").write_text(str(time.monotonic()))
    (folder / "struck.partial").rename(folder / "struck")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(3)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise Planted("planted fault")


def struck(folder: Path) -> float:
    """When it happened, on the steady clock, which all processes of a machine share."""
    wait_until((folder / "struck").exists, 30, "the fault to strike")
    return float((folder / "struck").read_text())


def plant(point: str, how: str, folder: Path) -> None:
    """Have a fault strike in the next operation: before this member comes to it (`coming`); once all have told each
    other where their tensors are (`told`); or once it has done its part, and the others may not (`leaving`)."""
    board = world().control
    come, steps = board.come, 0

    def struck_on_the_way(*arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if (point, steps) in (("coming", 1), ("leaving", 2)):
            strike(how, folder)
        come(*arguments)
        if (point, steps) == ("told", 1):
            strike(how, folder)

    board.come = struck_on_the_way


def after_each_step(do: Callable[[], Any]) -> None:
    """Have this member be slow to look at what the others have brought."""
    board = world().control
    come = board.come

    def slow(*arguments: Any) -> None:
        come(*arguments)
        do()

    board.come = slow


def world() -> Any:
    """This member's place in the group that all are in."""
    return distributed.GroupMember.WORLD.group  # type: ignore[union-attr]


@contextlib.contextmanager
def band(size: int, timeout: float = PATIENT, closed: bool = False) -> Iterator[Pool]:
    """A group of processes of which nothing is left afterwards, whatever happened to them."""
    with pytest.MonkeyPatch.context() as patch:
        if closed:  # as in containers that forbid to look into another process
            patch.setattr(PeerMemory, "permit", lambda *_: False)
        pool = Pool(size, timeout=timeout)
    try:
        yield pool
    except BaseException:
        clear(pool)
        raise
    finally:
        pool.close()


def clear(pool: Pool) -> None:
    for pid in pool.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def dead(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def in_operation(rank: int, folder: Path, victim: int, kind: str, large: bool, mode: str, point: str, how: str) -> Told:
    size = distributed.get_world_size()
    case = prepared(kind, rank, size, size_of(kind, large))
    distributed.barrier()
    if rank == victim:
        plant(point, how, folder)
    outcome = told(lambda: case.do(mode))
    if outcome.kind:
        case.scribble()
    elif not case.right:
        return outcome._replace(text="garbage")
    return outcome


def answer(pool: Pool, rank: int, seconds: float = PATIENT + 10) -> Any:
    """What one member returned; an exception is raised here."""
    _, end = pool._members[rank]
    assert answered(end, seconds), f"rank {rank} said nothing for {seconds} s"
    result = pickle.loads(end.recv_bytes())
    if isinstance(result, BaseException):
        raise AssertionError(f"rank {rank}: {result.__notes__[0]}") from result
    return result


def have_answered(pool: Pool) -> bool:
    return all(end.poll(0) for _, end in pool._members)


def answers(pool: Pool, gone: tuple[int, ...] = (), seconds: float = PATIENT + 10) -> list[Any]:
    return [None if rank in gone else answer(pool, rank, seconds) for rank in range(pool.size)]


def assert_all_are_told(pool: Pool, folder: Path, victim: int, seconds: float = SOON, how: str = "kill") -> None:
    """Every survivor lives, and knows in time who is gone."""
    outcomes = answers(pool, () if how == "raise" else (victim,))
    at = struck(folder)
    for rank, pid in enumerate(pool.pids):
        if rank == victim:
            if how in ("kill", "exit"):
                wait_until(lambda pid=pid: dead(pid), 20, "the victim to be dead")  # type: ignore[misc]
            continue
        outcome = outcomes[rank]
        assert not dead(pid)
        assert outcome.ours, f"rank {rank}: {outcome}"
        assert outcome.names(victim), f"rank {rank}: {outcome}"
        assert outcome.at - at < allowed(seconds), f"rank {rank} was told after {outcome.at - at:.1f} s: {outcome}"
