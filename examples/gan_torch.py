"""Trains a GAN on handwritten digits with plain PyTorch: `python examples/gan_torch.py`."""

import torch
from digits import datasets
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
dataset, _ = datasets()
loader = DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True)

generator = nn.Sequential(
    nn.Unflatten(1, (16, 1, 1)),
    nn.ConvTranspose2d(16, 32, 4),
    nn.GroupNorm(4, 32),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
    nn.Sigmoid(),
)
critic = nn.Sequential(
    nn.Conv2d(1, 32, 4, stride=2, padding=1),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(512, 1),
)
criterion = nn.BCEWithLogitsLoss()
adam_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
adam_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))

for epoch in range(3):
    for images, _ in loader:
        real, fake = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        made = generator(torch.randn(len(images), 16))

        adam_d.zero_grad()
        loss_d = criterion(critic(images), real)
        loss_d.backward()
        loss_made = criterion(critic(made.detach()), fake)
        loss_made.backward()
        adam_d.step()

        adam_g.zero_grad()
        loss_g = criterion(critic(made), real)
        loss_g.backward()
        adam_g.step()
    print(f"epoch {epoch}: critic {loss_d + loss_made:.2f}, generator {loss_g:.2f}")
