"""Torch's compiler is imported when somebody compiles, and not before."""

import multiprocessing
import subprocess
import sys
import traceback
from typing import Any

TRAINING = """
import sys
import torch
from paceline.cluster.compiler import import_compiler_late

import_compiler_late()
import_compiler_late()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
model(torch.ones(1, 3)).sum().backward()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert all(parameter.grad is None for parameter in model.parameters())
assert "torch._dynamo" not in sys.modules, "imported without need"
"""

COMPILING = """
plain = {name: getattr(torch.optim.Optimizer, name).__wrapped__ for name in ("zero_grad", "state_dict")}
ours = {name: getattr(function, "__dynamo_disable") for name, function in plain.items()}

@torch.compile(backend="eager")
def step(x):
    optimizer.zero_grad()
    return x * 2

assert step(torch.ones(2)).tolist() == [2, 2]
optimizer.state_dict()
for name, function in plain.items():
    assert getattr(function, "__dynamo_disable") is not ours[name], "the compiler was not told to leave it alone"
"""


def run(source: str) -> None:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_optimizer_needs_no_compiler_until_somebody_compiles() -> None:
    run(TRAINING + COMPILING)


def run_here(source: str, end: Any) -> None:
    """In a fork, which has what its parent has imported."""
    try:
        exec(source, {})
        end.send("")
    except BaseException:
        end.send(traceback.format_exc())


def test_who_has_it_already_notices_nothing() -> None:
    import torch._dynamo  # noqa: F401

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    source = TRAINING.replace("not in sys.modules", "in sys.modules")
    child = context.Process(target=run_here, args=(source, theirs), daemon=True)
    child.start()
    assert ours.recv() == ""
    child.join()
