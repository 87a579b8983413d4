"""A split model's step leaves nothing behind: what one has made is free when the next begins."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
from helpers.split_models import MODELS, adam, launched, made, score
from helpers.teams import run_team
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from paceline import Team

FEW, MANY = 6, 30


class _Use(ctypes.Structure):
    """What mallinfo2(3) returns: ten numbers."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def in_use() -> int:
    """Bytes that were taken from the C library and not given back."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Use
    *_, mapped, _, _, used, _, _ = library.mallinfo2().numbers
    return int(mapped + used)


def growth(team: Team, kind: str) -> int:
    """Bytes a step, once all that is made once has been made."""
    model: Any = made(kind)
    optimizer: Any = adam(model)
    loader: Any = DataLoader(MODELS[kind][1](), batch_size=8)
    model, optimizer, loader = team.setup(model, optimizer, loader, loss=cross_entropy)
    used, number = [], 0
    gc.disable()  # it comes by after many small objects, not after a few large tensors
    while number < MANY:
        for x, y in loader:
            with team.step():
                score(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            number += 1
            if number in (FEW, MANY):
                used.append(in_use())
    gc.enable()
    return (used[1] - used[0]) // (MANY - FEW)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("tensor:degree=2", "transformer"),
        ("tensor:degree=2,sequence_parallel=true", "transformer"),
        ("tensor:degree=2", "convnet"),
        ("pipeline:stages=2,microbatches=2", "transformer"),
        ("pipeline:stages=2,microbatches=2,schedule=zero-bubble", "small"),
        ("pipeline:stages=2,microbatches=2,schedule=interleaved", "chain"),
        ("mesh:data=2,tensor=1,sync=all-reduce", "small"),
    ],
)
def test_a_step_leaves_nothing_behind(strategy: str, kind: str) -> None:
    # An activation of one layer has 6 KB or more.
    assert max(run_team(growth, 2, kind, launch=launched(strategy))) < 3000
