"""A residual convnet with batch norm, in plain PyTorch, on drawn images.

`paceline run examples/convnet.py --workers 2 --strategy pipeline:stages=2`
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm_first, self.norm_second = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm_first(self.first(x)))
        return torch.relu(self.around(x) + self.norm_second(self.second(inner)))


class Convnet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            [
                Residual(width, width),
                Residual(width, width),
                Residual(width, 2 * width, 2),
                Residual(2 * width, 2 * width),
                Residual(2 * width, 4 * width, 2),
                Residual(4 * width, 4 * width),
            ]
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def images(count: int = 512) -> TensorDataset:
    """Stripes of ten directions, in noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (count,), generator=generator)
    angle = labels.double() * torch.pi / 10
    across = torch.arange(32).double()
    phase = angle.cos()[:, None, None] * across[None, :, None] + angle.sin()[:, None, None] * across[None, None, :]
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    return TensorDataset(phase.sin()[:, None].float() + 0.5 * noise, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()

    torch.manual_seed(0)
    model: Any = Convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader: Any = DataLoader(images(), batch_size=options.batch, shuffle=True)
    team = paceline.join()
    model, optimizer, loader = team.setup(model, optimizer, loader, loss=cross_entropy)
    done = 0
    while done < options.steps:
        for x, y in loader:
            with team.step():
                loss = cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            team.report(loss=loss)
            done += 1
            if done == options.steps:
                break


if __name__ == "__main__":
    main()
