"""With `--restarts`, a team that cannot go on without a lost process goes on from its newest snapshot by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.forks import played

SCRIPT = """
import os, pathlib, signal, sys
import torch, paceline

victims, at = [int(one) for one in sys.argv[1].split(",")], int(sys.argv[2])
torch.manual_seed(0)
team = paceline.join()
table, last = torch.nn.Embedding(48, 1), torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(table.weight)
torch.nn.init.ones_(last.weight)
model = torch.nn.Sequential(table, torch.nn.Flatten(), last)
optimizer = torch.optim.SGD([{"params": table.parameters(), "lr": 1.0}, {"params": last.parameters(), "lr": 0.0}])
loader = torch.utils.data.DataLoader(range(48), 4, shuffle=True)
model, optimizer, loader = team.setup(model, optimizer, loader)
struck = pathlib.Path(f"struck-{team.rank}")
snapshots = pathlib.Path("runs/first/snapshots")
for epoch in range(3):
    for index in loader:
        with team.step():
            model(index).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if writer := team._training.snapshots._writer:
            writer.join()  # so that every second version has a snapshot
        if team.rank in victims and not struck.exists():
            if any(int(path.stem) >= at for path in snapshots.glob("[0-9]*.pt")):
                struck.touch()
                os.kill(os.getpid(), signal.SIGKILL)
team.barrier()
team.close()
print("counts", sorted({-int(row) for row in table.weight.detach().flatten()}))
"""


@pytest.mark.parametrize(
    ("words", "victims"),
    [
        (("--strategy", "async", "--servers", "lead", "--workers", "3"), "0"),
        (("--strategy", "all-reduce"), "0,1"),
        (("--strategy", "pipeline:stages=2,microbatches=2"), "1"),
        (("--strategy", "mesh:data=2,tensor=1"), "0"),
    ],
)
def test_a_team_that_cannot_go_on_goes_on_from_its_newest_snapshot(
    tmp_path: Path, words: tuple[str, ...], victims: str
) -> None:
    script = tmp_path / "count.py"
    script.write_text(SCRIPT)
    ranks = victims.split(",")
    command = [script.name, *words, "--name", "first", "--snapshot", "0s", "--restarts", str(len(ranks))]
    outcome = played([*command, "--", victims, "14"], tmp_path)
    assert outcome.code == 0, outcome.err
    assert all((tmp_path / f"struck-{rank}").exists() for rank in ranks)
    assert outcome.err.count("the team is started again and goes on from snapshot") >= 1
    assert "counts [3]" in outcome.out
    assert outcome.tracebacks == 0
    assert outcome.run.processes() == []


def test_a_team_without_a_snapshot_is_not_started_again(tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(SCRIPT.replace("if any(", "if True or any("))
    command = [script.name, "--strategy", "pipeline:stages=2,microbatches=2", "--restarts", "1", "--snapshot", "1h"]
    outcome = played([*command, "--", "1", "0"], tmp_path)
    assert outcome.code == 1
    assert (tmp_path / "struck-1").exists() and not list((tmp_path / "runs").glob("*/snapshots/*"))
    assert outcome.err.count("the team is not started again, as it has no snapshot yet") == 1
    assert "rank 1 was killed by signal 9 (SIGKILL)" in outcome.err
