"""Trains on one device with plain PyTorch: `python examples/train_torch.py`."""

import torch
from digits import accuracy, datasets, network
from torch.utils.data import DataLoader

torch.manual_seed(0)
train, test = datasets()
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(train, batch_size=64, shuffle=True)

for epoch in range(8):
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: test accuracy {accuracy(model, test):.1%}")
