"""Trains on as many workers as it is started with: `paceline run examples/train_paceline.py --workers 4`."""

import argparse

import torch
from digits import accuracy, datasets, network
from torch.utils.data import DataLoader

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--balance", action="store_true")
parser.add_argument("--rate", type=float, default=0.05)
options = parser.parse_args()

team = paceline.join()

torch.manual_seed(0)
train, test = datasets()
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)
loader = DataLoader(train, batch_size=64, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader, balance=options.balance)

for epoch in range(options.epochs):
    for images, labels in loader:
        with team.step():
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            team.report(loss=loss)
    if team.is_lead:
        score = accuracy(model, test)
        team.report(accuracy=score)
        print(f"epoch {epoch}: test accuracy {score:.1%}")
