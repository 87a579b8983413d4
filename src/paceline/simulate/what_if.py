"""What a recorded run would have been with one thing changed: a worker like the others, no stalls, a faster link.

Runs whose workers wait for each other at fixed points (all-reduce, pipelines, process groups of torch.distributed, and
traces of other programs) are replayed with their dependencies. Under a policy of a parameter server, who waits for whom
changes with the times: such a run is simulated, as it was and with the change, on the steps that were recorded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from paceline.config import AllReduce, Mesh, Pipeline, Strategy, parse_strategy
from paceline.errors import UsageError, names
from paceline.events import OBSERVED, Join, Omitted
from paceline.events.reader import read_run
from paceline.policies import Policy
from paceline.simulate.calibrate import calibrate
from paceline.simulate.cluster import SimulatedCluster
from paceline.simulate.long_steps import QUICK, excess
from paceline.simulate.predict import simulate
from paceline.simulate.recorded import RecordedSteps
from paceline.simulate.replay import ELSEWHERE, OWN, GraphBuilder, RunGraph, Times
from paceline.topologies import Link

FORMS = "like=RANK, speed=RANK:FACTOR, no-stalls, link=FACTOR"
_STEPS = 20_000
"""Simulated steps of all workers together."""
_OFF = 1.25
"""Ratio of the simulated to the measured time from which on the simulation does not describe the run."""
_WHOLE = 0.9
"""Share of the operations that must be known of all their ranks."""
_FEW = 3
"""Updates below which nothing is said."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a change would bring."""

    what_if: str
    seconds_per_update: float
    now: float
    """The same as it was in the run."""
    speedup: float
    """Updates per second, as a multiple of the run's."""
    waiting: list[float]
    """Share of each worker's time in which it waited, or exchanged something."""
    waiting_now: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class WhatIf:
    """Changes that are made together."""

    text: str
    like: tuple[int, ...] = ()
    """Workers whose steps are those of the others."""
    speed: tuple[tuple[int, float], ...] = ()
    """Workers that are so many times as fast."""
    no_stalls: bool = False
    link: float = 1.0
    """Factor on the speed of links."""

    @classmethod
    def parse(cls, text: str) -> WhatIf:
        """Of changes separated by commas."""
        found = cls(text)
        for part in (part.strip() for part in text.split(",")):
            if match := re.fullmatch(r"like=(\d+)", part):
                found = dataclasses.replace(found, like=(*found.like, int(match[1])))
            elif match := re.fullmatch(r"speed=(\d+):(\d+(?:\.\d+)?)x?", part):
                found = dataclasses.replace(found, speed=(*found.speed, (int(match[1]), float(match[2]))))
            elif part == "no-stalls":
                found = dataclasses.replace(found, no_stalls=True)
            elif match := re.fullmatch(r"link=(\d+(?:\.\d+)?)x?", part):
                found = dataclasses.replace(found, link=float(match[1]))
            else:
                raise UsageError(f"--what-if is '{text}'; it must be of {FORMS}, several separated by commas")
        if found.link <= 0 or any(factor <= 0 for _, factor in found.speed):
            raise UsageError(f"--what-if is '{text}'; a factor must be above 0")
        return found

    def check(self, ranks: list[int]) -> None:
        """Refuses workers that the run does not have."""
        unknown = sorted({rank for rank in (*self.like, *dict(self.speed)) if rank not in ranks})
        if unknown:
            raise UsageError(f"--what-if is '{self.text}'; the run has {names(ranks)}, and no {names(unknown)}")
        if set(self.like) >= set(ranks):
            raise UsageError(f"--what-if is '{self.text}'; of the run's workers at least one must stay as it is")


def answer(path: Path, changes: list[WhatIf]) -> list[Answer]:
    """What each of the changes would bring to the run of this folder or events file."""
    strategy, replica = _strategy(path)
    if isinstance(strategy, Policy):
        return _simulated(path, strategy, changes)
    builder = GraphBuilder(replica)
    for block in read_run(path):
        if any(isinstance(event, Omitted) for event in block):
            raise UsageError(
                f"the record of {path} is thinned, so what depends on what is not known: --what-if needs a run with "
                "--record-limit off"
            )
        builder.take(block)
    every, whole = builder.operations
    if strategy is None and not every:
        raise UsageError(f"{path} has no operations of several ranks, so none depends on another: --what-if needs them")
    if whole < _WHOLE * every:
        raise UsageError(
            f"{every - whole:,} of {every:,} operations of {path} were not recorded by all their ranks, so that what "
            "depends on what is not known; --what-if needs the traces of all ranks"
        )
    if isinstance(strategy, AllReduce) and any(change.link != 1.0 for change in changes):
        raise UsageError(
            "in this run the exchange is a part of the update, and not recorded by itself; simulate the link instead: "
            "--from RUN --strategy all-reduce --latency … --bandwidth …"
        )
    graph = builder.build()
    if len(graph.workers) < 2 or max(worker.complete for worker in graph.workers.values()) < _FEW:
        raise UsageError(f"{path} has fewer than two workers or fewer than {_FEW} updates: nothing can be replayed")
    return [_replayed(graph, change, split=builder.split) for change in changes]


def _strategy(path: Path) -> tuple[Strategy | None, int]:
    """The run's strategy, and the workers of a replica; None for a script without a team."""
    text = next((event.strategy for block in read_run(path) for event in block if isinstance(event, Join)), "")
    if text == OBSERVED:
        return None, 1
    strategy = parse_strategy(text or "all-reduce")
    match strategy:
        case Mesh(tensor=1) if isinstance(parse_strategy(strategy.sync), AllReduce):
            return strategy, strategy.pipeline
        case Pipeline():
            return strategy, sum(strategy.by_stage)
        case AllReduce() | Policy():
            return strategy, 1
    raise UsageError(
        f"--what-if cannot replay a run of '{text}', whose exchanges inside a step are not recorded one by one; it can "
        "replay all-reduce, pipelines, meshes of those, the policies of a server, and scripts of torch.distributed"
    )


