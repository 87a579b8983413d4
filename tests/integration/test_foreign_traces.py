"""Traces of other programs become reports: torch's profiler on gloo, Chrome's format with a mapping, and tables."""

from __future__ import annotations

import csv
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forks import done
from helpers.groups import Pool
from helpers.load import above_noise
from helpers.support import PACELINE
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import UsageError
from paceline.events import Compute, Update, Wait
from paceline.events.foreign.traces import ForeignRun, is_foreign, read_foreign, write_foreign
from paceline.report.source import open_run

STEPS = 10
SLEPT = 0.12

_moments: list[float] = []


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        _moments.append(time.perf_counter())
        return gradients[0], None


class _Model(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.first, self.second, self.seconds = nn.Linear(16, 16), nn.Linear(16, 1), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(_Slow.apply(self.first(x), self.seconds))  # type: ignore[no-untyped-call]
        return result


def profiled(rank: int, folder: str, factor: float) -> list[float]:
    """DDP on gloo under torch's profiler, with rank 1 slow in its backward pass; when each rank had its gradients."""
    _moments.clear()
    model = DistributedDataParallel(_Model(SLEPT * factor if rank == 1 else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for (x,) in DataLoader(TensorDataset(torch.ones(2 * STEPS, 16)), batch_size=2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.pt.trace.json")
    return _moments


def make_traces(folder: Path, factor: float) -> float:
    """Writes traces of two ranks to a folder; returns by how many seconds rank 1 was later in all."""
    folder.mkdir()
    with Pool(2, "gloo") as pool:
        first, second = pool.run(profiled, str(folder), factor)
    assert len(first) == len(second) == STEPS
    return sum(max(0.0, late - early) for early, late in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of traces of two ranks."""
    folder = tmp_path_factory.mktemp("profiles") / "traces"
    make_traces(folder, 1.0)
    return folder


def _facts(run: ForeignRun, folder: Path) -> dict[str, Any]:
    return open_run(write_foreign(run, folder)).facts()


def test_a_profile_of_gloo_names_the_slow_rank(tmp_path: Path) -> None:
    def check(factor: float) -> None:
        late = make_traces(tmp_path / f"{factor:g}", factor)
        run = read_foreign([tmp_path / f"{factor:g}"])
        facts = _facts(run, tmp_path / f"run-{factor:g}")
        assert run.notes == []
        assert facts["updates"] == STEPS and len(facts["workers"]) == 2
        assert facts["verdict"][0].startswith("Worker 1 is slow") and "its backward pass" in facts["verdict"][0]
        assert facts["workers"][1]["blame"] == pytest.approx(late, rel=0.1)
        assert facts["advice"]

    above_noise(check, (1.0, 3.0, 9.0))


def test_clocks_that_differ_are_set_by_common_operations(traces: Path, tmp_path: Path) -> None:
    for path in traces.glob("*.json"):
        trace = json.loads(path.read_text())
        if "rank1" in path.name:
            trace["baseTimeNanoseconds"] += 700_000_000
        (tmp_path / path.name).write_text(json.dumps(trace))
    run = read_foreign(sorted(tmp_path.glob("*.json")))
    (note,) = run.notes
    assert note.startswith("the clocks of the ranks differ; they were set by common operations, by up to 70")
    blames = [
        _facts(one, tmp_path / name)["workers"][1]["blame"]
        for name, one in (("set", run), ("right", read_foreign([traces])))
    ]
    assert blames[0] == pytest.approx(blames[1], rel=0.1) and blames[1] > 0.3


def test_report_and_simulate_take_traces(traces: Path) -> None:
    folder = traces
    files = [path.name for path in sorted(folder.glob("*.json"))]
    told = done([PACELINE, "report", *files], folder)
    assert (told.code, told.out, told.err) == (0, "report: report.html\n", "")
    told = done([PACELINE, "report", ".", "--json", "--name", "mine"], folder)
    assert json.loads(told.out)["name"] == "mine", told.err
    words = [word for name in files for word in ("--from", name)]
    told = done([PACELINE, "simulate", *words, "-s", "all-reduce", "-s", "k-sync:k=1", "--json"], folder)
    together, alone = json.loads(told.out)
    assert together["seconds_per_update"] > SLEPT
    assert together["seconds_per_update"] > alone["seconds_per_update"]
    assert together["learned"]["workers"] == 2
    told = done([PACELINE, "simulate", *words, "--what-if", "like=1", "--what-if", "link=2", "--json"], folder)
    like, link = json.loads(told.out)
    assert like["now"] - like["seconds_per_update"] > 0.8 * SLEPT > like["seconds_per_update"]
    assert link["now"] >= link["seconds_per_update"] > 0.9 * SLEPT


def table(path: Path, late: float, extra: str = "") -> Path:
    """Ten steps of three ranks, of which rank 2 needs longer for its forward pass."""
    rows = []
    for step in range(10):
        for rank in range(3):
            begin = step * 2.0
            forward = 0.2 + (late if rank == 2 else 0.0)
            rows.append((rank, step, "load", begin, begin + 0.1))
            rows.append((rank, step, "forward", begin + 0.1, begin + 0.1 + forward))
            rows.append((rank, step, "backward", begin + 0.1 + forward, begin + 0.3 + forward))
            rows.append((rank, step, "all_reduce", begin + 0.3 + forward, begin + 1.2 + late - 0.2))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["rank", "step", "kind", "start", "end"])
        writer.writerows(rows)
        file.write(extra)
    return path


def test_a_table_has_the_blame_that_its_numbers_say(tmp_path: Path) -> None:
    run = read_foreign([table(tmp_path / "steps.csv", 0.7)])
    facts = _facts(run, tmp_path / "run")
    # In each of ten steps both others wait 0.7 s for rank 2.
    assert facts["workers"][2]["blame"] == pytest.approx(10 * 2 * 0.7)
    assert facts["workers"][2]["causes"]["forward"] == pytest.approx(10 * 2 * 0.7)
    assert facts["verdict"][0].startswith("Worker 2 is slow")
    assert facts["updates"] == 10 and [worker["minibatches"] for worker in facts["workers"]] == [10, 10, 10]
    assert facts["workers"][0]["seconds"]["loading"] == pytest.approx(1.0)


def test_a_table_in_parquet_is_read_as_the_same_in_csv(tmp_path: Path) -> None:
    source = table(tmp_path / "steps.csv", 0.7)
    arrow, parquet = import_module("pyarrow.csv"), import_module("pyarrow.parquet")
    parquet.write_table(arrow.read_csv(source), tmp_path / "steps.parquet")
    assert read_foreign([tmp_path / "steps.parquet"]).events == read_foreign([source]).events != []
    told = done([PACELINE, "report", "steps.parquet", "--json"], tmp_path)
    assert json.loads(told.out)["slow"] == [2], told.err
    (tmp_path / "half.parquet").write_bytes((tmp_path / "steps.parquet").read_bytes()[:500])
    with pytest.raises(UsageError, match=r"half\.parquet cannot be read"):
        read_foreign([tmp_path / "half.parquet"])


def test_rows_that_cannot_be_read_are_counted_and_left_out(tmp_path: Path) -> None:
    extra = "0,1,dancing,1.0,2.0\n0,1,forward,x,2.0\n0,1,forward,3.0,2.0\n"
    whole = read_foreign([table(tmp_path / "whole.csv", 0.5)])
    run = read_foreign([table(tmp_path / "steps.csv", 0.5, extra)])
    (note,) = run.notes
    assert note.startswith("3 rows of ") and "could not be read" in note
    assert run.events == whole.events


def test_a_trace_of_any_program_is_read_by_a_mapping(tmp_path: Path) -> None:
    slices = []
    for step in range(9):
        for rank, late in ((0, 0.0), (1, 300_000.0)):
            begin = step * 1e6
            for name, start, end in (
                ("my_fwd", begin, begin + 100_000),
                ("my_bwd", begin + 100_000, begin + 200_000 + late),
                ("ring exchange", begin + 200_000 + late, begin + 600_000),
                ("sgd", begin + 600_000, begin + 650_000),
                ("of no interest", begin, begin + 900_000),
            ):
                slices.append({"ph": "X", "name": name, "pid": 40 + rank, "tid": 1, "ts": start, "dur": end - start})
    (tmp_path / "trace.json").write_text(json.dumps(slices))
    kinds = {"forward": "fwd$", "backward": "bwd$", "communicating": "exchange", "updating": "^sgd"}
    mapping = tmp_path / "mapping"
    mapping.write_text(json.dumps({"rank": "pid", "kinds": kinds}))
    run = read_foreign([tmp_path / "trace.json"], mapping)
    facts = _facts(run, tmp_path / "run")
    assert facts["workers"][1]["causes"]["backward"] == pytest.approx(9 * 0.3)
    assert sum(isinstance(event, Update) for event in run.events) == 18
    assert sum(isinstance(event, Compute) and event.minibatches > 0 for event in run.events) == 18
    assert all(event.on == 1 for event in run.events if isinstance(event, Wait))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "is no trace: it is not JSON"),
        ("a.json", '{"traceEvents": 3}', "has no list of traceEvents"),
        ("a.json", '{"traceEvents": []}', "has no 'Optimizer.step' of torch's profiler"),
        ("a.csv", "rank,step,kind,start\n", "has no column end; a table has the columns rank, step, kind, start, end"),
        ("a.csv", "rank,step,kind,start,end\n", "has no steps that could be read"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert is_foreign(path)
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        read_foreign([path])


def test_two_traces_of_one_rank_are_refused(traces: Path) -> None:
    first = min(traces.glob("*.json"))
    with pytest.raises(UsageError, match="are both of rank 0; give one per rank"):
        read_foreign([first, first])


def test_a_folder_of_a_run_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not is_foreign(tmp_path)
    assert not is_foreign(tmp_path / "nothing.csv")


def test_parquet_without_pyarrow_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "table.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"needs pyarrow: pip install 'paceline\[parquet\]', or give a CSV"):
        read_foreign([path])
