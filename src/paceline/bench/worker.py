"""The script of a worker of `paceline bench train`: contestants in turns; the lead writes the times."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import msgspec

import paceline
from paceline.bench.contestants import CONTESTANTS, Contestant, end_process_group
from paceline.bench.tasks import TrainTask, TrainTimes
from paceline.bench.workloads import WORKLOADS
from paceline.cluster.process import keep_freed_memory, return_freed_memory


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=TrainTask)
    team = paceline.join()
    work = WORKLOADS[task.model]
    contestants = {}
    counts = {}
    for name in task.contestants:
        contestants[name] = CONTESTANTS[name](work, task, team)
        # All must make the same number of steps: that of the lead.
        once = _time(team, contestants[name], 5)
        counts[name] = max(5, int(task.seconds / team.per_replica(once)[0]))
    seconds: TrainTimes = {name: [] for name in task.contestants}
    gc.collect()
    gc.disable()
    for number in range(task.rounds):
        for name in task.contestants:
            seconds[name].append(_time(team, contestants[name], counts[name]))
        if team.is_lead:
            print(f"round {number + 1} of {task.rounds}", file=sys.stderr, flush=True)
    if team.is_lead:
        Path(task.output).write_bytes(msgspec.json.encode(seconds))
    contestants.clear()
    end_process_group()


def _time(team: paceline.Team, contestant: Contestant, count: int) -> float:
    """Seconds per step, over so many steps."""
    if contestant.keeps_memory:
        keep_freed_memory()
    else:
        return_freed_memory()
    idle = contestant.lead_only and not team.is_lead
    for _ in range(0 if idle else 3):
        contestant.step()
    team.barrier()
    start = time.perf_counter()
    for _ in range(0 if idle else count):
        contestant.step()
    team.barrier()
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    main()
