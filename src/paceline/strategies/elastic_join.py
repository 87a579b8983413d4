"""Workers that join a running all-reduce: what the members do for one between two updates, and what it does itself."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline import failpoints
from paceline.cluster.membership import Members
from paceline.cluster.team_join import JoinRequests, MemoryGiven
from paceline.config import Launch
from paceline.errors import JoinError, Mismatch, UsageError
from paceline.parameters.checkpoint_codec import pack, unpack
from paceline.transport import Barrier, BarrierKind
from paceline.transport.unix_connection import new_address

_NOTE = struct.Struct("=qqq")  # rank and process of the worker that joins, and the round that is cut next; -1 for none


class JoinableLoader(Protocol):
    """A loader whose epoch a worker can join in the middle."""

    number: int
    balanced: bool

    @property
    def epoch(self) -> int: ...
    @property
    def open(self) -> bool: ...
    @property
    def next_round(self) -> int | None: ...
    def state(self) -> dict[str, Any]: ...
    def enter(self, state: dict[str, Any], round_number: int) -> None: ...
    def gain(self, rank: int, back: int | None) -> None: ...


class ScriptSchedulers(Protocol):
    """The schedulers of the script's learning rates."""

    def state(self) -> list[dict[str, Any]]: ...
    def restore(self, states: list[dict[str, Any]]) -> bool: ...


