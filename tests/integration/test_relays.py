"""A parameter server over separate hosts gives what it gives on one machine, whoever pushes from wherever."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checker import violations
from helpers.hosts import Host, hosts
from helpers.machines import Failure, Spread
from helpers.teams import run_team
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.config import Launch, Timeouts
from paceline.events import Compute, Join, Leave, Send


@pytest.fixture(scope="module")
def two() -> Any:
    with hosts(2) as made:
        yield made


def _data(samples: int = 128) -> TensorDataset:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def _model(width: int = 16) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))


def _values(model: torch.nn.Module) -> list[Any]:
    return [parameter.detach().clone().numpy() for parameter in model.parameters()]


def train(team: Any, epochs: int = 2, **options: Any) -> list[Any]:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(_data(), batch_size=8 * team.world_size)
    model, optimizer, loader = team.setup(model, optimizer, loader, **options)
    for _ in range(epochs):
        for x, y in loader:
            with team.step():
                mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    team.barrier()
    team.close()
    return _values(model)


def _close(first: list[Any], second: list[Any]) -> bool:
    return all(torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-5) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        ("sync", "all"),
        ("k-sync:k=2", "lead"),
        ("k-batch-sync:k=3", "all"),
        ("async", "lead"),
        ("k-async:k=2", "all"),
        ("k-batch-async:k=2", "lead"),
        ("ssp:s=1", "all"),
        ("groups:size=2,between=async", "lead"),
        ("adaptive:of=k-async,start=1", "all"),
    ],
)
def test_every_policy_keeps_its_promises_over_hosts(
    two: list[Host], tmp_path: Path, strategy: str, servers: str
) -> None:
    with Spread(train, two, 2, folder=tmp_path / "run", strategy=strategy, servers=servers) as team:
        values = team.values(40)
        assert all(_close(values[0], other) for other in values[1:])  # at the end all have the newest version
        recorded = team.events()
    assert violations(recorded, strategy) == []
    assert {event.rank for event in recorded if isinstance(event, Join)} == {0, 1, 2, 3}
    assert {event.rank for event in recorded if isinstance(event, Leave)} == {0, 1, 2, 3}
    assert not (tmp_path / "run" / "machine-1").exists()


def counted(team: Any) -> list[int]:
    model = _model()
    before = team.world_size
    team.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    after = team.world_size
    team.barrier()  # nobody leaves before all have looked
    return [before, after]


def test_how_many_workers_there_are_is_known_on_every_host_at_once(two: list[Host]) -> None:
    with Spread(counted, two, 2, servers="lead") as team:
        assert team.values(40) == [[4, 4]] * 4


@pytest.mark.parametrize("servers", ["lead", "all"])
def test_sync_over_hosts_gives_the_numbers_of_one_machine(two: list[Host], servers: str) -> None:
    here = run_team(train, 4, launch=Launch(strategy="sync", servers=servers, timeouts=Timeouts(barrier=20.0)))
    with Spread(train, two, 2, servers=servers) as team:
        assert _close(here[0], team.values(40)[0])


def odd(team: Any) -> list[Any]:
    """What changes gradients between backward and step, uses some parameters only now and then, and changes rates."""
    torch.manual_seed(1)
    model = torch.nn.ModuleDict({"wide": torch.nn.Linear(300, 300), "spare": torch.nn.Linear(300, 300)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer = team.setup(model, optimizer)
    for number in range(6):
        x = torch.randn(4, 300, generator=torch.Generator().manual_seed(10 * number + team.rank))
        y = model["wide"](x)
        if number % 3 == 0:
            y = y + model["spare"](x)
        (y / 2).square().mean().backward()
        (y.detach() * model["wide"](x)).mean().backward()  # a second backward into the same gradient
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(0.5)  # behind autograd's back
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    team.barrier()
    state = optimizer.state_dict()["state"]
    team.barrier()
    team.close()
    return [*_values(model), *(entry["momentum_buffer"].numpy().copy() for entry in state.values())]


@pytest.mark.parametrize("servers", ["lead", "all"])
def test_gradients_changed_after_they_were_sent_count_as_they_are_at_the_step(two: list[Host], servers: str) -> None:
    here = run_team(odd, 2, launch=Launch(strategy="sync", servers=servers, timeouts=Timeouts(barrier=20.0)))
    with Spread(odd, two, 1, servers=servers) as team:
        there = team.values(40)
    assert len(here[0]) == 8
    assert _close(here[0], there[0])
    assert _close(here[0], there[1])


@pytest.mark.parametrize("compress", ["bf16", "topk:0.5"])
def test_compressed_gradients_travel_compressed(two: list[Host], tmp_path: Path, compress: str) -> None:
    launch = Launch(strategy="sync", servers="all", compress=compress, timeouts=Timeouts(barrier=20.0))
    here = run_team(train, 2, launch=launch)
    with Spread(train, two, 1, launch=launch, folder=tmp_path / "run") as team:
        assert _close(here[0], team.values(40)[0])


def checkpointing(team: Any, path: str) -> list[Any]:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = team.setup(model, optimizer, DataLoader(_data(64), batch_size=8 * team.world_size))
    before: list[Any] = []
    for epoch in range(2):
        for x, y in loader:
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        team.barrier()
        if epoch == 0:
            team.save(path)
            team.barrier()
    team.load(path)
    with torch.no_grad():
        before = _values(model)
    state = optimizer.state_dict()["state"]
    team.barrier()
    return [*before, *(entry["exp_avg"].numpy().copy() for entry in state.values())]


@pytest.mark.parametrize("servers", ["lead", "all"])
def test_checkpoints_are_whole_and_go_back_to_every_shard(two: list[Host], tmp_path: Path, servers: str) -> None:
    path = tmp_path / "saved.pt"
    with Spread(checkpointing, two, 2, str(path), servers=servers) as team:
        values = team.values(40)
    saved = torch.load(path, weights_only=True)
    model = _model()
    model.load_state_dict(saved["model"])
    wanted = [*_values(model), *(entry["exp_avg"].numpy() for entry in saved["optimizer"]["state"].values())]
    for value in values:
        assert _close(value, wanted)


def loading(team: Any, path: str) -> list[Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = team.setup(model, optimizer)
    team.save(path)
    team.load(path)  # what each does next must not overtake what it has loaded
    team.barrier()
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


def test_nothing_overtakes_a_checkpoint_on_its_way_to_the_shards(two: list[Host], tmp_path: Path) -> None:
    with Spread(loading, two, 1, str(tmp_path / "saved.pt"), servers="all") as team:
        values = team.values(40)
    assert values[0] == values[1]


def _bytes_sent() -> int:
    """By this host, over whatever it has but loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): numbers.split() for name, numbers in (line.split(":") for line in lines)}
    return sum(int(numbers[8]) for name, numbers in counts.items() if name != "lo")


