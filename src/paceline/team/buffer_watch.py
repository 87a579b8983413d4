"""Notices buffers that a model changes in training, where each worker changes its own from its part of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

_LOOKS = 4
"""Batches before which buffers are looked at; the first one finds them as they were."""


class BufferWatch:
    """Says once that the team's model changes buffers of layers that are not torch's own."""

    def __init__(self, models: Iterable[nn.Module], say: Callable[[str], None]) -> None:
        self._models, self._say = list(models), say
        self._left = _LOOKS
        self._before: dict[str, tuple[int, int]] = {}

    def look(self) -> None:
        """Called before the script gets a batch to train on."""
        if not self._left:
            return
        now = dict(self._states())
        changed = [name for name, state in now.items() if self._before.get(name, state) != state]
        self._before, self._left = now, self._left - 1
        if changed:
            self._left = 0
            more = ", …" if len(changed) > 3 else ""
            self._say(
                f"the model changes buffers in training ({', '.join(changed[:3])}{more}): each worker changes its own, "
                "by its part of a batch, and the lead's are saved; if they depend on the samples, compute them from "
                "`team.mean(value)`, or use a pipeline or tensor, where they are those of one process"
            )

    def _states(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Name of each buffer, with what differs after a change."""
        for model in self._models:
            for path, module in model.named_modules():
                # Batch norm is said at setup; torch's other layers change theirs alike on all workers.
                if type(module).__module__.startswith(("torch.nn.", "paceline.")):
                    continue
                for name, buffer in module.named_buffers(recurse=False):
                    counts = not buffer.dim() and not buffer.is_floating_point()
                    if not counts:
                        yield f"{path}.{name}" if path else name, (id(buffer), _version(buffer))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
