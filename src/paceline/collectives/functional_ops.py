"""Functional collectives that torch's C++ does not pass to process groups written in Python.

The others reach a group's methods; for these C++ asks the group for a backend in C++, which this one does not have. So
they have an implementation for CPU tensors here, which calls the methods of whatever group it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from paceline.collectives.work import PacelineWork

_c10d: Any = torch._C._distributed_c10d
_library: list[torch.library.Library] = []


def register() -> None:
    """Registers the operators with torch, once."""
    if _library:
        return
    library = torch.library.Library("_c10d_functional", "IMPL")
    _library.append(library)
    library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, "CPU")
    library.impl("batch_p2p_ops", _batch_p2p_ops, "CPU")


def _all_gather_into_tensor_out(source: torch.Tensor, size: int, group_name: Any, *, out: torch.Tensor) -> torch.Tensor:
    work = _resolve(group_name)._allgather_base(out, source, _c10d.AllgatherOptions())
    _await([(out, work)])
    return out


def _batch_p2p_ops(
    kinds: list[str], peers: list[int], tags: list[int], tensors: list[torch.Tensor], group_name: Any
) -> list[torch.Tensor]:
    group = _resolve(group_name)
    begun = []
    for kind, peer, tag, tensor in zip(kinds, peers, tags, tensors, strict=True):
        sends = kind == "isend"
        work = (group.send if sends else group.recv)([tensor], peer, tag)
        begun.append((torch.empty(0, dtype=tensor.dtype) if sends else tensor, work))
    _await(begun)
    return [result for result, _ in begun]


def _await(begun: list[tuple[torch.Tensor, Any]]) -> None:
    """Lets `wait_tensor` wait for an operation; waits for one of ours now.

    Torch's table of results does not keep a handle that is a Python object alive, and would wait forever without it.
    """
    for result, work in begun:
        if isinstance(work, PacelineWork):
            work.wait()
        else:
            _c10d._register_work(result, work)


def _resolve(group: Any) -> Any:
    return group if isinstance(group, distributed.ProcessGroup) else _c10d._resolve_process_group(group)
