"""When an update happens, with which gradients, who waits and who is cancelled: pure objects, one per run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline import config
from paceline.errors import UsageError
from paceline.policies.adaptive import Adaptive, best_k
from paceline.policies.asynchronous import Async, KAsync, KBatchAsync
from paceline.policies.auto import Auto
from paceline.policies.base import Arrival, Decision, Order, Policy
from paceline.policies.bounded import Ssp
from paceline.policies.groups import Groups
from paceline.policies.synchronous import KBatchSync, KSync, Sync

__all__ = [
    "POLICIES",
    "Adaptive",
    "Arrival",
    "Async",
    "Auto",
    "Decision",
    "Groups",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "Order",
    "Policy",
    "Ssp",
    "Sync",
    "best_k",
    "make_policy",
]

Workers = Iterable[int]


def make_policy(strategy: config.Strategy, workers: Workers) -> Policy:
    """The policy that a strategy asks for, for these workers; or one sentence about why it can not be."""
    try:
        if type(strategy) not in POLICIES:
            raise UsageError("it is no policy of a parameter server")
        return POLICIES[type(strategy)](strategy, list(workers))
    except UsageError as error:
        raise UsageError(f"strategy '{strategy}': {error}") from None


def _groups(strategy: config.Groups, workers: Workers) -> Policy:
    between = config.parse_strategy(strategy.between)
    if type(between) not in POLICIES or isinstance(between, config.Groups):
        raise UsageError(f"between is '{strategy.between}'; it must be a policy of a parameter server, and not groups")
    return Groups(workers, strategy.size, lambda groups: POLICIES[type(between)](between, groups), strategy.staleness)


def _adaptive(strategy: config.Adaptive, workers: Workers) -> Policy:
    families: dict[str, type[KSync | KBatchSync | KAsync | KBatchAsync]] = {
        "k-sync": KSync,
        "k-batch-sync": KBatchSync,
        "k-async": KAsync,
        "k-batch-async": KBatchAsync,
    }
    family = families[config.one_of("of", strategy.of, families)]
    try:
        return Adaptive(family(workers, strategy.start))
    except UsageError as error:
        raise UsageError(str(error).replace("k is", "start is", 1)) from None


POLICIES: dict[type[config.Strategy], Callable[[Any, Workers], Policy]] = {
    config.Sync: lambda strategy, workers: Sync(workers),
    config.KSync: lambda strategy, workers: KSync(workers, strategy.k),
    config.KBatchSync: lambda strategy, workers: KBatchSync(workers, strategy.k),
    config.Async: lambda strategy, workers: Async(workers),
    config.KAsync: lambda strategy, workers: KAsync(workers, strategy.k),
    config.KBatchAsync: lambda strategy, workers: KBatchAsync(workers, strategy.k),
    config.Ssp: lambda strategy, workers: Ssp(workers, strategy.s),
    config.Groups: _groups,
    config.Adaptive: _adaptive,
    config.Auto: lambda strategy, workers: Auto(workers),
}
"""A new policy is one file here, one class in `config` and one line in this table."""
