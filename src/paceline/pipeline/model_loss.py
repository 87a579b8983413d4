"""Losses that a model computes itself: whether they are sums of terms of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.graph.batch_dim import batch_size
from paceline.graph.trace import ModelTrace
from paceline.pipeline.deferred import Deferred
from paceline.pipeline.loss_check import adds_up
from paceline.pipeline.microbatch_loss import MicrobatchLoss, microbatch_sizes


class _NoRun:
    """Stands for the run of a batch whose deferred results are never computed."""

    finished = False


def loss_is_divisible(
    trace: ModelTrace, results: Sequence[torch.Tensor], inputs: Sequence[Any], microbatches: int, *, tried: bool
) -> bool:
    """True if the values of the batch that a model returns are sums of terms of its microbatches.

    results: those of the trace, as meta tensors; tried: True to check it on random results, too.
    """
    batch, run = batch_size(inputs), _NoRun()
    if not trace.has_tail or min(microbatches, batch) == 1:
        return True
    divided = MicrobatchLoss(batch, microbatch_sizes(batch, microbatches))
    deferred = [Deferred.result(run, meta, index) for index, meta in enumerate(results)]  # type: ignore[arg-type]
    try:
        returned = pytree.tree_leaves(trace.returned(deferred, inputs))
        losses = [one for one in returned if isinstance(one, Deferred) and one.function is not None]
        for loss in losses:
            if loss.meta.numel() != 1:
                return False
            divided.check(loss)
    except (UsageError, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return False
    return not tried or all(adds_up(loss, divided) for loss in losses if loss.meta.is_floating_point())
