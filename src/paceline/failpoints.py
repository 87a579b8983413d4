"""Named points at which tests let a process be killed or stopped, wait, or fail.

A point is one line, `failpoints.hit("update.chunk")`, in the path that it is about. It does nothing unless the
environment says otherwise when the process enters the run:

    PACELINE_FAULTS=server0/update.chunk:3:kill,worker1/request.sent:2:delay=0.5

Each fault is `[PROCESS/]POINT:NTH:ACTION`. PROCESS is `workerRANK`, `serverINDEX` or `relayMACHINE`, any process if
it is left out. NTH is which time that this process reaches the point, from 1. The actions:

- `kill`: SIGKILL.
- `stop`: SIGSTOP, until somebody sends SIGCONT.
- `delay=SECONDS`: sleeps.
- `raise`: raises `InjectedFault`.

`PACELINE_FAULTS=seed=17` is one fault that the seed draws. `PACELINE_FAULTS_FIRED` names a folder that gets a file for
every fault as it happens, with the time, the process id and the process's name: a test reads from it that its fault
has happened. With the folder, a fault happens once in a run, and so not again in a process that is started again.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError

VARIABLE = "PACELINE_FAULTS"
FIRED = "PACELINE_FAULTS_FIRED"

POINTS = {
    "push.made": "worker: its gradient is in shared memory, and the server does not know it",
    "request.sent": "worker: a push or another request is sent, and its answer has not come",
    "pull.begin": "worker: the answer to a push has come, and its parameters are still the version before",
    "pull.done": "worker: its parameters are the version of the answer",
    "push.received": "coordinator: a push has come, and nothing was done with it",
    "push.held": "coordinator: a push is held, and the policy does not know it",
    "collect.chunk": "server: before a chunk of a gradient is added to the collected sum",
    "update.begin": "coordinator: the gradients of an update are taken, and its buffer is chosen",
    "update.chunk": "server, or worker under all-reduce: before a chunk of the next version is written",
    "chunk.written": "server: a chunk of the next version or of the collected sum is written, and not noted as such",
    "update.written": "coordinator: all shards have written the next version, which is not published",
    "update.published": "coordinator: a version is published, and no worker knows",
    "answer.begin": "coordinator: before the answer to a worker's request is sent",
    "answer.sent": "coordinator: the answer is sent",
    "snapshot.marked": "coordinator: a version is marked for a snapshot, and no worker knows",
    "snapshot.copy": "owner of a shard: before a chunk of a version and its state are copied for a snapshot",
    "snapshot.write": "lead: a snapshot is complete in memory, and not written",
    "recover.begin": "server: started again after it was killed, and has not read the record",
    "recover.entry": "server: before it does again one thing that the killed one has done",
    "recover.done": "server: it has done all of that again, and answers nobody yet",
    "relay.taken": "relay of the coordinator's machine: another machine's message has come, and is not passed on",
    "relay.request": "relay: a request of a worker has come, and nothing was done with it",
    "relay.answer": "relay: an answer to a worker of its machine has come, and is not passed on",
    "relay.chunk": "relay: before a chunk of a gradient or of a version is sent",
    "relay.stored": "relay: a chunk of another machine is stored, and not confirmed",
    "relay.confirmed": "relay: all machines have a worker's gradient, and the coordinator is not told",
    "reduce.agreed": "all-reduce: all workers have entered an update, and this one has done nothing for it",
    "reduce.written": "all-reduce: this worker has written its shards of the next version, which is not published",
    "reduce.published": "all-reduce: the version is published",
    "join.begin": "worker: before it connects to a run that has begun",
    "join.sent": "worker: it has asked to join a run that has begun, and has no answer",
    "join.admitted": "coordinator: a worker that joins is counted, and does not know",
    "join.done": "worker: it has the run's memory and version",
    "join.counted": "all-reduce: the others will wait for a worker that joins, and it does not know",
    "join.told": "all-reduce: a worker that joins has the state of the team, and the others do not know of it",
    "join.member": "all-reduce: a worker that joins is a member, and has done nothing",
}
"""What has happened at each point, and what has not."""

_FORM = re.compile(
    r"(?:(?P<process>[a-z]+\d+)/)?(?P<point>[a-z.]+):(?P<nth>[1-9]\d*):(?P<action>kill|stop|raise|delay=\d+(?:\.\d+)?)"
)


class InjectedFault(RuntimeError):
    """Raised at a point by the action `raise`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, which happens the nth time that a process reaches a point."""

    point: str
    nth: int
    action: str
    """kill, stop, raise, or delay."""
    seconds: float = 0.0
    """Of a delay."""
    process: str = ""
    """The name of the process; empty for any."""

    def __str__(self) -> str:
        action = f"delay={self.seconds:g}" if self.action == "delay" else self.action
        return f"{self.process}/{self.point}:{self.nth}:{action}".removeprefix("/")


_names: list[str] = []
"""Names of this process: a worker that runs a server in a thread has two."""
_faults: dict[str, list[Fault]] = {}
"""The faults of this process that have not happened, by point."""
_reached: dict[str, int] = {}
"""How often this process has reached each point that has a fault."""


def hit(point: str) -> None:
    """Lets the faults of this point happen."""
    if _faults:
        _reach(point)


def parse_faults(text: str) -> list[Fault]:
    """Faults as the environment variable gives them."""
    if text.startswith("seed="):
        return [draw_fault(random.Random(text.removeprefix("seed=")), sorted(POINTS))]
    faults = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _FORM.fullmatch(part)
        if found is None or found["point"] not in POINTS:
            raise UsageError(
                f"{VARIABLE}: '{part}' is no fault; it must be [PROCESS/]POINT:NTH:ACTION with the action kill, stop, "
                f"raise or delay=SECONDS, and a point out of {', '.join(POINTS)}"
            )
        action, _, seconds = found["action"].partition("=")
        faults.append(Fault(found["point"], int(found["nth"]), action, float(seconds or 0), found["process"] or ""))
    return faults


def draw_fault(
    source: random.Random,
    points: list[str],
    actions: tuple[str, ...] = ("kill", "stop", "delay"),
    processes: tuple[str, ...] = ("",),
    latest: int = 20,
) -> Fault:
    """A fault at one of these points in one of these processes, the `latest`th time at the latest."""
    point, action = source.choice(points), source.choice(actions)
    seconds = round(source.uniform(0.05, 0.5), 2) if action == "delay" else 0.0
    return Fault(point, source.randint(1, latest), action, seconds, source.choice(processes))


def enter(process: str) -> None:
    """Called once as a process enters the run under this name: takes its faults from the environment."""
    arm(process, os.environ.get(VARIABLE, ""))


def arm(process: str, text: str) -> None:
    """Adds the faults of this text that concern this process."""
    if process not in _names:
        _names.append(process)
    for fault in parse_faults(text):
        known = _faults.setdefault(fault.point, []) if fault.process in ("", process) else [fault]
        if fault not in known:
            known.append(fault)


def disarm() -> None:
    """Forgets all faults and names of this process."""
    _names.clear()
    _faults.clear()
    _reached.clear()


os.register_at_fork(after_in_child=disarm)  # a fork has its own name, or is no part of the run


def _reach(point: str) -> None:
    if point not in _faults:
        return
    _reached[point] = count = _reached.get(point, 0) + 1
    for fault in [fault for fault in _faults[point] if fault.nth == count]:
        _faults[point].remove(fault)
        if not _faults[point]:
            del _faults[point]
        if _is_first(fault):
            _strike(fault)


def _is_first(fault: Fault) -> bool:
    """True if this fault has not happened in the run before; leaves word of it."""
    folder = os.environ.get(FIRED)
    if folder is None:
        return True
    place = Path(folder) / str(fault).replace("/", "@")
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{time.monotonic()} {os.getpid()} {' '.join(_names)}\n")
    return True


def _strike(fault: Fault) -> None:
    if fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action == "raise":
        raise InjectedFault(f"fault at {fault.point}")
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
