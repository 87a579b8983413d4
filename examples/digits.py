"""Handwritten digits that come with scikit-learn, and a small convolutional network for them."""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """1,500 images to train on and 297 to test with."""
    table = torch.from_numpy(_table()).float()
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def _table() -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """A row per image: its pixels from 0 to 16, and the digit.

    It is read from scikit-learn's file and not with its `load_digits`: to import that takes every worker a second.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the digits come with scikit-learn; install it with: pip install scikit-learn")
    return np.loadtxt(Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"), delimiter=",")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    images, labels = test.tensors
    return (model(images).argmax(1) == labels).float().mean().item()
