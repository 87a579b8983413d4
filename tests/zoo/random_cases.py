"""Random models, losses, optimizers and loops, in teams of random sizes: `python tests/zoo/random_cases.py 500`.

Prints every case that has not ended as it may, and counts the others: its parameters are those of the plain script, or
it is refused, or the team says that they differ. `random_cases.py 1 SEED` runs one case by itself.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.cells import Cell, plain, run_cell
from zoo.scripts import SCRIPTS, Result, Script, noise, ported, state, whole_numbers

CLASSES, LENGTH = 4, 5
STRATEGIES = {
    "all-reduce": (2, 3, 4),
    "sync": (2, 3, 4),
    "pipeline:stages=2,microbatches=2": (2,),
    "pipeline:stages=2,microbatches=3": (2,),
    "pipeline:stages=3,microbatches=2": (3,),
    "tensor:degree=2": (2,),
    "tensor:degree=4": (4,),
    "mesh:data=2,tensor=2": (4,),
}
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


class Case(NamedTuple):
    """One script: everything that it is made of."""

    strategy: str
    workers: int
    depth: int
    width: int
    activation: str
    loss: str
    optimizer: str
    batch: int
    samples: int
    accumulate: int
    clip: bool
    shuffle: bool
    drop_last: bool


def drawn(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    strategy = draw.choice(list(STRATEGIES))
    batch = draw.randint(6, 16)
    return Case(
        strategy=strategy,
        workers=draw.choice(STRATEGIES[strategy]),
        depth=draw.randint(2, 4),
        width=4 * draw.randint(1, 5),
        activation=draw.choice(list(ACTIVATIONS)),
        loss=draw.choice(["mean", "sum", "tokens", "class weights", "squares", "sum of squares", "smooth"]),
        optimizer=draw.choice(list(OPTIMIZERS)),
        batch=batch,
        samples=draw.randint(2 * batch, 5 * batch),
        accumulate=draw.choice([1, 1, 2, 3]),
        clip=draw.random() < 0.4,
        shuffle=draw.random() < 0.6,
        drop_last=draw.random() < 0.3,
    )


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(6, case.width)]
        for _ in range(case.depth - 1):
            layers += [ACTIVATIONS[case.activation](), nn.Linear(case.width, case.width)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(case.width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layers(x))
        return result


def samples(case: Case) -> TensorDataset:
    if case.loss == "tokens":
        labels = whole_numbers(CLASSES, case.samples, LENGTH)
        # Some samples have a single token that counts, some have all.
        labels[
            torch.arange(LENGTH).expand(case.samples, LENGTH) > whole_numbers(LENGTH, case.samples, 1, seed=3)
        ] = -100
        return TensorDataset(noise(case.samples, LENGTH, 6), labels)
    if "squares" in case.loss:
        return TensorDataset(noise(case.samples, 6), noise(case.samples, CLASSES, seed=3))
    return TensorDataset(noise(case.samples, 6), whole_numbers(CLASSES, case.samples))


def loss_of(case: Case, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if case.loss == "tokens":
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)
    if "squares" in case.loss:
        return F.mse_loss(output, target, reduction="sum" if "sum" in case.loss else "mean")
    if case.loss == "class weights":
        return F.cross_entropy(output, target, weight=torch.tensor([0.1, 1.0, 4.0, 2.0]))
    if case.loss == "smooth":
        return F.cross_entropy(output, target, label_smoothing=0.1)
    return F.cross_entropy(output, target, reduction=case.loss)


def train(team: Any, case: Case) -> Result:
    torch.manual_seed(0)
    model: Any = Net(case)
    optimizer: Any = OPTIMIZERS[case.optimizer](model.parameters())
    loader: Any = DataLoader(samples(case), batch_size=case.batch, shuffle=case.shuffle, drop_last=case.drop_last)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            (loss_of(case, model(x), y) / case.accumulate).backward()
            if (number + 1) % case.accumulate == 0 or number + 1 == len(loader):
                if case.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return state(model), []


def known(case: Case) -> str:
    """Why a case may be refused, or may differ if the team says so; empty if it must be equal to the plain script."""
    replicas = {"all-reduce": case.workers, "sync": case.workers, "mesh:data=2,tensor=2": 2}.get(case.strategy, 1)
    rest = 0 if case.drop_last else case.samples % case.batch
    if case.accumulate == 1 or replicas == 1:
        return ""
    if case.strategy == "sync" and 0 < rest < replicas:
        return "a worker that has no part of the last batch does not come to the step that its gradients wait for"
    if "sum" in case.loss and case.accumulate * replicas in (case.batch, rest):
        return "a summed loss over a number that is also the size of all parts is taken for a mean"
    if case.strategy == "sync" and case.loss in ("tokens", "class weights"):
        return "under sync, gradients that are accumulated have one weight per step"
    return ""


def allowed(case: Case, cell: Cell) -> bool:
    """True if a case may end so: equal, or refused or said where that is known."""
    return cell.kind == "equal" or (cell.kind in ("refused", "said") and bool(known(case)))


def check(seed: int) -> Cell:
    """How the case of a seed ends."""
    case = drawn(seed)
    name = f"random {seed}"
    SCRIPTS[name] = Script(name, lambda team: train(team, case), "", torch.float64, 1e-7)
    try:
        return run_cell(SCRIPTS[name], case.strategy, plain(SCRIPTS[name]), case.workers)
    finally:
        del SCRIPTS[name]


def check_cases(seeds: Iterable[int]) -> list[str]:
    """A line for every case that has not ended as it may."""
    wrong = []
    for seed in seeds:
        cell = check(seed)
        if not allowed(drawn(seed), cell):
            wrong.append(f"{seed}: {cell.kind}: {cell.text}\n  {drawn(seed)}")
    return wrong


if __name__ == "__main__":
    if len(sys.argv) > 2:  # one case by itself
        sys.exit("\n".join(check_cases([int(sys.argv[2])])))
    kinds: dict[str, int] = {}
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 500):
        cell = check(seed)
        kind = cell.kind if allowed(drawn(seed), cell) else f"{cell.kind}, not as it may end"
        kinds[kind] = kinds.get(kind, 0) + 1
        if kind != cell.kind:
            print(f"{seed}: {kind}: {cell.text}\n  {drawn(seed)}", flush=True)
    print(kinds)
