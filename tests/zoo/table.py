"""What is expected of every script under every strategy; `make compatibility` writes docs/compatibility.md from it.

A cell that is in none of the tables below must be equal to the plain script where the strategy is exact, and must come
to an end with finite numbers where it is not.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import zoo.generative
import zoo.language
import zoo.loops
import zoo.vision  # noqa: F401
from zoo.cells import EXACT, INEXACT, STRATEGIES, Cell, plain, run_cell
from zoo.scripts import SCRIPTS

SERVER = "sync async k-sync k-batch-async ssp"
STALE = "async k-sync k-batch-async ssp"

REFUSED = {
    "batch norm synchronised": SERVER,
    "contrastive": "pipeline",
    "lstm without loader": "tensor",
    "lstm": "tensor",
    "nanogpt": "tensor",
    "padded lm": "tensor",
    "adafactor": "tensor",
    "embedding bag": "tensor",
    "sparse embeddings": "tensor",
    "packed tagger": "pipeline",
    "ctc": "pipeline tensor",
    "gan": "all-reduce pipeline tensor mesh " + SERVER,
    "gan of one module": "tensor",
    "wgan clamp": "pipeline tensor " + STALE,
    "gradient penalty": "pipeline",
    "diffusion": "tensor",
    "grad scaler": "pipeline",
    "unscaled and clipped": "pipeline",
    "decay by hand": "tensor " + STALE,
    "added group": SERVER,
    "second optimizer": "tensor",
    "step by hand": "tensor",
    "penalty in loss": "pipeline",
    "init after setup": "tensor " + STALE,
    "averaged model": "pipeline tensor",
    "lbfgs": "pipeline tensor " + SERVER,
    "muon": "tensor",
    "own optimizer": "tensor",
    "autograd function": "pipeline",
    "multi task": "tensor",
    "mixed weights": "tensor",
    "reinforce": "pipeline tensor",
    "gcn": "tensor",
    "dqn": "tensor",
    "skipped batches": "all-reduce sync mesh",
    "hard examples": "pipeline",
    "root of mean": "pipeline",
    "dice": "pipeline",
}
"""Columns that refuse a script, in one sentence."""

OWN_GRADIENT = "between `backward` and `step`, `.grad` is a worker's own, which the team says once"
WEIGHT = "the loss is neither a mean nor a sum over samples; the team says once how it weights it"
LAST_BATCH = "a worker that has no part of the last batch does not come to the step that its gradients wait for"

KNOWN: dict[tuple[str, str], tuple[str, str]] = {
    ("batch norm", "all-reduce sync mesh"): ("said", "statistics are of a worker's part; use sync_batch_norm=True"),
    # A worker compares its samples with those of its part only, and nothing is said.
    ("contrastive", "all-reduce sync mesh"): ("wrong", "a worker has no samples of others to compare its own with"),
    ("gan of one module", "all-reduce sync mesh"): ("said", "the second optimizer's gradients are a worker's own"),
    # This is a Mismatch about `.grad`, of which the script is not to blame.
    ("accumulation with one left", "sync"): ("refused", LAST_BATCH),
    # `sum / 4` is taken for `sum / len(x)` where a worker has 4 samples.
    ("sum over constant", "all-reduce sync mesh"): ("said", "the number is taken for that of the samples"),
    # `model.parameters()` of stages on other workers are those of the beginning; nothing is said.
    ("diffusion", "pipeline"): (
        "wrong",
        "parameters of other stages are old unless `state_dict()` reads them",
    ),
    # torch's own RuntimeError: "trying to differentiate twice a function that was marked with @once_differentiable".
    ("gradient penalty", "tensor"): ("crashed", "gradients of gradients do not pass through split layers"),
    ("plateau on training loss", "all-reduce mesh"): ("said", "a worker knows its part's loss; use `team.mean`"),
    # The server says it, in a process of its own.
    ("plateau on training loss", "sync"): ("wrong", "a worker knows its part's loss; use `team.mean`"),
    ("sam", "tensor"): ("said", OWN_GRADIENT),
    ("gradient norms", "tensor"): ("said", OWN_GRADIENT),
    ("noisy gradients", "tensor"): ("said", OWN_GRADIENT),
    ("mixed weights", "all-reduce sync mesh"): ("said", WEIGHT),
    ("root of mean", "all-reduce sync mesh"): ("said", WEIGHT),
    ("dice", "all-reduce sync mesh"): ("said", WEIGHT),
    # The largest losses of each part are not those of the batch, and nothing is said.
    ("hard examples", "all-reduce sync mesh"): ("wrong", "a worker chooses among the losses of its part"),
    # Each worker decides by its own loss, and nothing is said.
    ("decided by loss", "all-reduce sync mesh"): ("wrong", "a worker decides by the loss of its part"),
}
"""Cells that are not as promised: what happens, and why."""


def expected(script: str, column: str) -> str:
    """The kind of a script's cell."""
    for (name, columns), (kind, _) in KNOWN.items():
        if name == script and column in columns.split():
            return kind
    if column in REFUSED.get(script, "").split():
        return "refused"
    return "equal" if column in EXACT and SCRIPTS[script].within < math.inf else "runs"


