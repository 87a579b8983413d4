"""Values that a LightningModule logs in training, where workers take different numbers of steps."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)

from paceline.integrations.framework_team import FrameworkTeam

_PLAIN = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    *("dataloader_idx", "metric_attribute"),
)
"""What was said about a value when it was logged."""
_STATE = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")
"""The state of a logged value. A metric of torchmetrics that is logged has its own, which stays."""


class LoggedValues:
    """The values that were logged until now, to go back to."""

    def __init__(self, results: _ResultCollection) -> None:
        self._kept = {
            key: {name: _copy(value) for name, value in vars(one).items() if name in _STATE}
            for key, one in results.items()
        }

    def restore(self, results: _ResultCollection) -> None:
        for key in [key for key in results if key not in self._kept]:
            del results[key]
        for key, state in self._kept.items():
            vars(results[key]).update({name: _copy(value) for name, value in state.items()})


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def share_names(results: _ResultCollection, workers: FrameworkTeam, module: LightningModule) -> None:
    """Let a worker that has logged nothing in an epoch take part in the reductions of the others' values, with nothing.

    All workers reduce the same values in the same order then.
    """
    own = {key: _description(one) for key, one in results.valid_items()}
    common: dict[str, dict[str, Any]] = {}
    for described in workers.all_of(own):
        common = described | common
    if list(own) == list(common):
        return
    for key, description in common.items():
        if key not in own:
            if key not in results:
                results[key] = _made(description, workers, module)
            vars(results[key]).update(has_reset=False, _update_count=1, _computed=None)
    for key in common:
        results[key] = results.pop(key)


def _description(one: _ResultMetric) -> dict[str, Any]:
    meta = one.meta
    return {
        **{name: getattr(meta, name) for name in _PLAIN},
        "reduction": meta.reduce_fx.__name__,
        "synced": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "is_tensor": one.is_tensor,
    }


def _made(description: dict[str, Any], workers: FrameworkTeam, module: LightningModule) -> _ResultMetric:
    meta = _Metadata(**{name: description[name] for name in _PLAIN}, reduce_fx=getattr(torch, description["reduction"]))
    meta.sync = _Sync(
        _should=description["synced"],
        fn=module.trainer.strategy.reduce,
        rank_zero_only=description["rank_zero_only"],
    )
    made = _ResultMetric(meta, description["is_tensor"])
    if not description["is_tensor"]:
        made.value = module.get_submodule(description["metric_attribute"])
    return made
