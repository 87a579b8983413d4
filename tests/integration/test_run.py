"""`paceline run`: one script under any launcher, what it sees, what one sees of it, and the folder that it leaves."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pty
import re
import signal
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.forks import played, playing, starting
from helpers.load import above_noise
from helpers.support import PACELINE, PREAMBLE, PYTHON, TORCHRUN, Outcome, finished, free_port, write_script

TRAIN = (
    PREAMBLE
    + """
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

team = paceline.join()
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
note(f"seen-{team.rank}", arguments=sys.argv[1:], **{name: os.environ.get(name) for name in names})
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.randn(97, 6)
data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader, global_batch=16)
for epoch in range(2):
    for x, y in loader:
        with team.step():
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        team.report(loss=loss, epoch=epoch)
final = [value.hex() for parameter in model.parameters() for value in parameter.detach().double().flatten().tolist()]
note(f"final-{team.rank}", parameters=final, loss=float(loss.detach()))
print(f"said by {team.rank}")
print(f"warned by {team.rank}", file=sys.stderr)
"""
)
"""97 samples in rounds of 16: the last round of an epoch is a single sample, of which rank 1 gets nothing."""

UPDATES, MINIBATCHES, SAMPLES = 14, 26, 194


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs of one name in one folder: the lead's output only, then everybody's."""

    first: Outcome
    second: Outcome
    cwd: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    cwd = tmp_path_factory.mktemp("pair")
    script = write_script(cwd, TRAIN)
    command = [script, "--workers", "2", "--name", "trial"]
    first = finished([PACELINE, "run", *command, "--", "--depth", "3", "a b"], cwd)
    second = played([*command, "--all-output", "--seed", "5"], cwd)
    assert first.code == 0, first.err
    assert second.code == 0, second.err
    return Pair(first, second, cwd)


def final(outcome: Outcome, rank: int = 0) -> list[float]:
    return [float.fromhex(value) for value in outcome.run.note(f"final-{rank}")["parameters"]]


# -- one script, any launcher ----------------------------------------------------------------------------------------


def test_a_script_trains_the_same_under_either_launcher_and_alone(pair: Pair, tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAIN)
    torchrun = finished([TORCHRUN, "--nproc_per_node", "2", "--master_port", free_port(), script], tmp_path)
    with starting([PYTHON, script], tmp_path) as run:
        alone = run.finish()
    assert torchrun.code == 0, torchrun.err
    assert alone.code == 0, alone.err
    assert final(pair.first) == final(pair.first, 1) == final(torchrun) == final(torchrun, 1)
    assert final(alone) == pytest.approx(final(torchrun), rel=1e-4, abs=1e-6)


def test_the_same_run_twice_gives_the_same_bits(pair: Pair) -> None:
    assert final(pair.first) == final(pair.second)


def test_workers_find_the_places_that_torchrun_would_give_them(pair: Pair) -> None:
    ports = set()
    for rank in (0, 1):
        seen = pair.first.run.note(f"seen-{rank}")
        assert seen["RANK"] == seen["LOCAL_RANK"] == str(rank)
        assert seen["WORLD_SIZE"] == seen["LOCAL_WORLD_SIZE"] == "2"
        assert seen["MASTER_ADDR"] == "127.0.0.1"
        ports.add(int(seen["MASTER_PORT"]))
    assert len(ports) == 1
    assert 1024 <= ports.pop() < 65536


def test_arguments_after_the_dashes_are_the_scripts(pair: Pair) -> None:
    for rank in (0, 1):
        assert pair.first.run.note(f"seen-{rank}")["arguments"] == ["--depth", "3", "a b"]
        assert pair.second.run.note(f"seen-{rank}")["arguments"] == []


