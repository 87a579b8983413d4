"""Policies of the parameter server: when an update happens, with which gradients, who waits and who is cancelled."""

from __future__ import annotations

from paceline.policies.adaptive import Adaptive, best_k
from paceline.policies.asynchronous import Async, KAsync, KBatchAsync
from paceline.policies.auto import Auto
from paceline.policies.backup import Backup
from paceline.policies.base import Arrival, Decision, Order, Policy, parse_policy
from paceline.policies.bounded import Ssp
from paceline.policies.groups import Groups
from paceline.policies.synchronous import KBatchSync, KSync, Sync
from paceline.policies.timing import Rule, Timing

__all__ = [
    "Adaptive",
    "Arrival",
    "Async",
    "Auto",
    "Backup",
    "Decision",
    "Groups",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "Order",
    "Policy",
    "Rule",
    "Ssp",
    "Sync",
    "Timing",
    "best_k",
    "parse_policy",
]
