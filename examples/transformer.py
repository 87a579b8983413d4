"""A transformer, in plain PyTorch, that learns to write Python: trained on the source text of the standard library.

`paceline run examples/transformer.py --workers 2 --strategy pipeline:stages=2,microbatches=8`

`paceline plan --partition examples/transformer.py --stages 4 --figure cut.svg`
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

import paceline

BYTES = 256
"""What it reads and writes are bytes."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    def __init__(self, width: int = 192, layers: int = 6, heads: int = 6, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Source(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of the standard library's source text, and the same one byte further."""

    def __init__(self, length: int, most: int = 2_000_000) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b""
        for path in sorted(folder.glob("*.py")):
            text += path.read_bytes()
            if len(text) > most:
                break
        self._text = torch.frombuffer(bytearray(text[:most]), dtype=torch.uint8).long()
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = number * self._length
        piece = self._text[start : start + self._length + 1]
        return piece[:-1], piece[1:]


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()

    torch.manual_seed(0)
    model: Any = Transformer(options.width, options.layers, length=options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader: Any = DataLoader(Source(options.length), batch_size=options.batch, shuffle=True)
    team = paceline.join()
    if team.is_lead:
        print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f} million parameters", flush=True)
    model, optimizer, loader = team.setup(model, optimizer, loader, loss=loss_of)

    done = 0
    while done < options.steps:
        for x, y in loader:
            with team.step():
                loss = loss_of(model(x), y)
                loss.backward()
                team.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            team.report(loss=loss)
            done += 1
            if team.is_lead and done % 20 == 0:
                print(f"step {done}: loss {loss.item():.3f}", flush=True)
            if done == options.steps:
                break


if __name__ == "__main__":
    main()
