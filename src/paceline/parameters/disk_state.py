"""An optimizer's state in a file instead of memory, for stages whose parameters, gradients and state do not fit.

The tensors of the state are views of a mapped file. An update goes through some parameters at a time, and drops the
pages of their state from this process's memory: the kernel keeps them as long as it has room, and writes them to the
disk if not. Numbers are those of the state in memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.parameters.gradients import GRAD
from paceline.parameters.optimizers import is_elementwise

_AT_ONCE = 32 << 20
"""Bytes of parameters that are updated at a time."""
_LEAST = 4096
"""Bytes of a tensor from which on it is kept in the file."""


class DiskState:
    """The state of the parameters that this worker updates, in a file without a name."""

    def __init__(self, optimizer: Optimizer, folder: Path | None) -> None:
        """folder: where the file is; by default where temporary files are."""
        self._optimizer = optimizer
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # it is there until the run ends
        except OSError as error:
            raise UsageError(f"the optimizer's state cannot be kept on disk: {error.strerror or error}") from None
        self._size = 0
        self._maps: dict[int, mmap.mmap] = {}
        """By the address of a tensor in the file."""

    def step(self, step: Callable[[], Any], parameters: Sequence[torch.nn.Parameter]) -> Any:
        """Runs the optimizer's step, for some of these parameters at a time if it treats each by itself."""
        hooks = (self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks)
        gradients = [(one, GRAD.__get__(one)) for one in parameters if GRAD.__get__(one) is not None]
        if not is_elementwise(self._optimizer) or any(hooks):
            result = step()
            self.place(parameters)
            return result
        result = None
        try:
            for chunk in _chunks([one for one, _ in gradients]):
                known = set(map(id, chunk))
                for one, gradient in gradients:
                    GRAD.__set__(one, gradient if id(one) in known else None)
                result = step()
                self.place(chunk)
        finally:
            for one, gradient in gradients:
                GRAD.__set__(one, gradient)
        return result

    def place(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Moves the state of parameters to the file, and out of this process's memory."""
        for parameter in parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.nbytes >= _LEAST:
                    if value.data_ptr() not in self._maps:
                        state[name] = self._moved(value)
                    self._maps[state[name].data_ptr()].madvise(mmap.MADV_DONTNEED)

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        """The same values in the file."""
        start, size = self._size, -(-value.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file.fileno(), start, size)  # or a full disk would be a signal that kills
        except OSError as error:
            raise UsageError(
                f"the optimizer's state cannot be kept on disk: {error.strerror or error}; offload=disk needs as much "
                "room as the state has, in the run's folder or where TMPDIR says"
            ) from None
        self._size += size
        memory = mmap.mmap(self._file.fileno(), size, offset=start)
        flat = torch.frombuffer(memory, dtype=value.dtype, count=value.numel())
        moved = flat.as_strided(value.shape, value.stride()) if _is_dense(value) else flat.view(value.shape)
        moved.copy_(value)
        self._maps[moved.data_ptr()] = memory
        return moved


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if its elements fill its memory, in whatever order."""
    spans = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in spans:
        if stride != expected:
            return False
        expected *= size
    return True


def _chunks(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters that are updated at a time."""
    found: list[list[torch.nn.Parameter]] = []
    left = 0
    for parameter in parameters:
        if left < parameter.nbytes or not found:
            found.append([])
            left = _AT_ONCE
        found[-1].append(parameter)
        left -= parameter.nbytes
    return found