# -- replayed --------------------------------------------------------------------------------------------------------


def _replayed(graph: RunGraph, change: WhatIf, *, split: bool) -> Answer:
    change.check(sorted(graph.workers))
    parts = OWN if not split else tuple(part for part in OWN if part != ELSEWHERE)
    before, seconds = graph.unchanged(), graph.unchanged()
    if change.no_stalls:
        _shorten(graph, seconds, parts)
    for rank in change.like:
        _liken(graph, seconds, rank, [other for other in graph.workers if other not in change.like], parts)
    for rank, factor in change.speed:
        seconds[rank][np.isin(graph.workers[rank].parts, parts)] /= factor
    was, new = graph.replay(before), graph.replay(seconds, 1.0 / change.link)
    now, then = graph.seconds_per_update(was), graph.seconds_per_update(new)
    return Answer(
        what_if=change.text,
        seconds_per_update=then,
        now=now,
        speedup=now / then,
        waiting=list(graph.waiting(new, seconds).values()),
        waiting_now=list(graph.waiting(was, before).values()),
    )


def _scale(graph: RunGraph, seconds: dict[int, Times], rank: int, part: int, wanted: Times, own: Times) -> None:
    """Gives a part of each step the seconds that are wanted; a step that has nothing of it stays so."""
    worker = graph.workers[rank]
    ratio = np.append(np.divide(wanted, own, out=np.ones_like(own), where=own > 0), 1.0)
    chosen = worker.parts == part
    seconds[rank][chosen] *= ratio[np.minimum(worker.steps[chosen], len(own))]


def _liken(graph: RunGraph, seconds: dict[int, Times], rank: int, others: list[int], parts: tuple[int, ...]) -> None:
    """Gives each step of a worker the lengths of another one's, in turns, so that it varies as theirs do."""
    worker = graph.workers[rank]
    for part in parts:
        own = worker.by_step(part)
        theirs = [graph.workers[other].by_step(part, seconds[other]) for other in others]
        wanted = own.copy()
        for step in range(len(own)):
            values = theirs[step % len(theirs)]
            if step < len(values):
                wanted[step] = values[step]
        _scale(graph, seconds, rank, part, wanted, own)


def _shorten(graph: RunGraph, seconds: dict[int, Times], parts: tuple[int, ...]) -> None:
    """Gives the parts of long steps the lengths that they have in quick ones."""
    for rank, worker in graph.workers.items():
        by_part = {part: worker.by_step(part) for part in parts}
        long = excess(np.sum(list(by_part.values()), axis=0)) > 0 if worker.complete else np.zeros(0, bool)
        for part, own in by_part.items():
            if long.any():
                wanted = np.where(long, np.minimum(own, np.quantile(own, QUICK)), own)
                _scale(graph, seconds, rank, part, wanted, own)


# -- simulated -------------------------------------------------------------------------------------------------------


def _simulated(path: Path, strategy: Policy, changes: list[WhatIf]) -> list[Answer]:
    base = calibrate(path)
    now = base.seconds_per_update
    told = _run(strategy, base.cluster)
    if not 1 / _OFF < told[0] / now < _OFF:
        raise UsageError(
            f"the run took {now:.4g} s per update, and simulated as it was it takes {told[0]:.4g} s: the simulation "
            "does not describe it, and says nothing about changes"
        )
    found = []
    for change in changes:
        change.check(list(range(base.cluster.workers)))
        cluster = calibrate(path, _changed(change)).cluster
        cluster = dataclasses.replace(
            cluster,
            link=_faster(cluster.link, change.link),
            links=tuple((rank, _faster(link, change.link)) for rank, link in cluster.links),
        )
        then = _run(strategy, cluster)
        speedup = told[0] / then[0]
        found.append(
            Answer(
                what_if=change.text,
                seconds_per_update=now / speedup,
                now=now,
                speedup=speedup,
                waiting=then[1],
                waiting_now=told[1],
            )
        )
    return found


def _run(strategy: Policy, cluster: SimulatedCluster) -> tuple[float, list[float]]:
    """Seconds per update, and the share of each worker's time in which it waited or exchanged something."""
    told, _ = simulate(strategy, cluster, updates=max(200, _STEPS // cluster.workers))
    shares = zip(told.waiting, told.communicating, strict=True)
    return told.seconds_per_update, [waits + exchanges for waits, exchanges in shares]


def _changed(change: WhatIf) -> Callable[[Mapping[int, RecordedSteps]], None]:
    def apply(workers: Mapping[int, RecordedSteps]) -> None:
        if change.no_stalls:
            for steps in workers.values():
                if steps.lengths:
                    lengths = np.array(steps.lengths)
                    steps.lengths = (lengths - excess(lengths.copy())).tolist()
        kept = [steps for rank, steps in workers.items() if rank not in change.like]
        for rank in change.like:
            workers[rank].lengths = [length for steps in kept for length in steps.lengths]
            workers[rank].left = [length for steps in kept for length in steps.left]
        for rank, factor in change.speed:
            workers[rank].lengths = [length / factor for length in workers[rank].lengths]
            workers[rank].left = [length / factor for length in workers[rank].left]

    return apply


def _faster(link: Link, factor: float) -> Link:
    return Link(link.latency / factor, link.bandwidth * factor)
