"""Training that goes on where it was: whoever starts it again, after a worker or a whole machine was lost.

`torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 … examples/train_resume.py --epochs 10 --checkpoint run.pt`

Rank 0 writes the checkpoint and reads it; other machines need not see the file.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
parser.add_argument("--strategy", default="all-reduce")
parser.add_argument("--name", help="of the run's folder under runs/, where rank 0 is")
options = parser.parse_args()

team = paceline.join(options.strategy, name=options.name)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(2048, 20)
labels = (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).long()
loader = DataLoader(TensorDataset(inputs, labels), batch_size=64)
model, optimizer, loader = team.setup(model, optimizer, loader)

# Whether there is one, all must see alike: rank 0 looks.
saved = team.per_replica(options.checkpoint.is_file())[0]
done = team.load(options.checkpoint)["epochs"] if saved else 0
if done and team.is_lead:
    print(f"going on after epoch {done}", flush=True)

for epoch in range(done, options.epochs):
    for x, y in loader:
        with team.step():
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    team.save(options.checkpoint, epochs=epoch + 1)
    team.report(loss=loss)

with torch.no_grad():  # on all of them: each may have a part of the model only
    score = float(cross_entropy(model(inputs), labels))
if team.is_lead:
    print(f"loss {score:.4f} after epoch {options.epochs}", flush=True)