def _wait_for_sending(before: int, _: torch.Tensor) -> None:
    deadline = time.monotonic() + 20
    while _bytes_sent() < before + 1_000_000:
        assert time.monotonic() < deadline, "nothing was sent while the backward pass went on"
        time.sleep(0.002)


def wide(team: Any) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = team.setup(model, optimizer)
    for number in range(4):
        x = torch.randn(8, 512, generator=torch.Generator().manual_seed(number))
        first = model[0](x)
        if team.rank == 1:
            first.register_hook(partial(_wait_for_sending, _bytes_sent()))  # by then most is made
        model[1:](first).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    team.barrier()


def test_gradients_are_sent_while_the_backward_pass_goes_on(two: list[Host], tmp_path: Path) -> None:
    with Spread(wide, two, 1, folder=tmp_path / "run", servers="lead") as team:
        team.values(40)
        recorded = team.events()
    computed = [event for event in recorded if isinstance(event, Compute) and event.rank == 1]
    sent = [event for event in recorded if isinstance(event, Send) and event.rank == 1]
    assert len(sent) == len(computed) == 4
    assert all(event.bytes >= 6 * 512 * 512 * 4 for event in sent)
    assert all(c.start < s.start < c.start + c.seconds for s, c in zip(sent, computed, strict=True))