GLOO = (
    PREAMBLE
    + """
import torch, paceline
import torch.distributed as dist

def talk():
    dist.init_process_group("gloo")
    value = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(value)
    return value.item()

order = sys.argv[1]
if order == "before":
    total = talk()
team = paceline.join()
if order == "after":
    total = talk()
team.barrier()
note(f"talked-{team.rank}", total=total, torch=dist.get_rank())
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_script_may_use_torch_distributed_itself(order: str, tmp_path: Path) -> None:
    outcome = played([write_script(tmp_path, GLOO), "--", order], tmp_path)
    assert outcome.code == 0, outcome.err
    for rank in (0, 1):
        talked = outcome.run.note(f"talked-{rank}")
        assert talked["total"] == 11.0
        assert talked["torch"] == rank


def test_workers_started_by_hand_may_use_torch_distributed_too(tmp_path: Path) -> None:
    script = write_script(tmp_path, GLOO)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        starting([PYTHON, script, "after"], tmp_path, RANK="0", **place) as zero,
        starting([PYTHON, script, "after"], tmp_path, RANK="1", **place) as one,
    ):
        for rank, run in enumerate((zero, one)):
            outcome = run.finish(60)
            assert outcome.code == 0, outcome.err
            assert run.note(f"talked-{rank}")["total"] == 11.0


# -- what one sees of it ---------------------------------------------------------------------------------------------


def test_only_the_lead_is_shown_and_on_its_own_streams(pair: Pair) -> None:
    assert pair.first.out.splitlines() == ["[0] said by 0"]
    relayed = [line for line in pair.first.err.splitlines() if not line.startswith("paceline: ")]
    assert relayed == ["[0] warned by 0"]


def test_all_are_shown_when_asked_for(pair: Pair) -> None:
    assert sorted(pair.second.out.splitlines()) == ["[0] said by 0", "[1] said by 1"]
    relayed = [line for line in pair.second.err.splitlines() if not line.startswith("paceline: ")]
    assert sorted(relayed) == ["[0] warned by 0", "[1] warned by 1"]


def test_what_is_not_shown_is_in_the_folder(pair: Pair) -> None:
    for folder in ("trial~1", "trial"):
        for rank in (0, 1):
            log = pair.cwd / "runs" / folder / "output" / f"{rank}.log"
            assert sorted(log.read_text().splitlines()) == [f"said by {rank}", f"warned by {rank}"]


def test_a_run_ends_with_its_numbers_on_one_line(pair: Pair) -> None:
    last = pair.first.err.splitlines()[-1]
    assert last.startswith(f"paceline: done: {UPDATES} updates, ")
    assert last.endswith("see runs/trial/summary.json, or: paceline report runs/trial")


def test_json_is_all_that_stdout_has(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAIN)
    outcome = played([script, "--name", "trial", "--all-output", "--json"], tmp_path)
    told = json.loads(outcome.out)
    assert outcome.code == told.pop("code") == 0, outcome.err
    assert told.pop("folder") == "runs/trial"
    assert told == outcome.run.summary("trial")
    # What the script prints is still to be seen, elsewhere, and there is nothing of ours beside it.
    said = [f"[{rank}] {what} by {rank}" for what in ("said", "warned") for rank in (0, 1)]
    assert sorted(outcome.err.splitlines()) == sorted(said)


def test_json_tells_of_a_run_that_failed_as_well(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import paceline\npaceline.join()\nraise ValueError('not today')\n")
    outcome = played([script, "--json"], tmp_path)
    told = json.loads(outcome.out)
    assert (outcome.code, told["code"], told["updates"]) == (1, 1, 0)
    assert (tmp_path / told["folder"] / "summary.json").is_file()
    assert "not today" in outcome.err


# -- the folder ------------------------------------------------------------------------------------------------------


def test_the_folder_says_what_the_run_was(pair: Pair) -> None:
    first = json.loads((pair.cwd / "runs" / "trial~1" / "config.json").read_bytes())
    second = json.loads((pair.cwd / "runs" / "trial" / "config.json").read_bytes())
    assert first["arguments"] == ["--depth", "3", "a b"]
    assert (first["workers"], first["strategy"], first["seed"]) == (2, "all-reduce", 0)
    assert second["seed"] == 5
    assert Path(first["script"]).name == "train.py"
    # Nothing but what is meant to stay.
    for folder in ("trial", "trial~1"):
        left = {path.name for path in (pair.cwd / "runs" / folder).iterdir()}
        assert left == {"config.json", "events.jsonl", "summary.json", "output"}


def test_an_earlier_run_of_the_same_name_is_kept(pair: Pair) -> None:
    assert {path.name for path in (pair.cwd / "runs").iterdir()} == {"trial", "trial~1"}
    assert "paceline: the earlier runs/trial is now runs/trial~1" in pair.second.err.splitlines()


def test_events_are_in_the_order_of_their_start(pair: Pair) -> None:
    from paceline.events import decode

    lines = (pair.cwd / "runs" / "trial" / "events.jsonl").read_bytes().splitlines()
    events = [decode(line) for line in lines]
    starts = [event.start for event in events]
    assert starts == sorted(starts)
    kinds = Counter((type(event).__name__, event.rank) for event in events)
    for rank, minibatches in ((0, UPDATES), (1, MINIBATCHES - UPDATES)):
        assert kinds["Join", rank] == kinds["Leave", rank] == 1
        assert kinds["Update", rank] == UPDATES
        assert kinds["Compute", rank] == minibatches
        assert kinds["Metric", rank] == minibatches


def test_the_summary_has_the_promised_keys_and_true_numbers(pair: Pair) -> None:
    summary = pair.first.run.summary("trial~1")
    assert list(summary) == [
        "strategy",
        "world_size",
        "seconds",
        "updates",
        "minibatches",
        "cancelled",
        "dropped",
        "seconds_per_update",
        "samples_per_second",
        "staleness",
        "last",
        "pushed_bytes",
        "saved_bytes",
        "refused",
        "omitted",
        "bubble",
        "communication",
        "workers",
    ]
    assert (summary["strategy"], summary["world_size"]) == ("all-reduce", 2)
    assert (summary["updates"], summary["minibatches"]) == (UPDATES, MINIBATCHES)
    assert (summary["cancelled"], summary["dropped"]) == (0, 0)
    assert (summary["pushed_bytes"], summary["saved_bytes"]) == (0, 0)
    assert summary["staleness"] == {"mean": 0.0, "max": 0, "histogram": {"0": MINIBATCHES}}
    assert list(summary["workers"]) == ["0", "1"]
    keys = ["computing", "loading", "communicating", "waiting", "minibatches", "samples"]
    for worker in summary["workers"].values():
        assert list(worker) == keys
        busy = worker["computing"] + worker["communicating"] + worker["waiting"]
        assert 0 < busy < summary["seconds"]
    assert [worker["minibatches"] for worker in summary["workers"].values()] == [14, 12]
    assert [worker["samples"] for worker in summary["workers"].values()] == [98, 96]
    assert 0 < summary["seconds_per_update"] * (UPDATES - 1) < summary["seconds"]
    # All but the first round lie between the first update and the last.
    expected = (SAMPLES - 16) / (summary["seconds_per_update"] * (UPDATES - 1))
    assert summary["samples_per_second"] == pytest.approx(expected)


def test_the_summary_adds_up_what_the_events_say(pair: Pair) -> None:
    summary = pair.first.run.summary("trial~1")
    events = pair.first.run.events("trial~1")
    for rank, worker in summary["workers"].items():
        own = [event for event in events if event["rank"] == int(rank)]
        for key, kinds in (
            ("computing", {"compute"}),
            ("loading", {"load"}),
            ("waiting", {"wait"}),
            ("communicating", {"update", "reduce"}),
        ):
            assert worker[key] == pytest.approx(sum(e["seconds"] for e in own if e["event"] in kinds))


def test_the_last_reported_values_of_the_lead_are_in_the_summary(pair: Pair) -> None:
    last = pair.first.run.summary("trial~1")["last"]
    assert last == {"loss": pair.first.run.note("final-0")["loss"], "epoch": 1.0}


# -- slowness on purpose, and the progress line ----------------------------------------------------------------------

PACED = """
import sys, time
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

updates, nap = int(sys.argv[1]), float(sys.argv[2])
team = paceline.join()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(8 * updates, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4 * team.world_size)
model, optimizer, loader = team.setup(model, optimizer, loader)
for x, y in loader:
    loss = mse_loss(model(x), y)
    loss.backward()
    time.sleep(nap)
    optimizer.step()
    optimizer.zero_grad()
    team.report(loss=loss)
"""


@pytest.fixture(scope="module")
def on_a_terminal(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], tuple[Outcome, str]]:
    return functools.cache(lambda factor: run_on_a_terminal(tmp_path_factory.mktemp("terminal"), factor))


def run_on_a_terminal(cwd: Path, factor: float) -> tuple[Outcome, str]:
    """A run of some three seconds with rank 1 slowed threefold, and what its terminal got."""
    script = write_script(cwd, PACED)
    ours, theirs = pty.openpty()
    command = [script, "--name", "slow", "--slow", "1:3", "--", "60", str(0.015 * factor)]
    with playing(command, cwd, stderr=theirs, TERM="xterm-256color", COLUMNS="160", LINES="40") as run:
        os.close(theirs)
        seen = b""
        while piece := read_terminal(ours):
            seen += piece
        outcome = run.finish()
    os.close(ours)
    assert outcome.code == 0, seen.decode()
    return outcome, seen.decode()


def read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # how Linux says that nobody has the other end any more
        return b""


def test_a_factor_slows_computing_by_that_much(on_a_terminal: Callable[[float], tuple[Outcome, str]]) -> None:
    def check(factor: float) -> None:
        workers = on_a_terminal(factor)[0].run.summary("slow")["workers"]
        computing = [workers[rank]["computing"] / workers[rank]["minibatches"] for rank in ("0", "1")]
        assert computing[0] >= 0.015 * factor
        assert 2.2 < computing[1] / computing[0] < 4.5
        # Who is not slow waits for who is.
        assert workers["0"]["waiting"] > workers["0"]["computing"]
        assert workers["1"]["waiting"] < workers["1"]["computing"] / 4

    above_noise(check, (1.0, 6.0))


def test_a_terminal_shows_how_far_the_run_is(on_a_terminal: Callable[[float], tuple[Outcome, str]]) -> None:
    def check(factor: float) -> None:
        said = on_a_terminal(factor)[1]
        lines = re.findall(r"update (\d+) · loss ([\d.e+-]+) · ([\d,]+) samples/s", said)
        updates = [int(update) for update, _, _ in lines]
        assert len(set(updates)) >= 3, said
        assert updates == sorted(updates)
        assert 0 < updates[0] < updates[-1] <= 60
        # Eight samples every 45 ms are 178 a second; machines under load do less.
        rates = [factor * int(rate.replace(",", "")) for _, _, rate in lines]
        assert 40 < statistics.median(rates) <= 250

    above_noise(check, (1.0, 6.0))


def test_drawn_slowness_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    script = write_script(tmp_path, PACED)

    def check(factor: float) -> None:
        lengths: list[dict[int, list[float]]] = []
        for name in (f"one-{factor:g}", f"two-{factor:g}"):
            command = [script, "--name", name, "--slow", f"all:exp({0.06 * factor})", "--seed", "3"]
            outcome = played([*command, "--", "24", "0"], tmp_path)
            assert outcome.code == 0, outcome.err
            steps = [event for event in outcome.run.events(name) if event["event"] == "compute"]
            for step in steps:
                assert 0 <= step["slowed"] <= step["seconds"]
            assert sum(step["slowed"] > 0 for step in steps) > 0.8 * len(steps)
            lengths.append({rank: [s["seconds"] / factor for s in steps if s["rank"] == rank] for rank in (0, 1)})
        one, two = lengths
        for rank in (0, 1):
            assert len(one[rank]) == len(two[rank]) == 24
            assert median_gap(one[rank], two[rank]) < 0.012
            assert 0.03 < statistics.mean(one[rank][1:]) < 0.12
        # Ranks draw each for itself.
        assert median_gap(one[0], one[1]) > 0.024

    above_noise(check, (1.0, 6.0))


def median_gap(some: list[float], others: list[float]) -> float:
    return statistics.median(abs(a - b) for a, b in zip(some, others, strict=True))


# -- how it ends -----------------------------------------------------------------------------------------------------

ENDINGS = (
    PREAMBLE
    + """
note(f"started-{os.environ['RANK']}")
if sys.argv[1] == "exit":
    sys.exit(3)
if sys.argv[1] == "raise" and os.environ["RANK"] == "1":
    raise LookupError("planted")
if sys.argv[1] == "sleep":
    time.sleep(60)
"""
)


@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("exit", 1), ("raise", 1)])
def test_the_exit_code_says_how_the_script_ended(ending: str, code: int, tmp_path: Path) -> None:
    outcome = played([write_script(tmp_path, ENDINGS), "--", ending], tmp_path)
    assert outcome.code == code
    assert outcome.run.noted("started-0")
    assert outcome.run.noted("started-1")
    assert ("rank 1 failed: LookupError: planted" in outcome.err) == (ending == "raise")
    assert ("ended with exit code 3" in outcome.err) == (ending == "exit")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_run_can_be_stopped_before_its_workers_have_joined(number: signal.Signals, tmp_path: Path) -> None:
    script = write_script(tmp_path, ENDINGS)
    with playing([script, "--name", "cut", "--", "sleep"], tmp_path) as run:
        for rank in (0, 1):
            run.note(f"started-{rank}")
        run.process.send_signal(number)
        outcome = run.finish(30)
        assert outcome.code == 128 + number
        assert f"paceline: stopped by {number.name}; all workers have ended" in outcome.err
        assert outcome.tracebacks == 0
        assert run.processes() == []
        assert run.summary("cut")["updates"] == 0


# -- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_collectives_can_be_measured(tmp_path: Path, operation: str) -> None:
    page = tmp_path / "curves.html"
    asked = ["--sizes", "1K,300K", "--operation", operation, "--rounds", "1", "--seconds", "0.01", "--plot", str(page)]
    with starting([PACELINE, "bench", "collectives", "--workers", "2", *asked, "--json"], tmp_path) as run:
        outcome = run.finish()
    assert outcome.code == 0, outcome.err
    assert outcome.err.startswith(f"paceline: measuring {operation}, 2 workers\n"), "where stderr is no terminal, too"
    facts = json.loads(outcome.out)
    assert [point["bytes"] for point in facts["points"]] == [1024, 307200]
    for point in facts["points"]:
        seen = point["contestants"]
        assert set(seen) == {"torch", "in place", "collectives", "gloo"}
        for name, values in seen.items():
            assert values["seconds"] > 0
            assert ("ratio" in values) == (name != "gloo")
    assert "Plotly.newPlot" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--workers", "1"], "--workers is 1; it must be at least 2"),
        (["--sizes", "much"], "--sizes is 'much'"),
        (["--against", "nccl"], "--against is 'nccl'"),
        (["--topology", "star"], "--topology is 'star'"),
        (["--operation", "guess"], "--operation is 'guess'"),
        (["--against", "mpi", "--operation", "broadcast"], "--against mpi measures all_reduce"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(tmp_path: Path, asked: list[str], said: str) -> None:
    with starting([PACELINE, "bench", "collectives", *asked], tmp_path) as run:
        outcome = run.finish()
    assert outcome.code == 2
    assert said in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
