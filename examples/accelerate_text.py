"""Classifies texts in the style of Accelerate's own examples: the import of `Accelerator` is all that is Paceline's.

`paceline run examples/accelerate_text.py --workers 2 --strategy async`. The texts are synthetic: random words, and the
question whether those of one kind are more than those of the other.
"""

import argparse

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.accelerate import Accelerator  # instead of: from accelerate import Accelerator

WORDS, LENGTH = 40, 12


def texts(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    return TensorDataset(words, ((words < WORDS // 2).sum(1) > LENGTH // 2).long())


def get_dataloaders(batch_size: int) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    return DataLoader(texts(480, 1), batch_size, shuffle=True), DataLoader(texts(130, 2), batch_size=32)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(words)).mean(1))
        return logits


def training_function(options: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    set_seed(options.seed)
    train_dataloader, eval_dataloader = get_dataloaders(options.batch)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = len(train_dataloader) * options.epochs
    lr_scheduler = LambdaLR(optimizer, lambda step: max(0.05, 1.0 - step / steps))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(options.epochs):
        model.train()
        for words, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(words), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        correct = count = 0
        for words, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(words).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            correct += int((predictions == references).sum())
            count += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {correct / count:.4f} of {count}")

    accelerator.wait_for_everyone()
    if options.save:
        accelerator.save_state(options.save)
    if accelerator.is_main_process:
        parameters = accelerator.unwrap_model(model).parameters()
        norm = sum(float(parameter.detach().double().square().sum()) for parameter in parameters)
        print(f"squared norm of the parameters {norm:.6f}, learning rate {lr_scheduler.get_last_lr()[0]:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--save")
    training_function(parser.parse_args())
