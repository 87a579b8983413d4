"""Gradients in shared memory: each worker's are in its own flat buffers, where the others can read them.

Gradients are copied there while they are still in the cache: a large one as soon as the backward pass has made it, with
`.grad` a view of the buffer from then on; the small ones together at the end. `.grad` behaves as in plain PyTorch: None
until a backward pass makes it, summed over several, and cleared by `zero_grad`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from paceline.parameters.layout import Layout
from paceline.transport import Memory

if TYPE_CHECKING:
    from paceline.parameters.gradient_places import GradientPlaces

GRAD: Any = torch.Tensor.grad
"""The attribute itself: access to a parameter's `.grad` may be watched."""
_LARGE = 256 * 1024
"""Bytes from which on a gradient has a hook of its own; a call of a hook costs as much as copying many kilobytes."""


class Gradients:
    """The gradient buffers of all workers, and the hooks that fill this worker's."""

    def __init__(
        self, layout: Layout, flats: list[list[torch.Tensor]], rank: int, own: list[bool] | None = None
    ) -> None:
        """own: for each parameter, True if this worker writes its gradient; None if it writes all."""
        self.layout = layout
        self.flats = flats
        """Per worker, one flat tensor per dtype."""
        self.own = flats[rank]
        # As data, each counts the changes that are made to it alone.
        self._views = [view.data for view in layout.buffers(self.own)]
        nothing = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
        self._parameters = [slot.parameter if own is None or own[slot.index] else nothing for slot in layout.slots]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.places: GradientPlaces | None = None
        """Of large gradients that the others read where they lie; None if all are copied to the buffer."""

    @classmethod
    def shared(
        cls, layout: Layout, memory: Memory, rank: int, workers: int, own: list[bool] | None = None
    ) -> Gradients:
        """In memory that all workers map, with a buffer for each of them, or for each replica."""
        flats: list[list[torch.Tensor]] = []
        offset = 0
        for _ in range(workers):
            tensors = []
            for flat in layout.flats:
                tensors.append(memory.tensor(offset, flat.count, flat.dtype))
                offset += flat.size
            flats.append(tensors)
        return cls(layout, flats, rank, own)

    @classmethod
    def private(cls, layout: Layout, device: torch.device) -> Gradients:
        """In this worker's own memory, on its device."""
        return cls(layout, [[torch.zeros(flat.count, dtype=flat.dtype, device=device) for flat in layout.flats]], 0)

    @classmethod
    def memory_size(cls, layout: Layout, workers: int) -> int:
        return workers * layout.size

    def restricted(self, mask: bytes) -> Gradients:
        """The same buffers for some of the parameters only: those with a byte that is not 0."""
        some = copy.copy(self)
        nothing = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
        some._parameters = [own if inside else nothing for own, inside in zip(self._parameters, mask, strict=True)]
        some._hooks = []
        return some

    def attach(
        self, on_gradient: Callable[[], None] | None = None, on_index: Callable[[int], None] | None = None
    ) -> None:
        """Copy gradients to the buffer as the backward pass makes them.

        on_gradient: called for each; on_index: called for each with the parameter's index. Without either, `collect`
        copies small gradients, and those of parameters that are thawed later.
        """
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            call = on_gradient if on_index is None else functools.partial(on_index, index)
            if not parameter.requires_grad or (call is None and (view.nbytes < _LARGE or self.places is not None)):
                continue
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_copier(view, call)))

    def detach(self) -> None:
        """Remove the hooks, and move `.grad` to private memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if GRAD.__get__(parameter) is view:
                GRAD.__set__(parameter, view.clone())

    def collect(self, *, in_place: bool = True) -> bytes:
        """Copy gradients that are not in the shared buffer yet, and are not read where they lie.

        in_place: False if all shall be in the buffer. Returns a byte per parameter: 1 if it has a gradient now.
        """
        if self.places is not None:
            self.places.clear()
        used = bytearray(len(self._parameters))
        for index in self.take(range(len(self._parameters)), in_place=in_place):
            used[index] = 1
        return bytes(used)

    def take(self, indices: Iterable[int], *, in_place: bool = True) -> set[int]:
        """As `collect`, for these parameters only; returns the indices of those that have a gradient now."""
        having: set[int] = set()
        sources, targets = [], []
        places = self.places if in_place else None
        for index in indices:
            gradient = GRAD.__get__(self._parameters[index])
            if gradient is None:
                continue
            having.add(index)
            view = self._views[index]
            if places is not None and view.nbytes >= places.least and places.publish(index, gradient, view):
                continue
            if gradient is not view:
                if gradient.requires_grad or gradient.is_sparse:
                    gradient = gradient.detach().to_dense()
                sources.append(gradient)
                targets.append(view)
        if sources:
            torch._foreach_copy_(targets, sources)
        return having

    def used(self) -> bytes:
        """A byte per parameter: 1 if it has a gradient now."""
        return bytes(GRAD.__get__(parameter) is not None for parameter in self._parameters)

    @property
    def any(self) -> bool:
        """True if any parameter has a gradient."""
        get = GRAD.__get__
        for parameter in self._parameters:  # noqa: SIM110  # a generator is slower, and this is a part of every step
            if get(parameter) is not None:
                return True
        return False

    def show(self, used: bytes | None) -> None:
        """Set `.grad` of the used parameters (None: of all) to this worker's buffer, and of the others to None."""
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            GRAD.__set__(parameter, view if used is None or used[index] else None)

    def fill(self) -> None:
        """Set gradients to zero where there are none."""
        for parameter in self._parameters:
            if parameter.requires_grad and GRAD.__get__(parameter) is None:
                GRAD.__set__(parameter, torch.zeros_like(parameter))

    def scale(self, factor: float) -> None:
        """Multiply the gradients that this worker has summed so far."""
        for parameter in self._parameters:
            gradient = GRAD.__get__(parameter)
            if gradient is not None:
                gradient.mul_(factor)


def _copier(view: torch.Tensor, on_gradient: Callable[[], None] | None) -> Callable[[torch.Tensor], None]:
    def copy(parameter: torch.Tensor) -> None:
        gradient = GRAD.__get__(parameter)
        if gradient is not view and gradient is not None:
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            view.copy_(gradient.detach() if gradient.requires_grad else gradient)
            GRAD.__set__(parameter, view)

    if on_gradient is None:
        return copy

    def copy_and_call(parameter: torch.Tensor) -> None:
        copy(parameter)
        on_gradient()

    return copy_and_call
