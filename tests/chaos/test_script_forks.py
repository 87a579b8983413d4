"""A process that a script forks is no member of the team, and cannot end or disturb it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.forks import played
from helpers.support import PREAMBLE, write_script

SCRIPT = (
    PREAMBLE
    + """
import multiprocessing
import torch, paceline
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

how = sys.argv[1]
worker = os.getpid()

forked = False

def fork(n):
    global forked
    if n < 5 or forked or how == "not":
        return
    forked = True  # the first of these steps may be cancelled before
    if how == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=team.report, kwargs={"loss": 0.0})
        child.start()
        child.join()
        return
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    note(f"forked-{team.rank}")
    if how == "exit":
        sys.exit(0)
    if how == "raise":
        raise ValueError("in the fork")
    if how == "_exit":
        os._exit(0)
    try:
        {"step": optimizer.step, "close": team.close, "barrier": team.barrier, "save": lambda: team.save("x.pt")}[how]()
    except paceline.UsageError as error:
        note(f"refused-{team.rank}", message=str(error))
    sys.exit(0)

team = paceline.join()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(160, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader = team.setup(model, optimizer, loader, global_batch=8)
seen = 0
with team:
    for n, (x, y) in enumerate(loader):
        with team.step():
            mse_loss(model(x), y).backward()
            fork(n)
            optimizer.step()
            optimizer.zero_grad()
        seen += len(x)
    team.barrier()
    final = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
assert os.getpid() == worker
note(f"done-{team.rank}", seen=seen, final=final)
"""
)
WAYS = ["exit", "raise", "_exit", "multiprocessing", "step", "close", "barrier", "save"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "options",
    ["all-reduce", "async", "k-sync:k=1", "async --servers lead", "pipeline:stages=2,microbatches=2"],
)
def test_a_fork_of_a_worker_does_not_disturb_the_team(options: str, how: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    outcome = played([script, "--strategy", *options.split(), "--name", "z", "--timeout", "20", "--", how], tmp_path)
    assert outcome.code == 0, outcome.err
    done = [outcome.run.note(f"done-{rank}") for rank in (0, 1)]
    forked = [outcome.run.noted(f"forked-{rank}") for rank in (0, 1)]
    assert any(forked) or how == "multiprocessing"
    assert "failed" not in outcome.err
    if how in ("step", "barrier", "save"):
        for rank in (0, 1):
            if forked[rank]:
                assert "fork of a worker" in outcome.run.note(f"refused-{rank}")["message"]
    summary = outcome.run.summary("z")
    assert summary["last"] == {}, "the fork's report is not the run's"
    if options == "all-reduce":
        plain = played([script, "--strategy", options, "--", "not"], tmp_path)
        assert plain.run.note("done-0")["final"] == done[0]["final"] == done[1]["final"]
        assert summary["updates"] == 20
    elif "pipeline" not in options:
        assert sum(one["seen"] for one in done) >= 160
