"""A small Llama of Hugging Face, with random weights, that learns to add: its texts are sums in words.

`paceline run examples/huggingface_pipeline.py --workers 2 --strategy pipeline:stages=2,microbatches=4`

`paceline run examples/huggingface_pipeline.py --workers 4 --strategy mesh:data=2,tensor=2`, or any other strategy, or
plain `python`. It needs `pip install paceline[huggingface]`.
"""

import argparse
import itertools

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
WORDS = ["<pad>", "plus", "is", *NUMBERS]
LENGTH = 8
"""Every batch is padded to one length: a pipeline traces each length of text anew."""


class Sums(Dataset[list[int]]):
    """All sums of two or three numbers up to twelve, as words of the vocabulary; longer ones have more words."""

    def __init__(self) -> None:
        self._texts = [
            [*(" plus ".join(NUMBERS[term] for term in terms)).split(), "is", NUMBERS[sum(terms)]]
            for count in (2, 3)
            for terms in itertools.product(range(13), repeat=count)
            if sum(terms) <= 12
        ]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> list[int]:
        return [WORDS.index(word) for word in self._texts[index]]


def padded(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch of texts; the loss leaves out labels of -100."""
    tokens = torch.tensor([text + [0] * (LENGTH - len(text)) for text in texts])
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "labels": torch.where(tokens == 0, -100, tokens),
    }


def main() -> None:
    """Trains, and prints the loss of each epoch and how many sums are right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    team = paceline.join()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            initializer_range=0.1,
            pad_token_id=0,
        )
    )
    texts = Sums()
    loader = DataLoader(texts, batch_size=arguments.batch, shuffle=True, collate_fn=padded)
    test = DataLoader(texts, batch_size=arguments.batch, collate_fn=padded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader, test = team.setup(model, optimizer, loader, test)

    for epoch in range(arguments.epochs):
        model.train()
        for batch in loader:
            with team.step():
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if team.is_lead:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    model.eval()
    right = 0
    with torch.no_grad():
        for batch in test:
            last = batch["attention_mask"].sum(1) - 1
            rows = torch.arange(len(last))
            guessed = model(batch["input_ids"], batch["attention_mask"]).logits[rows, last - 1].argmax(-1)
            right += int((guessed == batch["input_ids"][rows, last]).sum())
    if team.is_lead:
        print(f"{right} of {len(texts)} sums are right")


if __name__ == "__main__":
    main()
