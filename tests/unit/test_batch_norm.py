import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from paceline.strategies.batch_norm import TeamBatchNorm, synchronise

SHAPES = [(), (5,), (4, 3), (2, 3, 2)]
KINDS: dict[int, type[nn.modules.batchnorm._BatchNorm]] = {
    0: nn.BatchNorm1d,
    1: nn.BatchNorm1d,
    2: nn.BatchNorm2d,
    3: nn.BatchNorm3d,
}
PARTS = [[4, 4], [1, 6], [3, 2, 5], [7]]


class Exchange:
    """Threads as workers, who all wait for each other."""

    def __init__(self, workers: int) -> None:
        self._barrier = threading.Barrier(workers)
        self._values: list[torch.Tensor] = [torch.empty(0)] * workers

    def of(self, rank: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        def exchange(value: torch.Tensor) -> list[torch.Tensor]:
            self._values[rank] = value.clone()
            self._barrier.wait(10)
            values = list(self._values)
            self._barrier.wait(10)
            return values

        return exchange


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(20) for future in [pool.submit(job) for job in jobs]]


def layer(channels: int, dims: int, **options: Any) -> nn.modules.batchnorm._BatchNorm:
    torch.manual_seed(3)
    made = KINDS[dims](channels, dtype=torch.float64, **options)
    if made.affine:
        nn.init.normal_(made.weight)
        nn.init.normal_(made.bias)
    return made


def close(value: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_come_out_as_the_undivided_batch(
    shape: tuple[int, ...], parts: list[int], options: dict[str, Any]
) -> None:
    channels, workers, total = 3, len(parts), sum(parts)
    whole = layer(channels, len(shape), **options)
    exchange = Exchange(workers)
    team = [synchronise(layer(channels, len(shape), **options), exchange.of(rank)) for rank in range(workers)]
    for seed in range(3):
        torch.manual_seed(seed)
        batch = (torch.randn(total, channels, *shape, dtype=torch.float64) * 3 + 1).requires_grad_()
        factor = torch.randn_like(batch)
        whole.zero_grad()
        output = whole(batch)
        # A loss that is a mean over samples and looks at every output by itself.
        ((output.square() * factor).flatten(1).sum(1).mean()).backward()

        inputs = [part.detach().clone().requires_grad_() for part in batch.split(parts)]
        factors = factor.split(parts)

        def job(rank: int, inputs: Any = inputs, factors: Any = factors) -> torch.Tensor:
            team[rank].zero_grad()
            result = team[rank](inputs[rank])
            (result.square() * factors[rank]).flatten(1).sum(1).mean().backward()
            return result.detach()

        outputs = in_threads([lambda rank=rank: job(rank) for rank in range(workers)])
        close(torch.cat(outputs), output.detach())
        weights = [part / total for part in parts]
        gradients = [own.grad * weight for own, weight in zip(inputs, weights, strict=True)]
        close(torch.cat(gradients), batch.grad)
        for name, parameter in whole.named_parameters():
            summed = sum(dict(one.named_parameters())[name].grad * w for one, w in zip(team, weights, strict=True))
            close(summed, parameter.grad)
        for one in team:
            for name, buffer in whole.named_buffers():
                close(dict(one.named_buffers())[name], buffer)


def test_its_gradient_is_that_of_its_function() -> None:
    torch.manual_seed(0)
    one = TeamBatchNorm(2, dtype=torch.float64)
    one.exchange = lambda value: [value]
    batch = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)

    def function(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(one, {"weight": weight, "bias": bias}, (value,))

    assert torch.autograd.gradcheck(function, (batch, one.weight, one.bias))


def test_float32_is_as_good_as_torch_s_own() -> None:
    torch.manual_seed(0)
    batch = torch.randn(12, 3, 4, 4) * 0.1 + 100
    exact = nn.BatchNorm2d(3).double()(batch.double())
    exchange = Exchange(2)
    team = [synchronise(nn.BatchNorm2d(3), exchange.of(rank)) for rank in range(2)]
    parts = batch.split([5, 7])
    outputs = in_threads([lambda: team[0](parts[0]), lambda: team[1](parts[1])])
    assert all(output.dtype == torch.float32 for output in outputs)
    torch.testing.assert_close(torch.cat(outputs).double(), exact, rtol=1e-3, atol=1e-3)


def test_evaluation_needs_nobody_and_is_torch_s_own() -> None:
    plain = layer(4, 2)
    plain.running_mean.normal_()
    plain.running_var.uniform_(0.5, 2.0)
    batch = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    wanted = plain.eval()(batch)

    def never(value: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("evaluation asked the others")

    assert torch.equal(synchronise(plain, never)(batch), wanted)


def test_without_an_exchange_it_is_an_ordinary_layer() -> None:
    plain = layer(4, 1)
    batch = torch.randn(6, 4, 5, dtype=torch.float64)
    alone = synchronise(layer(4, 1), lambda value: [value])
    assert isinstance(alone, TeamBatchNorm)
    alone.exchange = None
    assert torch.equal(alone(batch), plain(batch))
    assert torch.equal(alone.running_var, plain.running_var)


def test_every_layer_of_a_model_is_replaced_and_keeps_its_tensors() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=0.5), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4, momentum=0.3))
    )
    names = list(model.state_dict(keep_vars=True))
    tensors = list(model.state_dict(keep_vars=True).values())
    model[2].eval()
    same = synchronise(model, lambda value: [value])
    assert same is model
    assert [type(module) for module in model.modules() if "BatchNorm" in type(module).__name__] == [TeamBatchNorm] * 2
    assert (model[1].eps, model[2][1].momentum) == (0.5, 0.3)
    assert (model[1].training, model[2][1].training) == (True, False)
    assert list(model.state_dict(keep_vars=True)) == names
    assert all(a is b for a, b in zip(model.state_dict(keep_vars=True).values(), tensors, strict=True))


def test_a_layer_used_twice_in_a_model_stays_one_layer() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"first": norm, "second": norm})
    synchronise(model, lambda value: [value])
    assert isinstance(model["first"], TeamBatchNorm)
    assert isinstance(model["second"], TeamBatchNorm)
    assert model["first"].weight is model["second"].weight


def test_a_vector_is_refused_as_torch_refuses_it() -> None:
    one = synchronise(nn.BatchNorm1d(4), lambda value: [value])
    with pytest.raises(ValueError, match="2D"):
        one(torch.randn(4))
