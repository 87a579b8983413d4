"""Fashion-MNIST as Debian packages it, and a small convolutional network for it."""

import gzip
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

FOLDER = Path("/usr/share/datasets/fashion-mnist")


def _read(name: str, header: int) -> torch.Tensor:
    path = FOLDER / f"{name}.gz"
    if not path.exists():
        raise SystemExit(f"there is no {path}; install it with: apt-get install dataset-fashion-mnist")
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[header:]), dtype=torch.uint8)


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """60,000 images of clothes to train on and 10,000 to test with."""
    parts = []
    for part in ("train", "t10k"):
        images = _read(f"{part}-images-idx3-ubyte", 16).view(-1, 1, 28, 28).float().sub_(72.9).div_(90.0)
        parts.append(TensorDataset(images, _read(f"{part}-labels-idx1-ubyte", 8).long()))
    return parts[0], parts[1]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    images, labels = test.tensors
    right = sum(
        int((model(part).argmax(1) == wanted).sum())
        for part, wanted in zip(images.split(1000), labels.split(1000), strict=True)
    )
    return right / len(labels)
