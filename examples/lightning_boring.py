"""Lightning's BoringModel, trained by a team: one line of the script is Paceline's.

`python examples/lightning_boring.py --devices 2 --strategy k-sync:k=1` starts two workers by itself, and
`paceline run examples/lightning_boring.py --workers 2 --strategy async` runs the same script.
"""

import argparse

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

from paceline.integrations.lightning import PacelineStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--strategy", default="all-reduce")
options = parser.parse_args()

L.seed_everything(0)
model = BoringModel()
trainer = L.Trainer(
    strategy=PacelineStrategy(options.strategy),
    devices=options.devices,
    accelerator="cpu",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(model)
if trainer.is_global_zero:
    print(f"{trainer.global_step} steps, sum of the weights {float(model.layer.weight.sum()):.6f}")
