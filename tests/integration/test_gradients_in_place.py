"""Large gradients are summed where the backward pass left them, with the same bits as from shared buffers."""

import ctypes
import os
import platform
from typing import Any

import pytest
import torch
from helpers.teams import run_team
from torch import nn

from paceline import Team
from paceline.errors import WorkerLost
from paceline.parameters import gradient_places
from paceline.transport import huge_pages
from paceline.transport.huge_pages import HugePages
from paceline.transport.peer_memory import PeerMemory

WIDTH = 300
"""A weight of this width squared is large, and does not end on a cache line."""


class Model(nn.Module):
    """Weights of two dtypes: large and small, transposed, with sparse and expanded gradients, or none at times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)
        self.first, self.second = nn.Linear(WIDTH, WIDTH - 1), nn.Linear(WIDTH - 1, WIDTH)
        self.turned = nn.Parameter(torch.randn(WIDTH + 3, WIDTH).t() / WIDTH)
        self.exact = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH)
        self.rare = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.expanded = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        out = self.second(self.first(self.table(x)).relu()) + self.expanded.sum() / WIDTH**2
        out = (self.second(self.first(out)) @ self.turned).sum(1) + (out.double() @ self.exact).sum(1).float()
        return out + (out[:, None] * self.rare[0]).sum(1) if rare else out


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda own: torch.optim.SGD(own, lr=1e-3),
    "momentum": lambda own: torch.optim.SGD(own, lr=1e-3, momentum=0.9),
    "adamw": lambda own: torch.optim.AdamW(own, lr=1e-4),
}


def train(team: Team, kind: str, way: str) -> tuple[list[torch.Tensor], bool, int]:
    """The parameters after five steps; whether gradients were read in place; shared pages of large gradients."""
    model = Model()
    model, optimizer = team.setup(model, OPTIMIZERS[kind](model.parameters()))
    generator = torch.Generator().manual_seed(team.rank)
    for step in range(5):
        for _ in range(2 if way == "accumulated" else 1):
            x = torch.randint(0, WIDTH, (4,), generator=generator)
            loss = model(x, rare=step % 2 == 0 and team.rank == 0).square().mean()
            loss.backward(create_graph=way == "with a graph")
        if way == "clipped":
            team.clip_grad_norm_(0.1)
        elif way == "looked at":
            model.second.weight.grad.mul_(0.5)
        elif way == "replaced":
            model.second.weight.grad = model.second.weight.grad * 0.5
        optimizer.step()
        optimizer.zero_grad(set_to_none=way != "kept")
    gradients = team._trainer._gradients  # type: ignore[union-attr]
    large = next(slot for slot in gradients.layout.slots if slot.name == "second.weight")
    written = int(large.view(gradients.own[0]).count_nonzero())
    return [own.detach().clone() for own in model.parameters()], gradients.places is not None, written


def both(kind: str, way: str, monkeypatch: pytest.MonkeyPatch, workers: int = 2) -> tuple[Any, Any]:
    """The results of all workers, read in place and copied."""
    place = run_team(train, workers, kind, way)
    with monkeypatch.context() as patch:
        patch.setattr(PeerMemory, "permit", lambda *_: False)
        return place, run_team(train, workers, kind, way)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("sgd", "plain"),
        ("momentum", "plain"),
        ("adamw", "plain"),
        ("adamw", "accumulated"),
        ("momentum", "clipped"),
        ("sgd", "looked at"),
        ("sgd", "replaced"),
        ("sgd", "kept"),
        ("sgd", "with a graph"),
    ],
)
def test_bits_are_those_of_gradients_that_are_copied(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, copy = both(kind, way, monkeypatch)
    assert all(used for _, used, _ in place)
    assert not any(used for _, used, _ in copy)
    for ours, _, _ in place:
        assert all(torch.equal(one, other) for one, other in zip(ours, copy[0][0], strict=True))


def test_three_workers_and_tiny_pieces_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_places, "LARGE", 1)
    place, copy = both("momentum", "plain", monkeypatch, 3)
    for ours, used, _ in place:
        assert used
        assert all(torch.equal(one, other) for one, other in zip(ours, copy[0][0], strict=True))


def test_no_gradient_is_copied_to_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    place, copy = both("sgd", "plain", monkeypatch)
    assert [written for *_, written in place] == [0, 0]
    assert all(written for *_, written in copy)


def _forbid_reading() -> None:
    """Makes the kernel refuse process_vm_readv in this process from now on, as in many containers."""

    class Filter(ctypes.Structure):
        _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_uint16), ("filters", ctypes.POINTER(Filter)))

    call = {"x86_64": 310, "aarch64": 270}[platform.machine()]
    refuse = 0x0005_0000 | 1  # SECCOMP_RET_ERRNO with EPERM
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, refuse), (0x06, 0, 0, 0x7FFF_0000)]
    filters = (Filter * len(steps))(*(Filter(*step) for step in steps))
    library = ctypes.CDLL(None, use_errno=True)
    assert library.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert library.prctl(22, 2, ctypes.byref(Program(len(steps), filters)), 0, 0) == 0  # PR_SET_SECCOMP


def test_all_copy_where_the_kernel_forbids_one_to_read() -> None:
    def work(team: Team) -> Any:
        if team.rank == 1:
            _forbid_reading()
        return train(team, "sgd", "plain")

    forbidden, free = run_team(work, 2), run_team(train, 2, "sgd", "plain")
    assert [used for _, used, _ in forbidden] == [False, False]
    for ours, _, _ in forbidden:
        assert all(torch.equal(one, other) for one, other in zip(ours, free[0][0], strict=True))


def test_a_worker_that_dies_while_it_is_read_is_named() -> None:
    def work(team: Team) -> str:
        model = nn.Linear(1000, 1000)
        model, optimizer = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        trainer: Any = team._trainer
        agree = trainer._agree
        for step in range(3):
            model(torch.randn(2, 1000)).sum().backward()
            if step == 2 and team.rank == 1:
                trainer._agree = lambda: os._exit(9)  # after the barrier at which all gradients are there
            elif step == 2:
                trainer._agree = lambda: (trainer._barrier.gone_soon(1, 60.0), agree())[1]
            try:
                optimizer.step()
            except WorkerLost as error:
                return f"{error} {list(error.ranks)}"
            optimizer.zero_grad()
        return "no error"

    assert run_team(work, 2, may_die=[1])[0] == "rank 1 died while its gradient was being read [1]"


def test_pages_are_replaced_once_where_a_tensor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def madvise(start: ctypes.c_void_p, size: ctypes.c_size_t, _: int) -> int:
            calls.append((start.value or 0, size.value))
            return 0

    monkeypatch.setattr(huge_pages, "_library", Library)
    pages = HugePages()
    place, size = 0x7F00_0010_0000, 5 << 20
    pages.request(0, place, size)
    pages.request(0, place + (8 << 20), size)  # another place at every step: not worth it
    assert not calls
    for _ in range(3):
        pages.request(0, place, size)
    assert calls == [(0x7F00_0020_0000, 4 << 20)]
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    for _ in range(3):
        pages.request(0, place, size)
    assert len(calls) == 2
