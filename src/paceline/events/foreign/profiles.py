"""The trace of one rank by torch's profiler (Kineto)."""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.events import Collective, Event, Load, Peers, Update
from paceline.events.spans import Span, computing, union

_UPDATE = re.compile(r"Optimizer\.step#")
_LOAD = re.compile(r"enumerate\(DataLoader\)#")
_BACKWARD = re.compile(r"autograd::engine::evaluate_function")
_OPERATION = re.compile(r"(?:gloo|nccl|mpi|ucc|xccl|hccl|paceline):(\w+)")
_KERNEL = re.compile(r"nccl(?:Dev)?Kernel_?(\w*)", re.IGNORECASE)
_SINGLE = ("send", "recv")
_LATE, _SHARE = 5e-4, 0.1
"""Seconds, and the share of an operation, by which its end may be recorded too late."""


class Profile:
    """One rank's trace: its steps end with `optimizer.step()`, its operations are those of process groups."""

    def __init__(self, trace: dict[str, Any], place: int, path: Path) -> None:
        """place: the rank of a trace that does not name one."""
        self._path = path
        known = trace.get("distributedInfo") or {}
        self.rank = int(known.get("rank", place))
        self._groups = {str(one.get("pg_name")): one.get("ranks") for one in known.get("pg_config") or []}
        base = float(trace.get("baseTimeNanoseconds") or 0) / 1e9
        self._slices: list[tuple[str, str, Any, float, float, dict[str, Any]]] = []
        for one in trace["traceEvents"]:
            if isinstance(one, dict) and one.get("ph") == "X" and isinstance(one.get("ts"), int | float):
                start = base + float(one["ts"]) / 1e6
                end = start + float(one.get("dur") or 0.0) / 1e6
                words = (str(one.get("cat") or ""), str(one.get("name") or ""), one.get("tid"))
                self._slices.append((*words, start, end, one.get("args") or {}))

    def events(self) -> Iterator[Event]:
        """The rank's loads, computing, operations and updates."""
        updates = union(self._named(_UPDATE))
        if not updates:
            raise UsageError(
                f"{self._path} has no 'Optimizer.step' of torch's profiler; if it is a trace of another program, "
                "--mapping FILE says what is what"
            )
        loads = union(self._named(_LOAD))
        backward = union(self._named(_BACKWARD))
        operations = list(self._operations())
        yield from operations
        out = [
            (one.start + one.seconds - one.blocked, one.start + one.seconds)
            for one in operations
            if isinstance(one, Collective)
        ]
        for start, end in loads:
            yield Load(self.rank, start, end - start)
        begun = min(one[3] for one in self._slices if one[0] in ("cpu_op", "user_annotation", "kernel"))
        for version, (start, end) in enumerate(updates):
            inside = [span for span in loads if begun <= span[0] < start]
            begin = inside[0][1] if inside else begun
            # The backward pass lasts from its first operation to its last, with what lies between them.
            turned = [span for span in backward if begin <= span[0] < start]
            passes = [(turned[0][0], turned[-1][1])] if turned else []
            waits = [span for span in [*out, *inside[1:]] if begin <= span[1] and span[0] < start]
            yield from computing(self.rank, (begin, start), waits, passes, version=version, minibatches=1)
            blocked = sum(max(0.0, min(end, b) - max(start, a)) for a, b in out)
            yield Update(self.rank, start, max(0.0, end - start - blocked), version + 1)
            begun = end

    def _named(self, pattern: re.Pattern[str]) -> list[Span]:
        return [(start, end) for _, name, _, start, end, _ in self._slices if pattern.match(name)]

    def _operations(self) -> Iterator[Event]:
        """Operations, of the GPU's kernels if it has any: those run when the rank has come to them."""
        kernels = [one for one in self._slices if one[0] == "kernel" and _KERNEL.match(one[1])]
        found = kernels or [one for one in self._slices if _OPERATION.match(one[1]) and one[0] != "gpu_user_annotation"]
        busy = self._busy(on_gpu=bool(kernels))
        starts = [start for start, _ in busy]
        numbers: Counter[str] = Counter()
        for _, name, _, start, end, more in sorted(found, key=lambda one: one[3]):
            match = (_KERNEL if kernels else _OPERATION).match(name)
            operation = str(more.get("Collective name") or (match[1] if match else name))
            group = str(more.get("Process Group Name") or next(iter(self._groups), "world"))
            if operation in _SINGLE:
                continue  # the peer is not in the trace
            if not numbers[group] and self._groups.get(group):
                yield Peers(self.rank, start, group, [int(rank) for rank in self._groups[group]])
            number = numbers[group]
            numbers[group] += 1
            size = int(more.get("In msg nelems") or 0) * 4
            since, finish = self._idle(start, end, busy, starts)
            yield Collective(self.rank, start, finish - start, operation, group, number, size, finish - since)

    @staticmethod
    def _idle(start: float, end: float, busy: list[Span], starts: list[float]) -> Span:
        """The last time in an operation in which the rank did nothing else.

        What waits for an operation may go on shortly before its end is recorded.
        """
        place = bisect.bisect_left(starts, end - max(_LATE, _SHARE * (end - start))) - 1
        since = max(start, busy[place][1]) if place >= 0 else start
        finish = min(end, starts[place + 1]) if place + 1 < len(starts) and starts[place + 1] > since else end
        return min(since, finish), finish

    def _busy(self, *, on_gpu: bool) -> list[Span]:
        """When this rank computes: kernels of a GPU, or operators of the thread that updates, or of autograd's."""
        if on_gpu:
            return union(
                (a, b) for cat, name, _, a, b, _ in self._slices if cat == "kernel" and not _KERNEL.match(name)
            )
        threads = {tid for _, name, tid, _, _, _ in self._slices if _UPDATE.match(name) or _BACKWARD.match(name)}
        spans = [
            (a, b)
            for cat, name, tid, a, b, _ in self._slices
            if tid in threads and (cat == "cpu_op" or _LOAD.match(name) or _UPDATE.match(name))
        ]
        return union(spans)
