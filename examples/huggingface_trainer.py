"""A tiny GPT-2 and the Hugging Face Trainer, without a line of Paceline: `paceline run` brings the strategy.

`paceline run examples/huggingface_trainer.py --workers 2 --strategy async`; with plain `python` it is one process. The
texts are synthetic, of unlike lengths, and nothing is downloaded.
"""

import argparse

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

WORDS = 48


class Texts(torch.utils.data.Dataset[Tensor]):
    """Sequences that count upwards by a step of their own, which a model can learn."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(0, WORDS, (count,), generator=generator)
        self.lengths = torch.randint(4, 24, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        return (self.starts[index] + (1 + index % 3) * torch.arange(int(self.lengths[index]))) % WORDS


def collate(texts: list[Tensor]) -> dict[str, Tensor]:
    words = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--output", default="output")
parser.add_argument("--resume")
options = parser.parse_args()

set_seed(1)
config = GPT2Config(
    vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
arguments = TrainingArguments(
    output_dir=options.output,
    per_device_train_batch_size=options.batch,
    per_device_eval_batch_size=8,
    gradient_accumulation_steps=options.accumulate,
    num_train_epochs=options.epochs,
    learning_rate=0.01,
    max_grad_norm=0.5,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=5,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    GPT2LMHeadModel(config), arguments, data_collator=collate, train_dataset=Texts(192, 1), eval_dataset=Texts(64, 2)
)
trainer.train(resume_from_checkpoint=options.resume)
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    norm = sum(float(parameter.detach().double().square().sum()) for parameter in trainer.model.parameters())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"RESULT squared norm {norm:.6f}, evaluation loss {metrics['eval_loss']:.5f}, training losses {losses}")
