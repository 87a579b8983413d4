"""A convolutional network for handwritten digits in Lightning's style, with checkpoints: `Trainer(strategy=…)` is all.

`paceline run examples/lightning_digits.py --workers 4 --strategy k-sync:k=3 --slow 3:4`, or without a launcher
`python examples/lightning_digits.py --devices 4`.
"""

import argparse

import lightning as L
import torch
from digits import datasets, network
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from paceline.integrations.lightning import PacelineStrategy


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--strategy", default="all-reduce")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--resume", help="a checkpoint to go on from")
options = parser.parse_args()

L.seed_everything(0)
train, test = datasets()
best = ModelCheckpoint("checkpoints", "digits-{epoch}", monitor="accuracy", mode="max", save_last=True)
trainer = L.Trainer(
    strategy=PacelineStrategy(options.strategy),
    devices=options.devices,
    accelerator="cpu",
    max_epochs=options.epochs,
    callbacks=[best],
    logger=False,
)
loaders = DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=99)
trainer.fit(Digits(), *loaders, ckpt_path=options.resume)
if trainer.is_global_zero:
    print(f"accuracy {trainer.callback_metrics['accuracy']:.1%}, best {best.best_model_score:.1%}")