def test_a_team_over_machines_without_a_key_is_refused_in_one_sentence(two: list[Host]) -> None:
    with Spread(train, two, 1, key=None) as team:
        results = team.results(20)
    for result in results:
        assert isinstance(result, Failure)
        assert result.kind == "UsageError"
        assert result.message == (
            "this team spans 2 machines and has no key, without which nothing but loopback is used; "
            "print one with `paceline key`, and set it as PACELINE_KEY on every machine"
        )


def test_a_worker_with_another_key_does_not_get_in(two: list[Host]) -> None:
    with Spread(_with_another_key, two, 1, timeouts=Timeouts(join=4.0, barrier=4.0)) as team:
        results = team.results(20)
    assert [type(result) for result in results] == [Failure, Failure]
    assert results[0].kind in ("JoinError", "ServerLost")


def _with_another_key(team: Any) -> None:
    import os

    if team.rank == 1:
        os.environ["PACELINE_KEY"] = "0" * 64
    train(team)


def dying(team: Any, rank: int) -> int:
    import os
    import signal

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = team.setup(model, optimizer, DataLoader(_data(), batch_size=4 * team.world_size))
    steps = 0
    for x, y in loader:
        mse_loss(model(x), y).backward()
        if steps == 1 and team.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if team.rank != rank:
            time.sleep(0.05)  # or there might be nothing left for it
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def test_a_worker_that_dies_elsewhere_is_spared_or_named(two: list[Host], tmp_path: Path) -> None:
    with Spread(dying, two, 2, 3, strategy="async", servers="lead", folder=tmp_path / "run") as team:
        results = team.results(60)
        assert isinstance(results[3], Failure) and results[3].kind == "Death"
        assert [type(result) for rank, result in enumerate(results) if rank != 3] == [int, int, int]
        assert violations(team.events(), "async") == []
    with Spread(dying, two, 2, 3, strategy="sync", servers="lead") as team:
        results = team.results(60)
        for rank in (0, 1, 2):
            assert isinstance(results[rank], Failure) and results[rank].kind == "WorkerLost", results[rank]
            assert "rank 3" in results[rank].message


def test_nothing_from_the_connection_is_unpickled(two: list[Host], tmp_path: Path) -> None:
    with Spread(_audited, two, 1, servers="all") as team:
        assert team.values(40) == [[], []]


def _audited(team: Any) -> list[str]:
    import sys

    heard: list[str] = []

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class" and arguments[0] != "collections":
            heard.append(f"{event} {arguments}")

    before = torch.load
    torch.load = lambda *_, **__: heard.append("torch.load")  # type: ignore[assignment]
    sys.addaudithook(listen)
    train(team)
    torch.load = before
    return heard


@pytest.mark.parametrize("strategy", ["all-reduce", "sync"])
def test_hosts_that_have_addresses_of_ipv6_only(strategy: str) -> None:
    with hosts(2) as made:
        for host in made:
            host.only_ipv6()
        with Spread(train, made, 2, strategy=strategy, servers="all" if strategy == "sync" else None) as team:
            values = team.values(40)
    assert all(_close(values[0], other) for other in values[1:])


def test_servers_are_placed_by_machine() -> None:
    machines = [[0, 1], [2], [3, 4]]
    place = paceline.config.place_servers
    assert place("2", machines) == [0, 0]
    assert place("lead", machines) == [0]
    assert place("all", machines) == [0, 0, 1, 2, 2]
    assert place("each", machines) == [0, 1, 2]
    assert place("2:2,0:1", machines) == [0, 2, 2]
    for wrong in ("1:1", "0:1,3:1"):
        with pytest.raises(paceline.UsageError, match="one server must be on machine 0"):
            place(wrong, machines)
