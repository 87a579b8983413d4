"""Losses of a batch that are more than a sum over its samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from zoo.loops import start
from zoo.scripts import Result, script, state


@script("the loss decides by which factor it is used: `0.1 if loss > 1.41 else 1.0`")
def factor_by_loss(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        ((0.1 if loss.item() > 1.41 else 1.0) * loss).backward()
        optimizer.step()
    return state(model), []


@script("the mean of the workers' losses decides: `if team.mean(loss) > 1.41: loss = 0.1 * loss`")
def decided_by_mean_loss(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        if (loss if team is None else team.mean(loss)) > 1.41:
            loss = 0.1 * loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state(model), []


@script("a mean that is multiplied by `len(x)`")
def mean_times_length(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, lr=0.01)
    for x, y in loader:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * len(x)).backward()
        optimizer.step()
    return state(model), []


@script("class weights that are computed from the labels of each batch")
def weights_of_batch(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        weight = len(y) / (1.0 + torch.bincount(y, minlength=4))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, weight=weight).backward()
        optimizer.step()
    return state(model), []


@script("hard examples by index: `loss[loss.detach().topk(k).indices].mean()`", torch.float32)
def hard_examples_by_index(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, reduction="none")
            optimizer.zero_grad()
            loss[loss.detach().topk(3 * len(y) // 4).indices].mean().backward()
            optimizer.step()
    return state(model), []


@script("the samples of a batch are ranked: a hinge on the differences of all pairs of scores")
def ranking(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        score = model(x)[:, 0]
        better = (y[:, None] > y[None, :]).to(score.dtype)
        optimizer.zero_grad()
        (better * F.relu(1 - (score[:, None] - score[None, :]))).mean().backward()
        optimizer.step()
    return state(model), []
