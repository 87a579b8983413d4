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

from helpers.team_pool import TeamPool

import zoo.data
import zoo.generative
import zoo.gradients
import zoo.language
import zoo.loops
import zoo.losses
import zoo.vision  # noqa: F401
from zoo.cells import EXACT, INEXACT, STRATEGIES, Cell, plain, run_cell
from zoo.scripts import SCRIPTS

SERVER = "sync async k-sync k-batch-async ssp"
STALE = "async k-sync k-batch-async ssp"

REFUSED = {
    "batch norm synchronised": SERVER,
    "contrastive": "pipeline",
    "lstm": "tensor",
    "padded lm": "tensor",
    "adafactor": "tensor",
    "embedding bag": "tensor",
    "sparse embeddings": "tensor",
    "packed tagger": "pipeline",
    "ctc": "pipeline tensor",
    "gan": "pipeline tensor",
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
    "reinforce": "pipeline",
    "skipped batches": "all-reduce sync mesh",
    "hard examples": "pipeline",
    "root of mean": "pipeline",
    "dice": "pipeline",
    "decided by mean loss": STALE,
    "distributed sampler": "all-reduce pipeline tensor mesh " + SERVER,
    "zipped loaders": "pipeline",
    "loader with itself": SERVER,
    "evaluated by lead": "pipeline tensor",
    "alternating with one left": "all-reduce sync mesh",
    "actor critic": "tensor",
    "label propagation": "pipeline",
    "hard examples by index": "pipeline",
    "ranking": "pipeline",
    "gradients by hand": "pipeline",
    "losses of samples": "pipeline",
    "updates by hand": "all-reduce pipeline tensor mesh " + SERVER,
    "clipped samples": "pipeline tensor",
    "normalised weights": "tensor",
}
"""Columns that refuse a script, in one sentence."""

OWN_GRADIENT = "between `backward` and `step`, `.grad` is a worker's own, which the team says once"
WEIGHT = "the loss is neither a mean nor a sum over samples; the team says once how it weights it"
LAST_BATCH = "a worker that has no part of the last batch does not come to the step that its gradients wait for"

COUPLED = ("contrastive", "hard examples", "hard examples by index", "ranking")
"""Scripts whose losses compare samples with each other, or select among them: of no other may that be said."""

KNOWN: dict[tuple[str, str], tuple[str, str]] = {
    ("batch norm", "all-reduce sync mesh"): ("said", "statistics are of a worker's part; use sync_batch_norm=True"),
    ("contrastive", "all-reduce sync mesh"): ("said", "a worker has no samples of others to compare its own with"),
    ("gan of one module", "all-reduce sync mesh"): ("said", "the second optimizer's gradients are a worker's own"),
    ("accumulation with one left", "sync"): ("refused", LAST_BATCH),
    # `sum / 4` is taken for `sum / len(x)` where a worker has 4 samples.
    ("sum over constant", "all-reduce sync mesh"): ("said", "the number is taken for that of the samples"),
    ("plateau on training loss", "all-reduce sync mesh"): ("said", "a worker knows its part's loss; use `team.mean`"),
    ("sam", "tensor"): ("said", OWN_GRADIENT),
    ("gradient norms", "tensor"): ("said", OWN_GRADIENT),
    ("noisy gradients", "tensor"): ("said", OWN_GRADIENT),
    ("clamped by hook", "all-reduce sync mesh"): ("said", "a hook is given a worker's own gradient"),
    ("clamped by hook", "pipeline"): ("said", "a hook is given the gradient of a microbatch"),
    ("mixed weights", "all-reduce sync mesh"): ("said", WEIGHT),
    ("root of mean", "all-reduce sync mesh"): ("said", WEIGHT),
    ("dice", "all-reduce sync mesh"): ("said", WEIGHT),
    ("hard examples", "all-reduce sync mesh"): ("said", "a worker chooses among the losses of its part"),
    ("decided by loss", "all-reduce sync mesh"): ("said", "a worker decides by the loss of its part"),
    ("factor by loss", "all-reduce sync mesh"): ("said", "a worker decides by the loss of its part"),
    ("mean in buffer", "all-reduce sync mesh"): ("said", "a worker's buffers are of its parts of the batches"),
    ("weights of batch", "all-reduce sync mesh"): ("said", "a worker knows the labels of its part"),
    ("mean times length", "all-reduce sync mesh"): ("said", "the number may be a constant; `weight='sum'` is exact"),
    ("hard examples by index", "all-reduce sync mesh"): ("said", "a worker chooses among the losses of its part"),
    ("ranking", "all-reduce sync mesh"): ("said", "a worker has no samples of others to compare its own with"),
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


_POOL = TeamPool()


def run_row(script: str, columns: list[str]) -> dict[str, Cell]:
    """A script's cells, run in processes that are kept for other rows."""
    result = plain(SCRIPTS[script])
    return {column: run_cell(SCRIPTS[script], column, result, pool=_POOL) for column in columns}


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
