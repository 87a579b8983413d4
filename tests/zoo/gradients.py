"""Gradients: how people clip, skip, hook and add them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Sampler

from zoo.loops import evaluate, start
from zoo.scripts import Result, ported, script, state
from zoo.vision import mlp, rows


@script("a clipped gradient that is too large is thrown away: `zero_grad()` and `continue`; others are not clipped")
def skipped_by_norm(team: Any) -> Result:
    model, optimizer, loader, test = start(team, torch.optim.Adam, samples=40, lr=1e-2)
    printed = []
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if i % 2 == 0:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                printed.append(float(norm))
                if norm > 0.3:
                    optimizer.zero_grad()
                    continue
            optimizer.step()
        printed.append(evaluate(model, test))
    return state(model), printed


@script("accumulation over 2 batches, clipped after each, by a function that was imported by its name")
def clipped_in_between(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, momentum=0.9, samples=32)
    printed = []
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        printed.append(float(clip_grad_norm_(model.parameters(), 0.2, error_if_nonfinite=True)))
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return state(model), printed


@script("`p.register_hook(lambda grad: grad.clamp(…))`: each gradient is clamped as it is made")
def clamped_by_hook(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return state(model), []


class Shuffled(Sampler[list[int]]):
    """Batches that are drawn as soon as there is an iterator; the last one has a single sample."""

    def __iter__(self) -> Any:
        order = torch.randperm(25).tolist()
        return iter([order[i : i + 8] for i in range(0, 25, 8)])

    def __len__(self) -> int:
        return 4


@script("a batch sampler that draws in `__iter__` itself, and leaves a batch of a single sample")
def eager_batch_sampler(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(rows(25), batch_sampler=Shuffled())
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return state(model), []


@script("a loss for each sample in a loop, `loss = loss + …`, which is divided by nothing")
def losses_of_samples(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, lr=0.01)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for output, label in zip(model(x), y, strict=True):
            loss = loss + F.mse_loss(output[:3], F.one_hot(label, 4)[:3].to(output))
        loss.backward()
        optimizer.step()
    return state(model), []


@script("`torch.autograd.grad` instead of `backward`, the gradients put into `.grad` by hand")
def gradients_by_hand(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
    return state(model), []


@script("updates by hand, `p -= lr * gradient`, with the gradients of `torch.autograd.grad`: no `optimizer.step`")
def updates_by_hand(team: Any) -> Result:
    model, _, loader, _ = start(team)
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.1)
    return state(model), []


@script("gradients of every sample by `torch.func` (`vmap` of `grad`), clipped by themselves, put into `.grad` by hand")
def clipped_samples(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)

    def loss_of(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    for x, y in loader:
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        each = vmap(grad(loss_of), in_dims=(None, 0, 0))(values, x, y)
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in each.values()]).norm(dim=0)
        factors = (0.5 / norms).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("i,i...->i...", factors, each[name]).mean(0)
        optimizer.step()
    return state(model), []
