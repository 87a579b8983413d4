"""Images, and other samples with one label each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from zoo.scripts import Result, noise, ported, script, state, whole_numbers


def images(samples: int, channels: int = 1, size: int = 8, classes: int = 5, seed: int = 1) -> TensorDataset:
    return TensorDataset(noise(samples, channels, size, size, seed=seed), whole_numbers(classes, samples, seed=seed))


class Net(nn.Module):
    """As in pytorch/examples/mnist, smaller and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.fc1, self.fc2 = nn.Linear(24, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


@script("as in pytorch/examples/mnist: `correct / len(test_loader.dataset)`, Adadelta, StepLR")
def convnet(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.Adadelta(model.parameters(), lr=1.0)
    train_loader: Any = DataLoader(images(28), batch_size=8, shuffle=True)
    test_loader: Any = DataLoader(images(18, seed=5), batch_size=8)
    model, optimizer, train_loader, test_loader = ported(team, model, optimizer, train_loader, test_loader)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    printed: list[float] = []
    for _ in range(2):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        test_loss, correct = 0.0, 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += output.argmax(dim=1, keepdim=True).eq(target.view(-1, 1)).sum().item()
        printed += [test_loss / len(test_loader.dataset), correct / len(test_loader.dataset)]
        scheduler.step()
        printed.append(float(scheduler.get_last_lr()[0]))
    return state(model), printed


def with_batch_norm(team: Any, **options: Any) -> Result:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(images(24), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader, **options)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return state(model), []


@script("`nn.BatchNorm2d`, without an option")
def batch_norm(team: Any) -> Result:
    return with_batch_norm(team)


@script("`nn.BatchNorm2d` with `team.setup(..., sync_batch_norm=True)`")
def batch_norm_synchronised(team: Any) -> Result:
    return with_batch_norm(team, sync_batch_norm=True)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5).softmax(dim=-1)
        result: torch.Tensor = self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))
        return result


class ViT(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.cls, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 5, width) / 10)
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.places
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        result: torch.Tensor = self.head(self.norm(x)[:, 0])
        return result


@script("AdamW, label smoothing, `OneCycleLR(total_steps=len(loader) * epochs)`")
def vit(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = ViT()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    loader: Any = DataLoader(images(28), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=len(loader) * 2)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    printed = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            criterion(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            printed.append(float(scheduler.get_last_lr()[0]))
    return state(model), printed


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 8))
        self.compare = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.compare(torch.cat((self.trunk(first), self.trunk(second)), 1)))


@script("two inputs through one trunk, `BCELoss`")
def siamese(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = Siamese()
    optimizer: Any = torch.optim.Adadelta(model.parameters(), lr=1.0)
    pairs = TensorDataset(noise(20, 1, 8, 8), noise(20, 1, 8, 8, seed=7), whole_numbers(2, 20).double())
    loader: Any = DataLoader(pairs, batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    criterion = nn.BCELoss()
    for _ in range(2):
        for first, second, same in loader:
            optimizer.zero_grad()
            criterion(model(first, second).squeeze(), same).backward()
            optimizer.step()
    return state(model), []


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.relu(self.down1(x))
        deep = torch.relu(self.down2(F.max_pool2d(wide, 2)))
        result: torch.Tensor = self.out(torch.cat([wide, self.up(deep)], dim=1))
        return result


@script("segmentation: a class per pixel, `ignore_index=255`")
def unet(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = UNet()
    optimizer: Any = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    labels = whole_numbers(3, 20, 8, 8)
    labels[noise(20, 8, 8, seed=9) > noise(20, 1, 1, seed=10)] = 255  # unlike numbers of pixels count in the images
    loader: Any = DataLoader(TensorDataset(noise(20, 1, 8, 8), labels), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    return state(model), []


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(2, channels), nn.GroupNorm(2, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + x)


@script("group norm, Nesterov, weight decay, `CosineAnnealingLR`, `clip_grad_norm_`")
def resnet(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(1, 4, 3), Residual(4), Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    loader: Any = DataLoader(images(24), batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    scheduler = CosineAnnealingLR(optimizer, T_max=2)
    printed = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            printed.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
        scheduler.step()
    return state(model), printed


def mlp(inputs: int = 6, classes: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, classes))


def rows(samples: int, inputs: int = 6, classes: int = 4, seed: int = 1) -> TensorDataset:
    return TensorDataset(noise(samples, inputs, seed=seed), whole_numbers(classes, samples, seed=seed + 1))


@script("`CrossEntropyLoss(weight=...)` and a `WeightedRandomSampler`")
def class_weights(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=0.05)
    sampler = WeightedRandomSampler([1.0 + number % 3 for number in range(28)], 28)
    loader: Any = DataLoader(rows(28), batch_size=8, sampler=sampler)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0, 2.0]))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    return state(model), []


@script("a frozen backbone, a new head, learning rates per group")
def transfer(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    model[4] = nn.Linear(12, 4)
    groups = [{"params": model[2].parameters(), "lr": 1e-3}, {"params": model[4].parameters()}]
    optimizer: Any = torch.optim.Adam(groups, lr=1e-2)
    loader: Any = DataLoader(rows(28), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for epoch in range(3):
        if epoch == 1:
            optimizer.param_groups[0]["lr"] = 5e-3
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return state(model), [group["lr"] for group in optimizer.param_groups]


@script("the backbone is thawed after an epoch by `requires_grad_(True)`")
def thawed(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp()
    model[0].requires_grad_(False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(rows(24), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for epoch in range(2):
        if epoch == 1:
            model[0].requires_grad_(True)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return state(model), []


@script("`nn.PixelShuffle`, mean squared error, as in pytorch/examples/super_resolution")
def super_resolution(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.PixelShuffle(2)
    )
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(TensorDataset(noise(20, 1, 4, 4), noise(20, 1, 8, 8)), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    criterion = nn.MSELoss()
    for _ in range(2):
        for small, large in loader:
            optimizer.zero_grad()
            criterion(model(small), large).backward()
            optimizer.step()
    return state(model), []


@script("SimCLR: every sample is compared with the others of its batch")
def contrastive(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = mlp(classes=8)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(noise(24, 6), noise(24, 6, seed=3)), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for first, second in loader:
            one, other = F.normalize(model(first), dim=1), F.normalize(model(second), dim=1)
            optimizer.zero_grad()
            F.cross_entropy(one @ other.T / 0.5, torch.arange(len(first))).backward()
            optimizer.step()
    return state(model), []