class _Growing(Protocol):
    """The part of the trainer that this uses."""

    version: int
    round: int
    _gone: set[int]
    _seniority: list[int]
    _optimizer: torch.optim.Optimizer

    @property
    def lead(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def buffer(self) -> int: ...
    @property
    def description(self) -> list[Any]: ...
    def gain(self, rank: int, pid: int) -> None: ...
    def enter(self, version: int, buffer: int, gone: set[int], seniority: list[int]) -> None: ...
    def _wait(self, kind: BarrierKind, length: int = 0) -> BarrierKind: ...


class TeamJoining:
    """One worker's part in the joining of others, or in its own."""

    def __init__(self, trainer: _Growing, members: Members, launch: Launch, buffers: Sequence[torch.Tensor]) -> None:
        """buffers: of the model, with its frozen parts."""
        assert isinstance(members.barrier, Barrier)
        self._trainer, self._members, self._barrier = trainer, members, members.barrier
        self._buffers = [tensor for tensor in buffers if tensor.numel()]
        self.wanted = False
        """True if `admit` is to be called before the next batch: a worker wants to join."""
        if launch.joins is not None:
            self.address = launch.joins
        else:
            self.address = members.gather(new_address().encode(), BarrierKind.ALLOCATE)[0].decode()
        self._given = MemoryGiven(members.size, members.room)
        self._memory = list(members.kept or ())
        """Descriptors of the memory that a trainer is made with."""
        self._requests: JoinRequests | None = None
        self.schedulers: ScriptSchedulers | None = None

    @property
    def late(self) -> bool:
        """True if this worker is not a member yet."""
        return self._members.joining is not None

    # -- members -----------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """The lead answers requests; True if a worker wants to join now."""
        trainer = self._trainer
        if trainer.lead != self._members.rank:
            return False
        if self._requests is None:
            with contextlib.suppress(OSError):  # the lead before has left, and has not ended yet
                self._requests = JoinRequests(self.address)
        return self._requests is not None and self._requests.look(self._given, self._memory, trainer.ranks)

    def admit(self, loader: JoinableLoader) -> None:
        """Let a worker join in the middle of the loader's epoch; all members call it, between the same two updates."""
        self.wanted = False
        rank, pid = self._tell(loader) if self._requests is not None and loader.open else (-1, -1)
        following = loader.next_round if loader.open else None
        _NOTE.pack_into(self._barrier.note, 0, rank, pid, -1 if following is None else following)
        self._trainer._wait(BarrierKind.ADMIT, _NOTE.size)
        self._join(loader, self._trainer.ranks)

    def _tell(self, loader: JoinableLoader) -> tuple[int, int]:
        """Send the state of the team to a worker that waits for it; returns its rank and process, or -1 for none."""
        assert self._requests is not None
        applicant = self._requests.next(loader.number, loader.epoch)
        if applicant is None or applicant.rank in self._trainer.ranks:
            return -1, -1
        if loader.balanced:
            self._requests.refuse(applicant, "setup(balance=True) splits batches by what only the others have measured")
            return -1, -1
        try:
            state = self._state(loader)
        except UsageError as error:
            self._requests.refuse(applicant, f"hyperparameters or schedulers cannot be sent to it ({error})")
            return -1, -1
        self._barrier.admit(applicant.rank, applicant.pid)
        failpoints.hit("join.counted")
        sent = self._requests.admit(applicant, state)
        failpoints.hit("join.told")
        return (applicant.rank, applicant.pid) if sent else (-1, -1)

    def _state(self, loader: JoinableLoader) -> bytes:
        trainer = self._trainer
        return pack(
            {
                "model": trainer.description,
                "barriers": self._barrier.count,
                "version": trainer.version,
                "buffer": trainer.buffer,
                "round": trainer.round,
                "size": self._members.size,
                "members": trainer._seniority,
                "buffers": [tensor.detach() for tensor in self._buffers],
                "groups": [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in trainer._optimizer.param_groups
                ],
                "schedulers": [] if self.schedulers is None else self.schedulers.state(),
                "loader": loader.state(),
            }
        )

    def _join(self, loader: JoinableLoader, before: Sequence[int]) -> bool:
        """After the barrier, go on with the worker that joins; False if there is none. before: the members so far."""
        notes = [_NOTE.unpack_from(self._barrier.notes[rank]) for rank in before]
        found = next(((rank, pid) for rank, pid, _ in notes if rank >= 0), None)
        if found is None:
            return False
        rounds = [following for _, _, following in notes]
        self._trainer.gain(*found)
        loader.gain(found[0], None if min(rounds) < 0 else max(rounds))
        return True

    # -- the worker that joins ---------------------------------------------------------------------------------------

    def _has_members(self) -> bool:
        """True if a member of the team lives."""
        barrier, own = self._barrier, self._members.rank
        ranks = [
            rank for rank in range(self._members.room or barrier.size) if rank != own and not barrier.has_left(rank)
        ]
        return any(pid and Path(f"/proc/{pid}").exists() for pid in map(barrier.pid, ranks))

    def enter(self, loader: JoinableLoader) -> bool:
        """This worker's script begins an epoch: become a member, or return True if the epoch is over."""
        members, trainer = self._members, self._trainer
        assert members.joining is not None
        data = members.joining.enter(loader.number, loader.epoch, self._has_members)
        if data is None:
            return True
        state = unpack(data)
        if state["model"] != trainer.description:
            raise Mismatch(
                f"rank {members.rank} cannot join: its model or optimizer is not the one that the run trains",
                [members.rank],
            )
        members.grow(max(state["size"], members.rank + 1))
        gone = set(range(members.size)) - set(state["members"]) - {members.rank}
        trainer.round = state["round"]
        trainer.enter(state["version"], state["buffer"], gone, state["members"])
        with torch.no_grad():
            for own, value in zip(self._buffers, state["buffers"], strict=True):
                own.copy_(value)
        if self.schedulers is not None:
            self.schedulers.restore(state["schedulers"])
        for group, values in zip(trainer._optimizer.param_groups, state["groups"], strict=True):
            for name, value in values.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
        loader.enter(state["loader"], state["round"])
        failpoints.hit("join.done")
        members.enter(state["barriers"], gone)
        _NOTE.pack_into(self._barrier.note, 0, -1, os.getpid(), -1)
        trainer._wait(BarrierKind.ADMIT, _NOTE.size)
        if not self._join(loader, [rank for rank in trainer.ranks if rank != members.rank]):
            raise JoinError(f"rank {members.rank} cannot join: the lead died while it told the others", [members.rank])
        failpoints.hit("join.member")
        return False
