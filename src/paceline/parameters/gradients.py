"""Gradients in shared memory: each worker's lie in its own flat buffers, where the others can read them.

What the backward pass makes is copied there while it is still warm in the cache: a large gradient at once, with `.grad`
a view of the buffer from then on; the small ones together, when all are made. Either way `.grad` stays what it is in
plain PyTorch: None until a backward pass makes it, summed over several, and gone with `zero_grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from paceline.parameters.layout import Layout
from paceline.transport import Memory

_LARGE = 256 * 1024
"""Bytes from which on a gradient has a hook of its own; calling one costs as much as copying many kilobytes."""


class Gradients:
    """The gradient buffers of all workers, and the hooks that fill this worker's."""

    def __init__(self, layout: Layout, flats: list[list[torch.Tensor]], rank: int) -> None:
        self.layout = layout
        self.flats = flats
        """Per worker, one flat tensor per dtype."""
        self.own = flats[rank]
        self._views = layout.buffers(self.own)
        self._parameters = [slot.parameter for slot in layout.slots]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @classmethod
    def shared(cls, layout: Layout, memory: Memory, rank: int, workers: int) -> Gradients:
        """In memory that all workers map, each with a part of its own."""
        flats: list[list[torch.Tensor]] = []
        offset = 0
        for _ in range(workers):
            tensors = []
            for flat in layout.flats:
                tensors.append(memory.tensor(offset, flat.count, flat.dtype))
                offset += flat.size
            flats.append(tensors)
        return cls(layout, flats, rank)

    @classmethod
    def private(cls, layout: Layout, device: torch.device) -> Gradients:
        """In this worker's own memory, where its device computes."""
        return cls(layout, [[torch.zeros(flat.count, dtype=flat.dtype, device=device) for flat in layout.flats]], 0)

    @classmethod
    def memory_size(cls, layout: Layout, workers: int) -> int:
        return workers * layout.size

    def attach(self, made: Callable[[], None] | None = None, which: Callable[[int], None] | None = None) -> None:
        """Catch gradients as they are made; `made` or `which`, if given, is told of each, the latter of its number.

        If nobody is told, small ones are found by `collect`, and so are those of parameters that are thawed later.
        """
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            tell = made if which is None else functools.partial(which, index)
            if not parameter.requires_grad or (tell is None and view.nbytes < _LARGE):
                continue
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_catcher(view, tell)))

    def detach(self) -> None:
        """The hooks go, and `.grad` becomes private memory again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()

    def collect(self) -> bytes:
        """Bring what lies in `.grad` and not yet in the shared buffer there.

        Returns a byte per parameter: whether it has a gradient now.
        """
        used = bytearray(len(self._parameters))
        sources, targets = [], []
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            used[index] = 1
            view = self._views[index]
            if gradient is not view:
                if gradient.requires_grad or gradient.is_sparse:
                    gradient = gradient.detach().to_dense()
                sources.append(gradient)
                targets.append(view)
        if sources:
            torch._foreach_copy_(targets, sources)
        return bytes(used)

    def used(self) -> bytes:
        """A byte per parameter: whether it has a gradient now."""
        return bytes(parameter.grad is not None for parameter in self._parameters)

    @property
    def any(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def show(self, used: bytes | None) -> None:
        """Let `.grad` of the used parameters (None: of all) be this worker's buffer, and of the others None."""
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            parameter.grad = view if used is None or used[index] else None

    def scale(self, factor: float) -> None:
        """Multiply what this worker has summed so far."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _catcher(view: torch.Tensor, made: Callable[[], None] | None) -> Callable[[torch.Tensor], None]:
    def catch(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not view and gradient is not None:
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            view.copy_(gradient.detach() if gradient.requires_grad else gradient)
            parameter.grad = view

    if made is None:
        return catch

    def catch_and_tell(parameter: torch.Tensor) -> None:
        catch(parameter)
        made()

    return catch_and_tell
