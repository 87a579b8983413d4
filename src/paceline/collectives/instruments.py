"""Lets torch's profiler and an observer see the operations of a process group."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from paceline.cluster.compiler import keep_out_of_graphs
from paceline.collectives import profiling
from paceline.collectives.work import DONE, PacelineWork
from paceline.observation import observer
from paceline.observation.operations import Operation, size_of

NAMES = {
    "allreduce": ("allreduce_", "all_reduce"),
    "allreduce_coalesced": ("allreduce_coalesced_", "all_reduce_coalesced"),
    "reduce": ("reduce_", "reduce"),
    "reduce_scatter": ("reduce_scatter_", "reduce_scatter"),
    "reduce_scatter_single": ("_reduce_scatter_base_", "_reduce_scatter_base"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor_coalesced"),
    "_reduce_scatter_base": ("_reduce_scatter_base_", "_reduce_scatter_base"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor_coalesced"),
    "broadcast": ("broadcast_", "broadcast"),
    "allgather": ("allgather_", "all_gather"),
    "allgather_coalesced": ("allgather_coalesced_", "all_gather_coalesced"),
    "all_gather_single": ("_allgather_base_", "_all_gather_base"),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced_", "all_gather_into_tensor_coalesced"),
    "_allgather_base": ("_allgather_base_", "_all_gather_base"),
    "allgather_into_tensor_coalesced": ("allgather_into_tensor_coalesced_", "all_gather_into_tensor_coalesced"),
    "gather": ("gather_", "gather"),
    "scatter": ("scatter_", "scatter"),
    "alltoall": ("alltoall_", "all_to_all"),
    "all_to_all_single": ("alltoall_base_", "all_to_all"),
    "alltoall_base": ("alltoall_base_", "all_to_all"),
    "barrier": ("barrier", "barrier"),
    "send": ("send", "send"),
    "recv": ("recv_", "recv"),
    "recv_anysource": ("recv_any_source_", "recvAnySource"),
}
"""Of each method: the name of its operator in c10d, and the one that other backends show in profiles."""

_IN_PLACE = ("allreduce", "allreduce_coalesced", "reduce", "broadcast", "send", "recv", "recv_anysource", "barrier")
"""Methods that read the tensors of their first argument; the others read those of the second."""

Class = TypeVar("Class", bound=type)
_thread = threading.local()


def observed_operation() -> Operation | None:
    """The observed operation that this thread is calling."""
    operation: Operation | None = getattr(_thread, "operation", None)
    return operation


def instrumented(group: Class) -> Class:
    """A class of process groups whose operations are shown to a profiler and to the observer, if there is one."""
    for name in NAMES:
        setattr(group, name, _instrumented(name, getattr(group, name)))
    return group


def _instrumented(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    read = 0 if name in _IN_PLACE else 1

    @keep_out_of_graphs
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        watching, profiled = observer.current(), profiling.active()
        if (watching is None and not profiled) or getattr(_thread, "inside", False):
            return method(self, *arguments, **options)
        _thread.inside = True
        try:
            given = [*arguments, *options.values()][read : read + 1]
            with profiling.recorded(*NAMES[name], _tensors(given)) if profiled else contextlib.nullcontext():
                if watching is None:
                    return method(self, *arguments, **options)
                _thread.operation = _begin(self, watching, name, arguments, options)
                work = method(self, *arguments, **options)
                return _watched(work, _thread.operation)
        finally:
            _thread.inside, _thread.operation = False, None

    return call


def _tensors(given: Any) -> list[torch.Tensor]:
    """All tensors in nested lists."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for one in given for tensor in _tensors(one)] if isinstance(given, list | tuple) else []


def _begin(
    group: Any, watching: observer.Observer, name: str, arguments: Sequence[Any], options: dict[str, Any]
) -> Operation | None:
    """The operation that begins; None for a message from anybody, whose channel is not known yet."""
    channel, ranks = _channel(group)
    if name in ("send", "recv"):
        given = options.get("dstRank", options.get("srcRank", options.get("peer", 0)))
        peer = arguments[1] if len(arguments) > 1 else given
        tag = options.get("tag", arguments[2] if len(arguments) > 2 else 0)
        if not 0 <= peer < len(ranks):
            return None
        pair = (group.rank(), peer) if name == "send" else (peer, group.rank())
        channel, ranks = f"{channel}/{pair[0]}>{pair[1]}/{tag}", [ranks[place] for place in pair]
    elif name == "recv_anysource":
        return None
    return watching.operations.begin(NAMES[name][1], channel, ranks, size_of(arguments))


def _channel(group: Any) -> tuple[str, list[int]]:
    """The name and the ranks of a group, which are looked up once."""
    known: tuple[str, list[int]] | None = group.__dict__.get("_observed")
    if known is None:
        known = group._observed = str(group.group_name), distributed.get_process_group_ranks(group)
    return known


def _watched(work: Any, operation: Operation | None) -> Any:
    """The handle of an operation, which tells it when it is waited for."""
    if operation is None:
        return work
    if work is DONE:
        operation.finish()
        operation.block(operation.start)
    elif isinstance(work, PacelineWork):
        work.operation = operation
    return work
