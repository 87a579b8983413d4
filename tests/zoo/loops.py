"""Loops: what people write around a model, which is a small one here."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from zoo.scripts import Result, noise, ported, script, state, whole_numbers
from zoo.vision import mlp, rows


def evaluate(model: Any, loader: Any) -> float:
    """The mean loss over a loader, as people write it."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += F.cross_entropy(model(x), y, reduction="sum").item()
            count += len(y)
    model.train()
    return total / count


def epoch(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def start(team: Any, kind: Any = torch.optim.SGD, samples: int = 28, **options: Any) -> Any:
    """A model, its optimizer, a loader to train with and one to evaluate with."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = kind(model.parameters(), **({"lr": 0.1} | options))
    loaders = DataLoader(rows(samples), batch_size=8, shuffle=True), DataLoader(rows(18, seed=6), batch_size=8)
    return ported(team, model, optimizer, *loaders)


@script("`if (i + 1) % 2 == 0: step()`, the loss divided by 2")
def accumulation(team: Any) -> Result:
    model, optimizer, loader, test = start(team, momentum=0.9, samples=32)
    printed = []
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if (i + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        printed.append(evaluate(model, test))
    return state(model), printed


def accumulate(team: Any, samples: int, batches: int) -> Result:
    """The usual loop that also steps at the end of an epoch."""
    model, optimizer, loader, _ = start(team, torch.optim.Adam, samples, lr=1e-2)
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / batches).backward()
            if (i + 1) % batches == 0 or i + 1 == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    return state(model), []


@script("accumulation over 3 batches, the rest of an epoch stepped at its end, with clipping")
def accumulation_with_rest(team: Any) -> Result:
    return accumulate(team, samples=28, batches=3)


@script("accumulation over 2 batches, the last one of 5 samples, which cannot be divided evenly")
def accumulation_with_uneven_rest(team: Any) -> Result:
    return accumulate(team, samples=29, batches=2)


@script("accumulation over 2 batches, the last one of a single sample, of which one worker has no part")
def accumulation_with_one_left(team: Any) -> Result:
    return accumulate(team, samples=25, batches=2)


@script("a summed loss divided by 4, which is also the size of a worker's part")
def sum_over_constant(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, lr=0.01)
    for x, y in loader:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y, reduction="sum") / 4).backward()
        optimizer.step()
    return state(model), []


@script("a summed loss divided by `len(x)`")
def sum_over_length(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y, reduction="sum") / len(x)).backward()
        optimizer.step()
    return state(model), []


@script("a summed loss divided by the batch size of the script, also for the smaller last batch")
def sum_over_batch_size(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y, reduction="sum") / 8).backward()
        optimizer.step()
    return state(model), []


@script("parameters are added to the optimizer later, by `add_param_group`")
def added_group(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model[4].parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(rows(24), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    epoch(model, optimizer, loader)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
    epoch(model, optimizer, loader)
    return state(model), []


@script("a new optimizer for the second half of the training, which `team.setup` has not seen")
def second_optimizer(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    epoch(model, optimizer, loader)
    epoch(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    return state(model), []


@script("`for p in model.parameters(): p.data -= lr * p.grad`, without `optimizer.step()`")
def step_by_hand(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
    return state(model), []


@script("dropout, of which every worker draws its own", within=math.inf)
def dropout(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = DataLoader(rows(28), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    epoch(model, optimizer, loader)
    return state(model), []


@script("two backward passes for one step")
def two_backwards(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, momentum=0.9)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        (0.1 * model(x + 1).pow(2).mean()).backward()
        optimizer.step()
    return state(model), []


@script("`ReduceLROnPlateau` on the evaluation's loss")
def plateau(team: Any) -> Result:
    model, optimizer, loader, test = start(team, lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    printed = []
    for _ in range(4):
        epoch(model, optimizer, loader)
        loss = evaluate(model, test)
        scheduler.step(loss)
        printed += [loss, optimizer.param_groups[0]["lr"]]
    return state(model), printed


@script("`ReduceLROnPlateau` on the mean loss of the training's batches, which a worker knows of its part")
def plateau_on_training_loss(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    for _ in range(6):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        scheduler.step(total / len(loader.dataset))
    return state(model), [optimizer.param_groups[0]["lr"]]


@script("early stopping; the best `state_dict` is kept and loaded at the end")
def early_stopping(team: Any) -> Result:
    model, optimizer, loader, test = start(team, lr=1.0)
    best, kept, patience, printed = float("inf"), {}, 0, []
    for _ in range(6):
        epoch(model, optimizer, loader)
        loss = evaluate(model, test)
        printed.append(loss)
        if loss < best:
            best, kept, patience = loss, copy.deepcopy(model.state_dict()), 0
        else:
            patience += 1
        if patience == 2:
            break
    model.load_state_dict(kept)
    return state(model), [*printed, evaluate(model, test)]


def save(team: Any, path: Path, model: Any, optimizer: Any, **more: Any) -> None:
    if team is None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, path)
    else:
        team.save(path, **more)


def load(team: Any, path: Path, model: Any, optimizer: Any) -> Any:
    if team is not None:
        return team.load(path)
    content = torch.load(path, weights_only=False)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return content


@script("`team.save` after an epoch, `team.load` after three, training goes on from there")
def resumed(team: Any) -> Result:
    model, optimizer, loader, test = start(team, torch.optim.Adam, lr=1e-2)
    path = Path(os.environ["ZOO_FOLDER"]) / "checkpoint.pt"
    epoch(model, optimizer, loader)
    save(team, path, model, optimizer)
    random = torch.get_rng_state()
    epoch(model, optimizer, loader)
    epoch(model, optimizer, loader)
    load(team, path, model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 3e-2
    torch.set_rng_state(random)
    epoch(model, optimizer, loader)
    return state(model), [evaluate(model, test)]


@script("autocast to bfloat16", dtype=torch.float32, within=5e-3)
def mixed_precision(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return state(model), []


@script("a `GradScaler`", dtype=torch.float32)
def grad_scaler(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    printed = []
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        printed.append(scaler.get_scale())
    return state(model), printed


@script("a `GradScaler` with `unscale_` and `clip_grad_norm_`", dtype=torch.float32)
def unscaled_and_clipped(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    printed = []
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        printed.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        scaler.step(optimizer)
        scaler.update()
    return state(model), printed


@script("weight decay by hand: `p.mul_(0.99)` after every step")
def decay_by_hand(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, momentum=0.9, samples=24)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.99)
    return state(model), []


@script("a penalty on the weights in the loss: `loss + 1e-2 * sum(p.pow(2).sum() ...)`")
def penalty_in_loss(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
    return state(model), []


@script("`nn.init` after `team.setup`, `model.apply`")
def init_after_setup(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 0.1)
            nn.init.orthogonal_(module.weight)

    torch.manual_seed(3)
    model.apply(init)
    epoch(model, optimizer, loader)
    return state(model), []


@script("SAM: a second gradient at a point uphill")
def sam(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, momentum=0.9, samples=24)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
            for parameter in model.parameters():
                parameter.add_(parameter.grad * 0.05 / norm)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
        optimizer.step()
    return state(model), []


@script("an average of the weights by hand, evaluated by swapping it in through `load_state_dict`")
def ema_swapped(team: Any) -> Result:
    model, optimizer, loader, test = start(team, samples=24)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    printed = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            for name, value in model.state_dict().items():
                average[name].mul_(0.9).add_(value, alpha=0.1)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        printed.append(evaluate(model, test))
        model.load_state_dict(own)
    return state(model), printed


@script("`torch.optim.swa_utils.AveragedModel` with an exponential average")
def averaged_model(team: Any) -> Result:
    model, optimizer, loader, test = start(team, samples=24)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    return state(model), [evaluate(average, test)]


@script("LBFGS with a closure")
def lbfgs(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, torch.optim.LBFGS, samples=24, lr=0.5, max_iter=4)
    for x, y in loader:

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return state(model), []


@script("a closure for SGD")
def closure_of_sgd(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, momentum=0.9)
    for x, y in loader:

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return state(model), []


def with_optimizer(team: Any, kind: Any, **options: Any) -> Result:
    model, optimizer, loader, test = start(team, kind, **options)
    epoch(model, optimizer, loader)
    epoch(model, optimizer, loader)
    return state(model), [evaluate(model, test)]


@script("Adam with `amsgrad`")
def adam(team: Any) -> Result:
    return with_optimizer(team, torch.optim.Adam, lr=1e-2, amsgrad=True)


@script("AdamW")
def adamw(team: Any) -> Result:
    return with_optimizer(team, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


@script("RMSprop, centered, with momentum")
def rmsprop(team: Any) -> Result:
    return with_optimizer(team, torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True)


@script("Adagrad")
def adagrad(team: Any) -> Result:
    return with_optimizer(team, torch.optim.Adagrad, lr=1e-2, lr_decay=1e-2)


@script("RAdam")
def radam(team: Any) -> Result:
    return with_optimizer(team, torch.optim.RAdam, lr=1e-2)


@script("Muon on the matrices only, the rest left alone")
def muon(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
    loader: Any = DataLoader(rows(24), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    epoch(model, optimizer, loader)
    return state(model), []


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_(torch.sign(mean * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)


@script("an optimizer of the user's own (Lion)")
def own_optimizer(team: Any) -> Result:
    return with_optimizer(team, Lion, lr=1e-2)


class Buckets:
    """Batches of samples of like length, of unlike sizes."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.samples).tolist()
        for begin, size in ((0, 8), (8, 4), (12, 6), (18, 6)):
            yield order[begin : begin + size]

    def __len__(self) -> int:
        return 4


@script("a `batch_sampler` of the user's own, with batches of 8, 4 and 6 samples")
def batch_sampler(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(rows(24), batch_sampler=Buckets(24))
    model, optimizer, loader = ported(team, model, optimizer, loader)
    epoch(model, optimizer, loader)
    epoch(model, optimizer, loader)
    return state(model), []


class Straight(torch.autograd.Function):
    """Rounds; its gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(Straight.apply(torch.tanh(self.first(x))))
        return result


def simple(team: Any, model: Any, optimizer: Any, samples: int = 28) -> Result:
    loader: Any = DataLoader(rows(samples), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    epoch(model, optimizer, loader)
    epoch(model, optimizer, loader)
    return state(model), []


@script("a `torch.autograd.Function` of the user's own in the model")
def autograd_function(team: Any) -> Result:
    torch.manual_seed(0)
    model = Quantised()
    return simple(team, model, torch.optim.SGD(model.parameters(), lr=0.1))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 12), mlp(12, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(checkpoint(self.middle, self.first(x), use_reentrant=False))
        return result


@script("activation checkpointing (`torch.utils.checkpoint`)")
def checkpointing(team: Any) -> Result:
    torch.manual_seed(0)
    model = Checkpointed()
    return simple(team, model, torch.optim.SGD(model.parameters(), lr=0.1))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.kind, self.size = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.trunk(x))
        return {"kind": self.kind(hidden), "size": self.size(hidden).squeeze(1)}


@script("two heads, a dict as result, a weighted sum of two losses")
def multi_task(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = TwoHeads()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = TensorDataset(noise(28, 6), whole_numbers(4, 28), noise(28, seed=3))
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for x, kind, size in loader:
            optimizer.zero_grad()
            output = model(x)
            loss = F.cross_entropy(output["kind"], kind) + 0.5 * F.mse_loss(output["size"], size)
            loss.backward()
            optimizer.step()
    return state(model), []


@script("two losses, one over tokens that count and one over samples: their weights differ")
def mixed_weights(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = TwoHeads()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = whole_numbers(4, 28)
    kinds[noise(28, seed=4) > 0.3] = -100
    loader: Any = DataLoader(TensorDataset(noise(28, 6), kinds, noise(28, seed=3)), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for x, kind, size in loader:
            optimizer.zero_grad()
            output = model(x)
            (F.cross_entropy(output["kind"], kind) + F.mse_loss(output["size"], size)).backward()
            optimizer.step()
    return state(model), []


@script("REINFORCE without data: every worker plays the same episodes, by one seed")
def reinforce(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = ported(team, model, optimizer)[:2]
    world = torch.Generator().manual_seed(5)
    printed = []
    for _ in range(4):
        place, chosen, rewards = torch.zeros(4), [], []
        for _ in range(5):
            logits = model(place.unsqueeze(0))
            action = int(torch.multinomial(logits.detach().softmax(1), 1, generator=world))
            chosen.append(F.log_softmax(logits, dim=1)[0, action])
            place = place * 0.5 + torch.tensor([1.0, -1.0, 0.5, 0.2]) * (2 * action - 1)
            rewards.append(-float(place.abs().sum()))
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        loss = -(torch.stack(chosen) * (returns - returns.mean())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        printed.append(sum(rewards))
    return state(model), printed


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(adjacency @ self.first(x))
        return F.log_softmax(adjacency @ self.second(hidden), dim=1)


@script("a graph network on one graph, without a loader, as in pygcn")
def gcn(team: Any) -> Result:
    torch.manual_seed(42)
    x, labels = noise(12, 6), whole_numbers(3, 12)
    edges = ((noise(12, 12, seed=3) > 1).to(x.dtype) + torch.eye(12)).clamp(max=1)
    adjacency = edges / edges.sum(1, keepdim=True)
    train, test = torch.arange(8), torch.arange(8, 12)
    model: Any = Graph()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    model, optimizer = ported(team, model, optimizer)[:2]
    printed = []
    for _ in range(4):
        model.train()
        optimizer.zero_grad()
        F.nll_loss(model(x, adjacency)[train], labels[train]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            printed.append(F.nll_loss(model(x, adjacency)[test], labels[test]).item())
    return state(model), printed


@script("DQN: a target network (`load_state_dict` of the model's), a replay memory, Huber loss, no loader")
def dqn(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp(4, 2)
    target = mlp(4, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ported(team, model, optimizer)[:2]
    target.load_state_dict(model.state_dict())
    states, following, actions, rewards = noise(40, 4), noise(40, 4, seed=2), whole_numbers(2, 40, 1), noise(40, seed=3)
    memory = torch.Generator().manual_seed(7)
    for step in range(6):
        chosen = torch.randint(0, 40, (8,), generator=memory)
        values = model(states[chosen]).gather(1, actions[chosen]).squeeze(1)
        with torch.no_grad():
            expected = rewards[chosen] + 0.9 * target(following[chosen]).max(1).values
        optimizer.zero_grad()
        F.smooth_l1_loss(values, expected).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        if step % 3 == 2:
            target.load_state_dict(model.state_dict())
    return state(model), []


@script("distillation: a teacher that the team does not know, `kl_div` with `batchmean`")
def distillation(team: Any) -> Result:
    teacher = mlp()
    for parameter in teacher.parameters():
        nn.init.constant_(parameter, 0.1)
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2, dim=1)
        output = model(x)
        loss = 4 * F.kl_div(F.log_softmax(output / 2, dim=1), soft, reduction="batchmean") + F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state(model), []


@script("an endless iterator over the loader: `next(batches)`, a fixed number of steps")
def endless(team: Any) -> Result:
    model, optimizer, loader, test = start(team)

    def cycle() -> Iterator[Any]:
        while True:
            yield from loader

    batches = cycle()
    for _ in range(6):
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return state(model), [evaluate(model, test)]


@script("the loop ends by `break` in the middle of an epoch, and begins a new one")
def broken_off(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            if i == 2:
                break
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return state(model), []


@script("`zero_grad(set_to_none=False)` by the model, norms of gradients are printed")
def gradient_norms(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    printed = []
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        printed.append(float(sum(p.grad.norm() for p in model.parameters())))
        optimizer.step()
        model.zero_grad(set_to_none=False)
    return state(model), printed


@script("gradients with noise, of one seed, added by hand")
def noisy_gradients(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    draw = torch.Generator().manual_seed(3)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    return state(model), []


@script("the loss of an epoch, by `team.sum` of the workers' parts")
def training_loss(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    printed = []
    for _ in range(2):
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
            count += len(x)
        printed.append(total / count if team is None else team.sum(total) / team.sum(count))
    return state(model), printed


@script("batches are skipped by their content: `if y[0] == 0: continue` depends on a worker's part")
def skipped_batches(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, samples=48)
    for x, y in loader:
        if int(y[0]) == 0:
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return state(model), []


@script("hard examples: the mean of the largest half of a batch's losses")
def hard_examples(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, samples=48)
    for x, y in loader:
        losses = F.cross_entropy(model(x), y, reduction="none")
        optimizer.zero_grad()
        losses.topk(len(losses) // 2).values.mean().backward()
        optimizer.step()
    return state(model), []


@script("a root mean squared error: a root of the batch's mean")
def root_of_mean(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp(classes=1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(noise(28, 6), noise(28, 1, seed=2)), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).sqrt().backward()
        optimizer.step()
    return state(model), []


@script("Dice loss: a quotient of two sums over the batch")
def dice(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp(classes=6)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(noise(28, 6), (noise(28, 6, seed=2) > 0).to(torch.get_default_dtype()))
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for x, y in loader:
        share = torch.sigmoid(model(x))
        optimizer.zero_grad()
        (1 - 2 * (share * y).sum() / (share.sum() + y.sum())).backward()
        optimizer.step()
    return state(model), []


@script("the loss decides how it is used: `if loss > 1.41: loss = 0.1 * loss`")
def decided_by_loss(team: Any) -> Result:
    model, optimizer, loader, _ = start(team)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        if loss.item() > 1.41:
            loss = 0.1 * loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state(model), []


@script("25 samples in batches of 8: one is left for the epoch's last step")
def one_sample_left(team: Any) -> Result:
    model, optimizer, loader, _ = start(team, samples=25)
    epoch(model, optimizer, loader)
    epoch(model, optimizer, loader)
    return state(model), []
