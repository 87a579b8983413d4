"""Policies of the parameter server: when an update happens, with which gradients, who waits and who is cancelled."""

from __future__ import annotations

from paceline.policies.adaptive import Adaptive, best_k
from paceline.policies.asynchronous import Async, KAsync, KBatchAsync
from paceline.policies.auto import Auto
from paceline.policies.base import Arrival, Decision, Order, Policy, Rule, Timing, parse_policy
from paceline.policies.bounded import Ssp
from paceline.policies.groups import Groups
from paceline.policies.synchronous import Backup, KBatchSync, KSync, Sync

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