def columns_in_ci(script: str) -> list[str]:
    """All exact strategies, and half of the others: a policy sees every second script."""
    number = list(SCRIPTS).index(script)
    return [*EXACT, *(column for place, column in enumerate(INEXACT) if place % 2 == number % 2)]


def run_row(script: str, columns: list[str]) -> dict[str, Cell]:
    """A script's cells."""
    result = plain(SCRIPTS[script])
    return {column: run_cell(SCRIPTS[script], column, result) for column in columns}


MARKS = {
    "equal": "=",
    "runs": "runs",
    "refused": "refused",
    "said": "differs",
    "wrong": "**differs**",
    "crashed": "**fails**",
}


def page() -> str:
    """docs/compatibility.md."""
    rows = {name: run_row(name, list(STRATEGIES)) for name in SCRIPTS}
    counts = {kind: sum(cell.kind == kind for row in rows.values() for cell in row.values()) for kind in MARKS}
    lines = [
        "# Scripts and strategies",
        "",
        f"{len(rows)} scripts of the kinds that people write, each as it is in one process, with the README's lines",
        "added, on two workers under every strategy, and compared with the plain script. `make compatibility` writes",
        "this page, and the tests hold what it says.",
        "",
        f"- `=`: parameters, and the numbers that the script prints, are the plain script's: {counts['equal']} cells,",
        "  to 1e-9 in float64 and 1e-5 in float32.",
        "- `runs`: a policy whose updates are not those of one process, or a model that draws numbers; the script ends",
        f"  with finite ones: {counts['runs']}.",
        f"- `refused`: an error in [one sentence](#refusals): {counts['refused']}.",
        f"- `differs`: other numbers than the plain script's, [and the team says so](#differences): {counts['said']}.",
        f"- **differs**, **fails**: [not as promised](#differences): {counts['wrong'] + counts['crashed']}.",
        "",
        "| script | " + " | ".join(STRATEGIES) + " |",
        "|---" * (len(STRATEGIES) + 1) + "|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | " + " | ".join(MARKS.get(row[column].kind, row[column].kind) for column in row) + " |"
        )
    lines += ["", "The strategies: " + ", ".join(f"`{strategy}`" for strategy in STRATEGIES.values()) + ".", ""]
    lines += ["## The scripts", ""]
    lines += [f"- **{name}**: {script.what}." for name, script in SCRIPTS.items()]
    lines += ["", "## Refusals", ""]
    sentences: dict[str, dict[str, list[str]]] = {}
    for name, row in rows.items():
        for column, cell in row.items():
            if cell.kind == "refused":
                general = cell.text.replace(f"'{STRATEGIES[column]}'", "this strategy")
                sentences.setdefault(general, {}).setdefault(name, []).append(column)
    for sentence, whom in sentences.items():
        named = "; ".join(f"{name} ({', '.join(columns)})" for name, columns in whom.items())
        lines.append(f"- {named}: `{sentence}`")
    lines += ["", "## Differences", ""]
    for (name, columns), (kind, why) in KNOWN.items():
        lines.append(f"- {name} ({', '.join(columns.split())}): {'fails; ' * (kind == 'crashed')}{why}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
