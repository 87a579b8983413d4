"""Gradients through `paceline.collectives` are those of the sum of all members' losses.

A program is what each member does with its own tensor. Its gradients must match central differences of the total loss,
for which all members run the program together, while one element of one of them is moved a little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # any optimizer imports it, which takes seconds: once here, not once in every fork
from helpers.primitives import LARGE, Groups, Here, topologies
from torch import autograd, distributed, nn

from paceline import collectives
from paceline.collectives.communicator import Communicator
from paceline.collectives.default_group import communicator
from paceline.errors import UsageError

torch.set_num_threads(1)
BACKENDS = ["paceline", "gloo"]
STEP = 1e-5


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with Groups(timeout=5.0) as made:
        yield made


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- programs --------------------------------------------------------------------------------------------------------


class Left(NamedTuple):
    """What a program leaves a member with."""

    outputs: list[torch.Tensor]
    tokens: list[Any]


def all_reduce(operator: str) -> Callable[[Here, torch.Tensor], Left]:
    return lambda here, x: Left([collectives.all_reduce(x, operator, **here.how)], [])


def reduce(operator: str, root: int) -> Callable[[Here, torch.Tensor], Left]:
    def program(here: Here, x: torch.Tensor) -> Left:
        result = collectives.reduce(x, root, operator, **here.how)
        return Left([result], []) if here.rank == root else Left([], [result])

    return program


def broadcast(here: Here, x: torch.Tensor) -> Left:
    return Left([collectives.broadcast(x, here.size - 1, **here.how)], [])


def all_gather(here: Here, x: torch.Tensor) -> Left:
    return Left(collectives.all_gather(x[: 1 + here.rank], **here.how), [])


def reduce_scatter(operator: str) -> Callable[[Here, torch.Tensor], Left]:
    return lambda here, x: Left([collectives.reduce_scatter(x, operator, **here.how)], [])


def reduce_scatter_parts(here: Here, x: torch.Tensor) -> Left:
    """Parts of different shapes."""
    parts = [x[:rank].outer(x[:2]) for rank in range(here.size)]
    return Left([collectives.reduce_scatter(parts, **here.how)], [])


def gather(here: Here, x: torch.Tensor) -> Left:
    results = collectives.gather(x, 1, **here.how)
    return Left(results, []) if here.rank == 1 else Left([], results)


def scatter(here: Here, x: torch.Tensor) -> Left:
    return Left([collectives.scatter(x if here.rank == 1 else None, 1, **here.how)], [])


def all_to_all(here: Here, x: torch.Tensor) -> Left:
    return Left(collectives.all_to_all(x, **here.how), [])


def all_to_all_parts(here: Here, x: torch.Tensor) -> Left:
    """Parts of different shapes."""
    return Left(collectives.all_to_all([x[: here.rank + rank] for rank in range(here.size)], **here.how), [])


def chain(here: Here, x: torch.Tensor) -> Left:
    """From the first to the last, each adding something of its own."""
    hidden = x.cos()
    if here.rank:
        start = torch.empty(x.shape, dtype=x.dtype, requires_grad=True)
        hidden = hidden * collectives.pull(start, here.rank - 1, tag=3)
    if here.rank == here.size - 1:
        return Left([hidden], [])
    token = collectives.push(hidden.sin(), here.rank + 1, tag=3)
    collectives.wait(token)
    return Left([], [token])


def around(here: Here, x: torch.Tensor) -> Left:
    """Everybody to the next, twice, with what came the first time."""
    tokens = []
    hidden = x
    for _ in range(2):
        tokens.append(collectives.push(hidden.sin(), (here.rank + 1) % here.size))
        start = torch.empty(x.shape, dtype=x.dtype, requires_grad=True)
        hidden = collectives.pull(start, (here.rank - 1) % here.size) * x
    collectives.wait(*tokens)
    return Left([hidden], tokens)


def map_reduce(operator: str, more: int) -> Callable[[Here, torch.Tensor], Left]:
    def program(here: Here, x: torch.Tensor) -> Left:
        items = [1.0 + number / 3 for number in range(here.size + more)]
        return Left([collectives.map_reduce(lambda item: (x * item).sin() + 2, items, operator, **here.how)], [])

    return program


class Program(NamedTuple):
    run: Callable[[Here, torch.Tensor], Left]
    operations: tuple[str, ...] = ()
    """Those that a topology must have."""


PROGRAMS = {
    **{f"all_reduce {name}": Program(all_reduce(name), ("all_reduce",)) for name in ("sum", "avg", "product")},
    **{f"all_reduce {name}": Program(all_reduce(name), ("all_reduce",)) for name in ("min", "max")},
    "reduce sum": Program(reduce("sum", 1), ("reduce", "broadcast")),
    "reduce avg": Program(reduce("avg", 0), ("reduce", "broadcast")),
    "broadcast": Program(broadcast, ("broadcast", "reduce")),
    "all_gather": Program(all_gather, ("all_gather", "reduce_scatter")),
    "reduce_scatter sum": Program(reduce_scatter("sum"), ("reduce_scatter", "all_gather")),
    "reduce_scatter avg": Program(reduce_scatter("avg"), ("reduce_scatter", "all_gather")),
    "reduce_scatter of parts": Program(reduce_scatter_parts, ("reduce_scatter", "all_gather")),
    "gather": Program(gather, ("gather", "scatter")),
    "scatter": Program(scatter, ("scatter", "gather")),
    "all_to_all": Program(all_to_all, ("all_to_all",)),
    "all_to_all of parts": Program(all_to_all_parts, ("all_to_all",)),
    "push and pull in a chain": Program(chain),
    "push and pull around": Program(around),
    "map_reduce sum": Program(map_reduce("sum", 2), ("all_reduce", "all_gather", "reduce_scatter")),
    "map_reduce avg": Program(map_reduce("avg", 3), ("all_reduce", "all_gather", "reduce_scatter")),
    "map_reduce product": Program(map_reduce("product", 1), ("all_reduce", "all_gather", "reduce_scatter")),
    "map_reduce max": Program(map_reduce("max", 2), ("all_reduce", "all_gather", "reduce_scatter")),
    "map_reduce of fewer items": Program(map_reduce("product", -1), ("all_reduce", "all_gather", "reduce_scatter")),
}


# -- gradients against differences -----------------------------------------------------------------------------------


def loss_of(here: Here, outputs: list[torch.Tensor]) -> torch.Tensor:
    """Something that is not linear, and on each member something else."""
    loss = torch.zeros((), dtype=torch.float64)
    for number, output in enumerate(outputs):
        weight = drawn(1000 + 50 * here.rank + number, *output.shape)
        loss = loss + (weight * (output.sin() + output**2)).sum()
    return loss


def differentiate(rank: int, size: int, name: str, several: list[str]) -> tuple[list[Any], list[float]]:
    """By topology, this member's loss and gradient; and its loss each time that an element of somebody was moved."""
    program, start, told = PROGRAMS[name].run, drawn(rank, size, 2).flatten(), []
    for topology in several:
        here = Here(rank, size, topology)
        x = start.clone().requires_grad_()
        outputs, tokens = program(here, x)
        loss = collectives.attach(loss_of(here, outputs), *tokens)
        loss.backward()
        told.append((float(loss.detach()), torch.zeros_like(start) if x.grad is None else x.grad))
    # The losses are those of any topology: one will do for the differences.
    here, losses = Here(rank, size, several[len(name) % len(several)]), []
    with torch.no_grad():
        for mover in range(size):
            for element in range(start.numel()):
                for step in (STEP, -STEP):
                    moved = start.clone()
                    if rank == mover:
                        moved[element] += step
                    losses.append(float(loss_of(here, program(here, moved).outputs)))
    return told, losses


