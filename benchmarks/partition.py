"""The partitioner's cut of two models into two stages, against all cuts there are, each of them measured.

`python benchmarks/partition.py`
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import convnet
import transformer

from paceline.graph.model_profile import model_profile
from paceline.graph.partition import Device, partition
from paceline.graph.trace import ModelPart, ModelTrace, trace

REPEATS = 4


def once(parts: list[ModelPart], inputs: list[Any]) -> list[float]:
    """Seconds of each part, forward and backward."""
    seconds = [0.0] * len(parts)
    values: dict[int, Any] = {-1 - number: value for number, value in enumerate(inputs)}
    made: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for number, part in enumerate(parts):
        taken = {
            one: values[one].detach().requires_grad_(values[one].is_floating_point() and one >= 0)
            if isinstance(values[one], torch.Tensor)
            else values[one]
            for one in part.inputs
        }
        start = time.perf_counter()
        given = dict(zip(part.outputs, part.run([taken[one] for one in part.inputs]), strict=True))
        seconds[number] += time.perf_counter() - start
        values.update(given)
        made.append((taken, given))
    gradients: dict[int, torch.Tensor] = {}
    for number in reversed(range(len(parts))):
        taken, given = made[number]
        outputs = {
            one: value for one, value in given.items() if isinstance(value, torch.Tensor) and value.requires_grad
        }
        start = time.perf_counter()
        torch.autograd.backward(
            list(outputs.values()), [gradients.get(one, torch.ones_like(value)) for one, value in outputs.items()]
        )
        seconds[number] += time.perf_counter() - start
        for one, value in taken.items():
            if isinstance(value, torch.Tensor) and value.grad is not None:
                gradients[one] = gradients[one] + value.grad if one in gradients else value.grad
    return seconds


def slowest(traced: ModelTrace, cut: int, inputs: list[Any], paces: tuple[float, float] = (1.0, 1.0)) -> float:
    parts = [traced.part(0, cut), traced.part(cut, len(traced.operations))]
    runs = [once(parts, inputs) for _ in range(REPEATS + 1)][1:]
    return max(min(run[number] for run in runs) / paces[number] for number in range(2))


def judge(name: str, model: nn.Module, x: torch.Tensor, microbatches: int) -> float:
    traced = trace(model, (x,), {}, 2)
    known = model_profile(traced, model, (x,), {}, microbatches, "microbatch")
    inputs = [x[: known.microbatch]]
    for paces in ((1.0, 1.0), (1.0, 0.5)):
        devices = [Device(pace=pace) for pace in paces]
        cut = partition(known.problem(), devices, slack=0.02).bounds[0]
        measured = {place: slowest(traced, place, inputs, paces) for place in known.cuts}
        best = min(measured, key=lambda place: measured[place])
        # Once more, in turns: among so many cuts the best is also the luckiest.
        again = [(slowest(traced, cut, inputs, paces), slowest(traced, best, inputs, paces)) for _ in range(5)]
        ratio = statistics.median(a / b for a, b in again)
        print(
            f"{name}, paces {paces}: cut before {known.names[cut]} ({cut} of {len(known.names)}), slowest stage "
            f"{1e3 * statistics.median(a for a, _ in again):.1f} ms; the best of {len(measured)} cuts is before "
            f"{known.names[best]} with {1e3 * statistics.median(b for _, b in again):.1f} ms: {ratio:.3f} times",
            flush=True,
        )
    return ratio


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = transformer.Source(64)
    x = torch.stack([source[number][0] for number in range(16)])
    judge("transformer", transformer.Transformer(), x, 8)
    judge("convnet", convnet.Convnet(), convnet.images(16).tensors[0], 4)


if __name__ == "__main__":
    main()
