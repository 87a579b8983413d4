"""Models that generate: autoencoders, adversaries, flows and diffusion."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.scripts import Result, noise, ported, script, state, whole_numbers


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.fc3, self.fc4 = nn.Linear(3, 8), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor, eps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + eps * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def vae_loss(recon: torch.Tensor, x: torch.Tensor, mu: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
    bce = F.binary_cross_entropy(recon, x, reduction="sum")
    kld: torch.Tensor = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


@script("as in pytorch/examples/vae: binary cross entropy and divergence, both summed")
def vae(team: Any) -> Result:
    torch.manual_seed(1)
    model: Any = VAE()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.sigmoid(noise(28, 12)), noise(28, 3, seed=2))
    train_loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    test_loader: Any = DataLoader(data, batch_size=8)
    model, optimizer, train_loader, test_loader = ported(team, model, optimizer, train_loader, test_loader)
    printed = []
    for _ in range(2):
        model.train()
        for x, eps in train_loader:
            optimizer.zero_grad()
            recon, mu, logvar = model(x, eps)
            vae_loss(recon, x, mu, logvar).backward()
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, eps in test_loader:
                recon, mu, logvar = model(x, eps)
                total += vae_loss(recon, x, mu, logvar).item()
        printed.append(total / len(test_loader.dataset))
    return state(model), printed


@script("a denoising autoencoder: squared errors summed per sample, then averaged")
def autoencoder(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 12))
    optimizer: Any = torch.optim.NAdam(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(TensorDataset(noise(28, 12), noise(28, 12, seed=2)), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for x, disturbance in loader:
            optimizer.zero_grad()
            ((model(x + 0.1 * disturbance) - x) ** 2).sum(dim=1).mean().backward()
            optimizer.step()
    return state(model), []


def player(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.LeakyReLU(0.2), nn.Linear(8, outputs))


@script("a GAN: two models, two optimizers, as in pytorch/examples/dcgan")
def gan(team: Any) -> Result:
    torch.manual_seed(0)
    generator: Any = player(3, 6)
    critic: Any = player(6, 1)
    optimizer_g: Any = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_d: Any = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loader: Any = DataLoader(TensorDataset(noise(16, 6), noise(16, 3, seed=2)), batch_size=8, shuffle=True)
    (generator, critic), (optimizer_g, optimizer_d), loader = ported(
        team, [generator, critic], [optimizer_g, optimizer_d], loader
    )
    criterion = nn.BCEWithLogitsLoss()
    for real, z in loader:
        optimizer_d.zero_grad()
        criterion(critic(real), torch.ones(len(real), 1)).backward()
        criterion(critic(generator(z).detach()), torch.zeros(len(real), 1)).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        criterion(critic(generator(z)), torch.ones(len(real), 1)).backward()
        optimizer_g.step()
    return state(generator), []


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = player(3, 6), player(6, 1)


@script("a GAN as one module, with an optimizer for each half")
def gan_of_one_module(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = Both()
    optimizer_d: Any = torch.optim.Adam(model.critic.parameters(), lr=1e-3)
    optimizer_g: Any = torch.optim.Adam(model.generator.parameters(), lr=1e-3)
    loader: Any = DataLoader(TensorDataset(noise(16, 6), noise(16, 3, seed=2)), batch_size=8, shuffle=True)
    model, optimizer_d, loader = ported(team, model, optimizer_d, loader)
    criterion = nn.BCEWithLogitsLoss()
    for real, z in loader:
        optimizer_d.zero_grad()
        fake = model.generator(z)
        loss = criterion(model.critic(real), torch.ones(len(real), 1))
        (loss + criterion(model.critic(fake.detach()), torch.zeros(len(real), 1))).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        criterion(model.critic(fake), torch.ones(len(real), 1)).backward()
        optimizer_g.step()
    return state(model), []


@script("a Wasserstein critic whose weights are clamped by hand after every step")
def wgan_clamp(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = player(6, 1)
    optimizer: Any = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    loader: Any = DataLoader(TensorDataset(noise(28, 6), noise(28, 6, seed=2) + 1), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for real, fake in loader:
            optimizer.zero_grad()
            scores = model(torch.cat([real, fake]))
            (scores[len(real) :].mean() - scores[: len(real)].mean()).backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.data.clamp_(-0.1, 0.1)
    return state(model), []


@script("a gradient penalty: the gradient of a gradient, `create_graph=True`")
def gradient_penalty(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(TensorDataset(noise(24, 6)), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for (batch,) in loader:
            x = batch.clone().requires_grad_(True)
            scores = model(x)
            (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
            optimizer.zero_grad()
            (scores.mean() + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()
            optimizer.step()
    return state(model), []


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.inner = nn.Embedding(10, 8), nn.Linear(6, 8)
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(8, 6))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.inner(x) + self.time(t))
        return result


@script("diffusion with a copy of averaged weights (`copy.deepcopy`, `lerp_`)")
def diffusion(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(noise(28, 6), noise(28, 6, seed=2), whole_numbers(10, 28))
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    kept = torch.linspace(0.9, 0.1, 10)
    for _ in range(2):
        for x, disturbance, t in loader:
            share = kept[t].unsqueeze(1)
            disturbed = share.sqrt() * x + (1 - share).sqrt() * disturbance
            optimizer.zero_grad()
            F.mse_loss(model(disturbed, t), disturbance).backward()
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
    return state(average) | {f"model.{name}": value for name, value in state(model).items()}, []


class Coupling(nn.Module):
    def __init__(self, flipped: bool) -> None:
        super().__init__()
        self.flipped, self.net = flipped, nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x.chunk(2, dim=1)
        if self.flipped:
            first, second = second, first
        scale, shift = self.net(first).chunk(2, dim=1)
        scale = torch.tanh(scale)
        return torch.cat([first, second * scale.exp() + shift], dim=1), scale.sum(dim=1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Coupling(False), Coupling(True), Coupling(False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x))
        for layer in self.layers:
            x, change = layer(x)
            total = total + change
        return -0.5 * (x**2).sum(dim=1) + total


@script("a normalising flow (RealNVP): the mean of log-likelihoods")
def flow(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = Flow()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(TensorDataset(noise(28, 6)), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for (x,) in loader:
            loss = -model(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return state(model), []
