"""The gradients of all stages on every worker, for scripts that look at them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.cluster.membership import Members
from paceline.parameters.gradients import GRAD
from paceline.transport import BarrierKind


class ExposedGradients:
    """Memory in which the owners of parameters put their gradients, and from which the others copy them."""

    def __init__(self, members: Members, parameters: Sequence[torch.nn.Parameter]) -> None:
        """All workers call it."""
        self._barrier, self._parameters = members.barrier, parameters
        memory = members.share(len(parameters) + 64 + sum(parameter.nbytes + 64 for parameter in parameters))
        self._present = memory.bytes(0, len(parameters))
        """By parameter, 1 if it has a gradient."""
        self._values: list[torch.Tensor] = []
        offset = -(-len(parameters) // 64) * 64
        for parameter in parameters:
            self._values.append(memory.tensor(offset, parameter.numel(), parameter.dtype).view(parameter.shape))
            offset += -(-parameter.nbytes // 64) * 64
        self.shown = False
        """True if `.grad` holds the gradients of all stages."""

    def show(self, own: Iterable[torch.nn.Parameter]) -> None:
        """Sets `.grad` of all parameters; all workers call it."""
        mine = set(map(id, own))
        for number, parameter in enumerate(self._parameters):
            if id(parameter) in mine:
                gradient = GRAD.__get__(parameter)
                self._present[number] = gradient is not None
                if gradient is not None:
                    self._values[number].copy_(gradient)
        self._barrier.wait(BarrierKind.REDUCE)
        for number, parameter in enumerate(self._parameters):
            if id(parameter) not in mine:
                GRAD.__set__(parameter, self._values[number].clone() if self._present[number] else None)
        self._barrier.wait(BarrierKind.REDUCE)
        self.shown = True

    def hide(self, own: Iterable[torch.nn.Parameter]) -> None:
        """Removes `.grad` of parameters that other workers update."""
        mine = set(map(id, own))
        for parameter in self._parameters if self.shown else ():
            if id(parameter) not in mine:
                GRAD.__set__(parameter, None)
        self.shown = False
