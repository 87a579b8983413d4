"""Models of the benchmarks, each with its default batch size."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import nn

from paceline.bench.tasks import MODELS


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    name: str
    batch: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    classes: int = 0
    """Of a classifier; without any, the loss is the mean square of the output, which costs next to nothing."""

    def batch_of(self, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        return self.inputs(size), torch.randint(0, max(1, self.classes), (size,))

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, y) if self.classes else output.square().mean()


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(widths):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, 128)
            self.encode = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.decide = nn.Linear(128, 10)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.decide(self.encode(self.embed(tokens)).mean(1))  # type: ignore[no-any-return]

    return Classifier()


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("small", MODELS["small"], lambda: _mlp(64, 256, 10), lambda n: torch.randn(n, 64)),
        Workload("mlp25m", MODELS["mlp25m"], lambda: _mlp(1024, 4096, 4096, 1024), lambda n: torch.randn(n, 1024)),
        Workload("convnet", MODELS["convnet"], _convnet, lambda n: torch.randn(n, 1, 28, 28), 10),
        Workload("transformer", MODELS["transformer"], _transformer, lambda n: torch.randint(0, 256, (n, 64)), 10),
    )
}