def compare(results: list[Any], several: list[str]) -> None:
    size = len(results)
    losses = torch.tensor([moved for _, moved in results], dtype=torch.float64).sum(0)
    differences = (losses[0::2] - losses[1::2]) / (2 * STEP)
    assert len(differences) == 2 * size * size
    for number, topology in enumerate(several):
        for told, _ in results:
            assert told[number][0] == pytest.approx(told[0][0], rel=1e-9), topology
        gradients = torch.cat([told[number][1] for told, _ in results])
        assert gradients.abs().max() > 0.1
        assert torch.allclose(gradients, differences, rtol=1e-6, atol=1e-7), (topology, gradients, differences)


def able(name: str, shared: bool) -> list[str]:
    """The topologies in which a program can be run."""
    operations = PROGRAMS[name].operations
    if not operations:
        return ["auto"]
    sets = [topologies(operation, shared=shared) for operation in operations]
    return [topology for topology in sets[0] if all(topology in having for having in sets)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_the_sum_of_all_losses(groups: Groups, name: str, size: int) -> None:
    several = able(name, shared=True)
    compare(groups.run(size, differentiate, size, name, several), several)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_travel_over_gloo_too(groups: Groups, name: str) -> None:
    several = able(name, shared=False)[:2]
    compare(groups.run(2, differentiate, 2, name, several, backend="gloo"), several)


# -- what a member is left with --------------------------------------------------------------------------------------


def left_with(rank: int) -> dict[str, Any]:
    x = torch.ones(3, requires_grad=True)
    tokens = {
        "reduce": collectives.reduce(x, 0),
        "gather": (collectives.gather(x, 0) or [None])[0],
        "push": collectives.push(x, 0),
    }
    if rank == 0:
        pulled = [collectives.pull(torch.empty(3, requires_grad=True), source) for source in range(2)]
        collectives.attach(sum(part.sum() * 2 for part in pulled), tokens["push"]).backward()
    else:
        tokens["push"].sum().backward()
    gradient = x.grad.tolist()
    described = {name: (tuple(token.shape), token.requires_grad) for name, token in tokens.items()}
    collectives.attach(torch.zeros(()), tokens["reduce"], tokens["gather"]).backward()
    return {**described, "gradient": gradient}


def test_whoever_is_left_with_nothing_has_a_token(groups: Groups) -> None:
    at_root, elsewhere = groups.run(2, left_with)
    assert elsewhere == dict.fromkeys(("reduce", "gather", "push"), ((0,), True)) | {"gradient": [2.0] * 3}
    assert at_root["reduce"] == ((3,), True)
    assert at_root["push"] == ((0,), True)
    assert at_root["gradient"] == [2.0] * 3


def attach_to_loss(rank: int) -> tuple[list[float], list[float]]:
    """A member with a loss of its own, and a token."""
    own, given = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    total = collectives.reduce(given * (rank + 1), 2, topology="ring")
    loss = (own**2).sum()
    loss = loss + total.prod() if rank == 2 else collectives.attach(loss, total)
    before = float(loss.detach())
    assert before == (38.0 if rank == 2 else 2.0)
    loss.backward()
    return own.grad.tolist(), given.grad.tolist()


def test_a_token_is_attached_to_the_loss_that_there_is(groups: Groups) -> None:
    expected = [([2.0, 2.0], [6.0 * (rank + 1)] * 2) for rank in range(3)]
    assert groups.run(3, attach_to_loss) == expected


def forget_gradients(rank: int) -> list[str]:
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        results = [
            collectives.all_reduce(x.clone(), "product"),
            collectives.reduce(x.clone(), 0, "max"),
            collectives.broadcast(x.clone(), 1),
            *collectives.all_gather(x),
            *collectives.gather(x, 1),
            collectives.reduce_scatter(x, "min"),
            collectives.scatter(x if rank == 0 else None, 0),
            *collectives.all_to_all(x),
            collectives.map_reduce(lambda item: x * item, [1, 2, 3]),
        ]
        sending = collectives.push(x, 1 - rank)
        results.append(collectives.pull(torch.empty(4, requires_grad=True), 1 - rank))
        collectives.wait(sending)
        assert not isinstance(sending, torch.Tensor)
        assert collectives.all_reduce(x) is x  # in place, as always
    assert x.tolist() == [2.0] * 4
    return [str(result.grad_fn) for result in results if result.grad_fn is not None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_grad_mode_results_are_plain(groups: Groups, backend: str) -> None:
    assert groups.run(2, forget_gradients, backend=backend) == [[], []]


def keep_what_was_given(rank: int) -> None:
    """With a gradient, tensors are not changed in place."""
    x = torch.full((3,), rank + 1.0, requires_grad=True)
    for operation in ("all_reduce", "reduce", "broadcast"):
        result = getattr(collectives, operation)(x)
        assert result is not x
        assert x.tolist() == [rank + 1.0] * 3
        result.sum().backward()


def test_a_tensor_with_a_gradient_is_not_changed_in_place(groups: Groups) -> None:
    groups.run(2, keep_what_was_given)


def tie(rank: int) -> dict[str, list[float]]:
    gradients = {}
    for name in ("min", "max"):
        x = torch.tensor([1.0, float(rank), 5.0 if rank == 2 else 3.0], requires_grad=True)
        (collectives.all_reduce(x, name) * torch.tensor([6.0, 1.0, 1.0])).sum().backward()
        gradients[name] = x.grad.tolist()
    return gradients


def test_equals_share_the_gradient_of_an_extreme(groups: Groups) -> None:
    results = groups.run(3, tie)
    assert [result["min"] for result in results] == [[6.0, 3.0, 1.5], [6.0, 0.0, 1.5], [6.0, 0.0, 0.0]]
    assert [result["max"] for result in results] == [[6.0, 0.0, 0.0], [6.0, 0.0, 0.0], [6.0, 3.0, 3.0]]


def reduce_complex(rank: int, size: int, name: str) -> torch.Tensor:
    x = torch.complex(drawn(rank, 3), drawn(50 + rank, 3)).requires_grad_()
    weight = torch.complex(drawn(80 + rank, 3), drawn(90 + rank, 3))
    (collectives.all_reduce(x, name) * weight).abs().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("name", ["sum", "avg", "product"])
def test_complex_numbers_have_gradients_as_torch_has_them(groups: Groups, name: str) -> None:
    size = 3
    parts = [torch.complex(drawn(rank, 3), drawn(50 + rank, 3)).requires_grad_() for rank in range(size)]
    stacked = torch.stack(parts)
    total = {"sum": stacked.sum(0), "avg": stacked.mean(0), "product": parts[0] * parts[1] * parts[2]}[name]
    weights = [torch.complex(drawn(80 + rank, 3), drawn(90 + rank, 3)) for rank in range(size)]
    torch.stack([(total * weight).abs().sum() for weight in weights]).sum().backward()
    for result, part in zip(groups.run(size, reduce_complex, size, name), parts, strict=True):
        torch.testing.assert_close(result, part.grad)


UNDEFINED = {
    "all_reduce band": lambda x: collectives.all_reduce(x, "band"),
    "reduce max": lambda x: collectives.reduce(x, 0, "max"),
    "reduce product": lambda x: collectives.reduce(x, 0, "product"),
    "reduce_scatter min": lambda x: collectives.reduce_scatter([x, x], "min"),
}


def refuse(rank: int, name: str) -> tuple[str, float]:
    with pytest.raises(UsageError) as caught:
        UNDEFINED[name](torch.ones(2, requires_grad=True))
    return str(caught.value), float(collectives.all_reduce(torch.ones(1)))


@pytest.mark.parametrize("name", UNDEFINED)
def test_what_has_no_gradient_says_so_and_the_group_goes_on(groups: Groups, name: str) -> None:
    operation, operator = name.split()
    for text, after in groups.run(2, refuse, name):
        assert text.startswith(f"{operation} with op '{operator}' has no gradient; ")
        assert after == 2.0


# -- gradients of gradients ------------------------------------------------------------------------------------------


def twice(rank: int, size: int, operator: str, topology: str) -> torch.Tensor:
    """The gradient of a penalty on the gradient."""
    x = drawn(rank, 4).requires_grad_()
    loss = loss_of(Here(rank, size), [collectives.all_reduce(x * x + x, operator, topology=topology)])
    (gradient,) = autograd.grad(loss, x, create_graph=True)
    (drawn(300 + rank, 4) * gradient**2).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("operator", ["sum", "avg", "product", "min", "max"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_has_a_second_gradient(groups: Groups, size: int, operator: str) -> None:
    parts = [drawn(rank, 4).requires_grad_() for rank in range(size)]
    stacked = torch.stack([part * part + part for part in parts])
    total = {
        "sum": stacked.sum(0),
        "avg": stacked.mean(0),
        "product": stacked.prod(0),
        "min": stacked.amin(0),
        "max": stacked.amax(0),
    }[operator]
    loss = torch.stack([loss_of(Here(rank, size), [total]) for rank in range(size)]).sum()
    gradients = autograd.grad(loss, parts, create_graph=True)
    penalties = [(drawn(300 + rank, 4) * gradient**2).sum() for rank, gradient in enumerate(gradients)]
    torch.stack(penalties).sum().backward()
    for topology in ("auto", "ring"):
        for result, part in zip(groups.run(size, twice, size, operator, topology), parts, strict=True):
            torch.testing.assert_close(result, part.grad)


def once(rank: int, size: int, operation: str) -> tuple[bool, torch.Tensor]:
    """Whether a second gradient was refused; if not, what it is."""
    x = drawn(rank, size).requires_grad_()
    match operation:
        case "broadcast":
            outputs = [collectives.broadcast(x, 0)]
        case "all_gather":
            outputs = collectives.all_gather(x)
        case "reduce_scatter":
            outputs = [collectives.reduce_scatter(x)]
        case _:
            outputs = collectives.all_to_all(x)
    loss = torch.stack([(output**3).sum() for output in outputs]).sum() + (x**3).sum()
    (gradient,) = autograd.grad(loss, x, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        assert "twice" in str(error)
        return True, x.detach()
    assert x.grad is not None
    return False, x.grad


@pytest.mark.parametrize("operation", ["broadcast", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_second_gradient_is_right_or_refused(groups: Groups, operation: str) -> None:
    size = 3
    stacked = torch.stack([drawn(rank, size) for rank in range(size)])
    for rank, (refused, second) in enumerate(groups.run(size, once, size, operation)):
        own = 6 * stacked[rank]
        expected = {
            "broadcast": own * (size + 1 if rank == 0 else 1),
            "all_gather": own * (size + 1),
            "reduce_scatter": own + 6 * size * stacked.sum(0),
            "all_to_all": own * 2,
        }[operation]
        if not refused:
            torch.testing.assert_close(second, expected)


# -- who wants a gradient --------------------------------------------------------------------------------------------


def mixed(rank: int, size: int, operation: str, wanting: list[int]) -> list[float] | None:
    """The loss is the same whoever wants its gradient."""
    x = torch.arange(2.0 * size).reshape(size, 2) + rank
    x.requires_grad_(rank in wanting)
    tokens: list[torch.Tensor] = []
    if operation == "all_gather":
        outputs = collectives.all_gather(x)
    elif operation == "all_to_all":
        outputs = collectives.all_to_all(x)
    elif operation == "gather":
        outputs = collectives.gather(x, 1)
        outputs, tokens = (outputs, []) if rank == 1 else ([], outputs)
    else:
        parts = [(x[0] + number).detach().requires_grad_(number in wanting) for number in range(size)]
        outputs = [collectives.scatter(parts if rank == 1 else None, 1)]
    loss = torch.zeros(()) + sum((output**2).sum() * (rank + 1) for output in outputs)
    loss = collectives.attach(loss, *tokens)
    if loss.requires_grad:
        loss.backward()
    if operation == "scatter":
        return [0.0 if part.grad is None else float(part.grad[0] / part[0]) for part in parts] if rank == 1 else None
    return None if x.grad is None else (x.grad / x.detach().clamp(min=0.5)).flatten().tolist()


@pytest.mark.parametrize("wanting", [[0], [1], [0, 2], [1, 2]], ids=str)
@pytest.mark.parametrize("operation", ["all_gather", "gather", "scatter", "all_to_all"])
def test_some_may_want_a_gradient_and_others_not(groups: Groups, operation: str, wanting: list[int]) -> None:
    results = groups.run(3, mixed, 3, operation, wanting)
    if operation == "scatter":
        assert results == [None, [2.0 * (rank + 1) if rank in wanting else 0.0 for rank in range(3)], None]
        return
    for rank, result in enumerate(results):
        if rank not in wanting:
            assert result is None
            continue
        factors = {"all_gather": [12.0] * 6, "gather": [4.0] * 6, "all_to_all": [2.0, 2.0, 4.0, 4.0, 6.0, 6.0]}
        expected = factors[operation]
        if rank == 0:
            expected = [0.0, *expected[1:]]  # of an element that is zero
        assert result == pytest.approx(expected)


# -- pushes and pulls ------------------------------------------------------------------------------------------------


def swap(rank: int, length: int) -> float:
    x = torch.full((length,), rank + 1.0, requires_grad=True)
    token = collectives.push(x, 1 - rank)
    pulled = collectives.pull(torch.empty(length, requires_grad=True), 1 - rank)
    collectives.attach((pulled * (10 + rank)).sum(), token).backward()
    assert float(pulled.detach()[-1]) == 2.0 - rank
    assert x.grad is not None
    return float(x.grad[-1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [3, LARGE])
def test_two_members_may_push_to_each_other(groups: Groups, length: int, backend: str) -> None:
    assert groups.run(2, swap, length, backend=backend) == [11.0, 10.0]


def in_another_order(rank: int) -> list[float]:
    """The gradients of two messages come back in another order than they are asked for."""
    if rank == 0:
        several = [torch.ones(3, requires_grad=True) for _ in range(2)]
        tokens = [collectives.push(x, 1, tag=tag) for tag, x in enumerate(several)]
        for token in tokens:
            token.sum().backward()
        return [float(x.grad[0]) for x in several]
    pulled = [collectives.pull(torch.empty(3, requires_grad=True), 0, tag=tag) for tag in range(2)]
    for factor, tensor in ((5.0, pulled[1]), (2.0, pulled[0])):
        (tensor * factor).sum().backward()
    return []


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_gradient_goes_back_to_its_own_message(groups: Groups, backend: str) -> None:
    assert groups.run(2, in_another_order, backend=backend) == [[2.0, 5.0], []]


def both_tags(rank: int) -> list[float]:
    """One loss over two messages: in which order their gradients come is up to torch."""
    if rank == 0:
        first, second = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        late = collectives.push(second, 1, tag=1)
        early = collectives.push(first, 1, tag=0)
        collectives.attach(torch.zeros(()), early, late).backward()
        return [float(first.grad[0]), float(second.grad[0])]
    first, second = (collectives.pull(torch.empty(3, requires_grad=True), 0, tag=tag) for tag in (0, 1))
    (2 * first + 5 * second).sum().backward()
    return []


@pytest.mark.parametrize("backend", BACKENDS)
def test_tags_keep_gradients_apart(groups: Groups, backend: str) -> None:
    assert groups.run(2, both_tags, backend=backend)[0] == [2.0, 5.0]


def come_and_go(rank: int) -> int:
    """Members that come and go; at one end their memory is used again, at the other not."""
    known, kept, places = communicator(), [], set()
    for number in range(40):
        here: Any = Communicator(known.rank, known.size, known._channel, known._group)
        places.add(id(here))
        if rank == 0:
            x = torch.ones(2, requires_grad=True)
            collectives.push(x, 1, group=here).sum().backward()
            assert x.grad.tolist() == [float(number)] * 2
        else:
            kept.append(here)
            (collectives.pull(torch.empty(2, requires_grad=True), 0, group=here) * number).sum().backward()
        del here
    return len(places)


def test_gradients_of_a_new_group_have_nothing_to_do_with_those_of_an_old_one(groups: Groups) -> None:
    first, second = groups.run(2, come_and_go)
    assert first < second == 40  # or this would show nothing


# -- models over several members -------------------------------------------------------------------------------------


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(count)]


def train_apart(rank: int, size: int, count: int, steps: int) -> list[tuple[int, list[torch.Tensor]]]:
    """Layer i is on member i modulo the number of members: data crosses at every layer."""
    mine = {number: layer for number, layer in enumerate(layers(count)) if number % size == rank}
    optimizer = torch.optim.SGD([value for layer in mine.values() for value in layer.parameters()], lr=0.1)
    for step in range(steps):
        tokens, loss = [], torch.zeros((), dtype=torch.float64)
        for number, layer in mine.items():
            hidden = drawn(step, 4, 5)
            if number:
                start = torch.empty(4, 5, dtype=torch.float64, requires_grad=True)
                hidden = collectives.pull(start, (rank - 1) % size)
            hidden = layer(hidden)
            if number == count - 1:
                loss = (hidden**2).sum()
            else:
                tokens.append(collectives.push(hidden, (rank + 1) % size))
        optimizer.zero_grad()
        collectives.attach(loss, *tokens).backward()
        optimizer.step()
    return [(number, [value.detach() for value in layer.parameters()]) for number, layer in mine.items()]


@pytest.mark.parametrize(("size", "count"), [(2, 2), (2, 5), (3, 3), (3, 7), (4, 4)])
def test_a_model_whose_layers_are_on_different_members_learns_the_same(groups: Groups, size: int, count: int) -> None:
    steps = 3
    alone = layers(count)
    optimizer = torch.optim.SGD([value for layer in alone for value in layer.parameters()], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        (nn.Sequential(*alone)(drawn(step, 4, 5)) ** 2).sum().backward()
        optimizer.step()
    found = [pair for result in groups.run(size, train_apart, size, count, steps) for pair in result]
    assert sorted(number for number, _ in found) == list(range(count))
    for number, values in found:
        torch.testing.assert_close(values, [value.detach() for value in alone[number].parameters()])


def fork_and_meet(rank: int) -> list[torch.Tensor]:
    """From member 0 to 1 and to 2, from 1 to 2, where both ways meet; then all of them in one more reduction."""
    x = drawn(7 + rank, 3).requires_grad_()
    start = torch.empty(3, dtype=torch.float64, requires_grad=True)
    tokens = []
    hidden = x.sin()
    if rank == 0:
        tokens = [collectives.push(hidden, 1), collectives.push(hidden.exp(), 2)]
    elif rank == 1:
        hidden = collectives.pull(start, 0) * hidden
        tokens = [collectives.push(hidden, 2)]
    else:
        hidden = collectives.pull(start, 0) + collectives.pull(start, 1) * hidden
    total = collectives.all_reduce(hidden, "avg")
    collectives.attach((total**2).sum() * (rank + 1), *tokens).backward()
    assert x.grad is not None
    return [total.detach(), x.grad]


def test_a_graph_may_cross_members_on_several_ways(groups: Groups) -> None:
    first, second, third = (drawn(7 + rank, 3).requires_grad_() for rank in range(3))
    at_one = first.sin() * second.sin()
    at_two = first.sin().exp() + at_one * third.sin()
    total = (first.sin() + at_one + at_two) / 3
    ((total**2).sum() * 6).backward()
    for (mean, gradient), x in zip(groups.run(3, fork_and_meet), (first, second, third), strict=True):
        torch.testing.assert_close(mean, total.detach())
        torch.testing.assert_close(gradient, x.grad)


def train_data_parallel(rank: int, size: int) -> list[torch.Tensor]:
    """Each member has a part of the batch; the loss is of the mean over all."""
    (model,) = layers(1)
    inputs = drawn(1, 12, 5).tensor_split(size)[rank]
    output = torch.cat(collectives.all_gather(model(inputs)))
    ((output.mean(0) ** 2).sum() / size).backward()
    for value in model.parameters():
        assert value.grad is not None
        collectives.all_reduce(value.grad)
    return [value.grad for value in model.parameters() if value.grad is not None]


@pytest.mark.parametrize("size", [2, 3])
def test_statistics_of_the_whole_batch_have_the_gradient_of_one_process(groups: Groups, size: int) -> None:
    (model,) = layers(1)
    (model(drawn(1, 12, 5)).mean(0) ** 2).sum().backward()
    for result in groups.run(size, train_data_parallel, size):
        torch.testing.assert_close(result, [value.grad for value in model.parameters()])


def in_a_subgroup(rank: int) -> float | None:
    group = distributed.new_group([0, 2])
    if rank == 1:
        return None
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    (collectives.all_reduce(x, "product", group=group) * (rank + 1)).sum().backward()
    assert x.grad is not None
    return float(x.grad[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_stay_in_their_group(groups: Groups, backend: str) -> None:
    assert groups.run(3, in_a_subgroup, backend=backend) == [12.0, None, 4.0]
