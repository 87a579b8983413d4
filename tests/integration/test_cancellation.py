"""`with team.step():` left in its middle: at the next boundary, and as if the step had not begun.

Two workers under `k-sync:k=1`. The victim pauses in the middle of its first step; the other one then makes an update
with its own gradient, so that the victim's can no longer be used; then the victim goes on.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.checker import violations
from helpers.load import above_noise
from helpers.teams import run_team
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from paceline.config import Launch, Slowness, Timeouts
from paceline.events import Cancel, Compute, Event, Push, Return, Update, read
from paceline.events.summary import merge

VICTIM = 1


class Stage:
    """Who waits for whom."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.paused, self.overtaken, self.looked = context.Event(), context.Event(), context.Event()
        self.where = ""

    def pause(self, where: str) -> None:
        """The victim is in the middle of its step."""
        if where == self.where:
            self.where = ""
            self.paused.set()
            assert self.overtaken.wait(20)


class Counted(torch.nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class _Tapped(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, before: Callable[[], None]) -> torch.Tensor:
        context.before = before
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.before()
        return gradients[0], None


class Tap(torch.nn.Module):
    """Is told when the backward pass comes by."""

    def __init__(self, on_backward: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.on_backward = on_backward
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Tapped.apply(x, self._pass)

    def _pass(self) -> None:
        self.passes += 1
        self.on_backward()


class Gate(Tap):
    """Where the victim pauses, on its way forward or back."""

    def __init__(self, stage: Stage | None) -> None:
        super().__init__(lambda: stage.pause("backward") if stage else None)
        self._stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._stage:
            self._stage.pause("forward")
        return super().forward(x)


class Tally(torch.nn.Module):
    """Puts another tensor where its buffer was, whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.last = x.detach().mean()
        return x


def make(stage: Stage | None = None) -> tuple[torch.nn.Sequential, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    layers = [Tally(), Counted(6, 8), Tap(), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), Gate(stage), Counted(8, 8)]
    model = torch.nn.Sequential(*layers, Counted(8, 1))
    inputs = torch.randn(96, 6)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loader


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """All that a step changes and that is not the parameters."""
    kind, keys, *rest = numpy.random.get_state()
    return {
        "buffers": {name: buffer.tolist() for name, buffer in model.named_buffers()},
        "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
    }


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    momenta = [state["momentum_buffer"] for _, state in sorted(optimizer.state_dict()["state"].items())]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *momenta)]


def draw_numbers() -> None:
    random.random()
    numpy.random.rand()


def train(team: Any, model: Any, optimizer: Any, batch: Any) -> None:
    with team.step():
        mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- ways to be overtaken --------------------------------------------------------------------------------------------


def plain_step(stage: Stage, team: Any, model: Any, optimizer: Any, batches: Iterator[Any], trace: list[str]) -> None:
    x, y = next(batches)
    with team.step():
        draw_numbers()
        loss = mse_loss(model(x), y)
        trace.append("forward")
        loss.backward()
        trace.append("backward")
        stage.pause("optimizer")
        optimizer.step()
        trace.append("step")
        optimizer.zero_grad()
    trace.append("after")


def careless_step(
    stage: Stage, team: Any, model: Any, optimizer: Any, batches: Iterator[Any], trace: list[str]
) -> None:
    x, y = next(batches)
    with team.step():
        try:
            draw_numbers()
            mse_loss(model(x), y).backward()
            optimizer.step()
        except Exception:
            trace.append("caught")
        finally:
            trace.append("tidied")
        trace.append("went on")
    trace.append("after")


def several_losses(
    stage: Stage, team: Any, model: Any, optimizer: Any, batches: Iterator[Any], trace: list[str]
) -> None:
    x, y = next(batches)
    with team.step():
        draw_numbers()
        first, second = mse_loss(model(x), y), mse_loss(model(x + 1), y)
        first.backward()
        trace.append("first")
        assert all(parameter.grad is not None for parameter in model.parameters())
        stage.pause("between")
        second.backward()
        trace.append("second")
        optimizer.step()
        optimizer.zero_grad()
    trace.append("after")


def with_closure(stage: Stage, team: Any, model: Any, optimizer: Any, batches: Iterator[Any], trace: list[str]) -> None:
    x, y = next(batches)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        draw_numbers()
        loss = mse_loss(model(x), y)
        trace.append("forward")
        loss.backward()
        trace.append("backward")
        return loss

    with team.step():
        optimizer.step(closure)
        trace.append("step")
    trace.append("after")


def step_in_step(stage: Stage, team: Any, model: Any, optimizer: Any, batches: Iterator[Any], trace: list[str]) -> None:
    x, y = next(batches)
    with team.step():
        for part in range(2):
            with team.step(accumulate=True):
                with team.step(accumulate=True):
                    draw_numbers()
                mse_loss(model(x[part::2]), y[part::2]).backward()
                trace.append(f"backward {part}")
                optimizer.step()
                optimizer.zero_grad()
            trace.append(f"after {part}")
        optimizer.step()
    trace.append("after")


class Scaled:
    """Steps with one `GradScaler`."""

    def __init__(self, unscales: bool, enabled: bool) -> None:
        self._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        self._unscales = unscales

    def train(
        self, team: Any, model: Any, optimizer: Any, batch: Any, pause: Callable[[], None] = lambda: None
    ) -> None:
        with team.step():
            self._scaler.scale(mse_loss(model(batch[0]), batch[1])).backward()
            if self._unscales:
                self._scaler.unscale_(optimizer)
            pause()
            self._scaler.step(optimizer)
            self._scaler.update()
            optimizer.zero_grad()

    def step(
        self, stage: Stage, team: Any, model: Any, optimizer: Any, batches: Iterator[Any], _trace: list[str]
    ) -> None:
        self.train(team, model, optimizer, next(batches), lambda: stage.pause("optimizer"))


def window(stage: Stage, team: Any, model: Any, optimizer: Any, batches: Iterator[Any], trace: list[str]) -> None:
    where, stage.where = stage.where, ""
    for number in range(2):
        x, y = next(batches)
        with team.step(accumulate=number == 0):
            draw_numbers()
            mse_loss(model(x), y).backward()
            trace.append(f"backward {number}")
            stage.where = where
            optimizer.step()
            optimizer.zero_grad()
        trace.append(f"after {number}")


# -- the play --------------------------------------------------------------------------------------------------------


def play(
    stage: Stage, folder: Path, steps: Callable[..., None], train: Callable[..., None] = train, **launch: Any
) -> tuple[dict[str, Any], list[Event]]:
    """What the victim saw, and what was recorded."""

    def work(team: Any) -> dict[str, Any]:
        model, optimizer, loader = team.setup(*make(stage if team.rank == VICTIM else None))
        batches = iter(loader)
        seen: dict[str, Any] = {}
        if team.rank == VICTIM:
            first, trace = next(batches), list[str]()
            torch.manual_seed(12)
            before = state_of(model)
            steps(stage, team, model, optimizer, itertools.chain([first], batches), trace)
            after = state_of(model)
            seen = {"trace": trace, "before": before, "after": after}
            seen["calls"] = [module.calls for module in model if isinstance(module, Counted)]
            seen["passes"] = [module.passes for module in model if isinstance(module, Tap)]
            seen["newest"] = values(model, optimizer)
            batch = next(batches)
            train(team, model, optimizer, batch)
            seen["next"], seen["batch"] = values(model, optimizer), batch
            stage.looked.set()
        else:
            batch = next(batches)
            torch.manual_seed(11)
            assert stage.paused.wait(20), "the victim did not pause"
            train(team, model, optimizer, batch)
            time.sleep(0.05)
            stage.overtaken.set()
            assert stage.looked.wait(20)
            seen["batch"] = batch
        for batch in batches:
            train(team, model, optimizer, batch)
        return seen

    settings = {"strategy": "k-sync:k=1", "servers": "lead", "folder": str(folder)}
    timeouts = Timeouts(barrier=30.0, join=20.0)
    fast, victim = run_team(work, 2, launch=Launch(timeouts=timeouts, **{**settings, **launch}))
    merge(folder, 2)
    return victim | {"other": fast["batch"]}, list(read(folder / "events.jsonl"))


def in_plain_torch(seen: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The values after the other's first step, and after the victim's next one."""
    results = []
    model, optimizer, _ = make()
    for seed, (x, y) in ((11, seen["other"]), (12, seen["batch"])):
        torch.manual_seed(seed)  # 12: as if the cancelled step had not drawn anything
        model[3].reset_running_stats()  # each worker has its own
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        results.append(values(model, optimizer))
    return results[0], results[1]


def assert_as_if_not_begun(seen: dict[str, Any], events: list[Event], leases: int = 1) -> None:
    for name in seen["before"]:
        assert seen["after"][name] == seen["before"][name], name
    newest, after_next = in_plain_torch(seen)
    torch.testing.assert_close(seen["newest"], newest)
    torch.testing.assert_close(seen["next"], after_next)
    cancels = [event for event in events if isinstance(event, Cancel) and event.rank == VICTIM]
    assert cancels[0].version == 0
    assert len(cancels[0].leases) == leases
    back = next(event for event in events if isinstance(event, Return))
    assert (back.rank, back.leases, back.why) == (VICTIM, cancels[0].leases, "cancelled")
    first, second = (event for event in events if isinstance(event, Update) and event.version <= 2)
    pushes = {event.ticket: event for event in events if isinstance(event, Push)}
    assert [pushes[first.pushes[0]].rank, pushes[second.pushes[0]].rank] == [0, VICTIM]
    assert violations(events) == []


@pytest.mark.parametrize(
    ("steps", "where", "trace", "calls", "passes"),
    [
        (plain_step, "forward", ["after"], [1, 0, 0], [0, 0]),
        (plain_step, "backward", ["forward", "after"], [1, 1, 1], [0, 1]),
        (plain_step, "optimizer", ["forward", "backward", "after"], [1, 1, 1], [1, 1]),
        (careless_step, "forward", ["tidied", "after"], [1, 0, 0], [0, 0]),
        (careless_step, "backward", ["tidied", "after"], [1, 1, 1], [0, 1]),
        (several_losses, "forward", ["after"], [1, 0, 0], [0, 0]),
        (several_losses, "between", ["first", "after"], [2, 2, 2], [1, 1]),
        (with_closure, "forward", ["after"], [1, 0, 0], [0, 0]),
        (with_closure, "backward", ["forward", "after"], [1, 1, 1], [0, 1]),
        (step_in_step, "forward", ["after"], [1, 0, 0], [0, 0]),
        (step_in_step, "backward", ["after"], [1, 1, 1], [0, 1]),
    ],
    ids=lambda value: value.__name__ if callable(value) else value if isinstance(value, str) else "so",
)
def test_a_cancelled_step_is_left_at_the_next_boundary_as_if_it_had_not_begun(
    steps: Callable[..., None], where: str, trace: list[str], calls: list[int], passes: list[int], tmp_path: Path
) -> None:
    stage = Stage()
    stage.where = where
    seen, events = play(stage, tmp_path, steps)
    assert seen["trace"] == trace
    assert seen["calls"] == calls
    assert seen["passes"] == passes
    assert_as_if_not_begun(seen, events)


@pytest.mark.parametrize(("unscales", "enabled"), [(False, True), (True, True), (True, False)])
def test_a_scaler_goes_on_after_a_step_that_was_left_in_its_middle(
    unscales: bool, enabled: bool, tmp_path: Path
) -> None:
    stage, scaled = Stage(), Scaled(unscales, enabled)
    stage.where = "optimizer"
    assert_as_if_not_begun(*play(stage, tmp_path, scaled.step, scaled.train))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_window_of_accumulated_gradients_is_left_as_a_whole(where: str, tmp_path: Path) -> None:
    stage = Stage()
    stage.where = where
    seen, events = play(stage, tmp_path, window)
    assert seen["trace"] == ["backward 0", "after 0", "after 1"]
    assert seen["calls"] == ([2, 1, 1] if where == "forward" else [2, 2, 2])
    assert_as_if_not_begun(seen, events, leases=2)


# -- without `with team.step():` -------------------------------------------------------------------------------------


def without_block(
    stage: Stage, team: Any, model: Any, optimizer: Any, batches: Iterator[Any], trace: list[str]
) -> None:
    x, y = next(batches)
    draw_numbers()
    mse_loss(model(x), y).backward()
    trace.append("backward")
    optimizer.step()
    trace.append("step")
    optimizer.zero_grad()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_a_block_nothing_is_cut_and_the_late_gradient_is_dropped(where: str, tmp_path: Path) -> None:
    stage = Stage()
    stage.where = where
    seen, events = play(stage, tmp_path, without_block)
    assert seen["trace"] == ["backward", "step"]
    assert seen["calls"] == [1, 1, 1]
    assert seen["passes"] == [1, 1]
    assert seen["after"]["buffers"] != seen["before"]["buffers"]
    torch.testing.assert_close(seen["newest"], in_plain_torch(seen)[0])
    late = next(event for event in events if isinstance(event, Push) and event.rank == VICTIM)
    assert (late.version, late.staleness, late.outcome) == (0, 1, "dropped")
    back = next(event for event in events if isinstance(event, Return))
    assert (back.leases, back.why) == (late.leases, "dropped")
    assert not [event for event in events if isinstance(event, Cancel) and event.start <= late.start]
    assert violations(events) == []


# -- what else ends with it, and what does not -----------------------------------------------------------------------


def test_slowness_put_on_ends_with_the_step(tmp_path: Path) -> None:
    def work(team: Any) -> list[float]:
        model, optimizer, loader = team.setup(*make())
        lengths = []
        for batch in loader:
            start = time.perf_counter()
            train(team, model, optimizer, batch)
            lengths.append(time.perf_counter() - start)
            time.sleep(0.02 if team.rank == 0 else 0.0)
        return lengths

    def check(factor: float) -> None:
        naps, folder = 0.8 * factor, tmp_path / f"{factor:g}"
        slow = {VICTIM: Slowness(length=f"constant({naps})")}
        launch = Launch(strategy="k-sync:k=1", servers="lead", folder=str(folder), slow=slow)
        lengths = run_team(work, 2, launch=launch)[VICTIM]
        merge(folder, 2)
        events = list(read(folder / "events.jsonl"))
        cut = [event for event in events if isinstance(event, Cancel)]
        whole = [event for event in events if isinstance(event, Compute) and event.rank == VICTIM]
        assert {event.rank for event in cut} == {VICTIM}
        assert len(cut) >= 5
        assert max(event.seconds for event in cut) < naps / 2
        assert sorted(lengths)[len(cut) - 1] < naps / 2
        # Nobody else could have had what it held when the epoch ran out.
        assert len(whole) <= 1
        assert violations(events) == []

    above_noise(check, (1.0, 10.0))


def test_samples_of_a_step_that_is_cancelled_in_a_slow_exchange_are_trained_on_by_others(tmp_path: Path) -> None:
    def work(team: Any) -> None:
        model, optimizer, loader = team.setup(*make())
        for batch in loader:
            train(team, model, optimizer, batch)
            time.sleep(0.02 if team.rank == 0 else 0.0)

    slow = {VICTIM: Slowness(length="constant(0.5)", where="link")}
    run_team(work, 2, launch=Launch(strategy="k-sync:k=1", servers="lead", folder=str(tmp_path), slow=slow))
    merge(tmp_path, 2)
    events = list(read(tmp_path / "events.jsonl"))
    cut = [event for event in events if isinstance(event, Cancel) and event.rank == VICTIM]
    assert len(cut) >= 5 and all(event.leases for event in cut)
    assert violations(events) == []


def test_what_a_script_raises_itself_leaves_the_block_as_ever() -> None:
    def work(team: Any) -> list[str]:
        model, optimizer, loader = team.setup(*make())
        caught = []
        for number, batch in enumerate(loader):
            try:
                with team.step():
                    if number == 1:
                        raise KeyError("own")
                    mse_loss(model(batch[0]), batch[1]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            except KeyError as error:
                caught.append(str(error))
            time.sleep(0.005)
        return caught

    launch = Launch(strategy="k-sync:k=1", servers="lead")
    assert run_team(work, 2, launch=launch) == [["'own'"], ["'own'"]]


def test_a_policy_that_cancels_nobody_leaves_no_step() -> None:
    """Nothing looks for cancellation, so nothing is slower for it."""

    def work(team: Any) -> tuple[int, int]:
        model, optimizer, loader = team.setup(*make())
        for batch in loader:
            train(team, model, optimizer, batch)
        return sum(len(module._forward_pre_hooks) for module in model.modules()), model[1].calls

    hooks, calls = zip(*run_team(work, 2, launch=Launch(strategy="async", servers="lead")), strict=True)
    assert hooks == (0, 0)
    assert sum(calls) == 12
