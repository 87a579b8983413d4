"""Strategies: how a team trains a model, and how text becomes one."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Collection
from pathlib import Path

from paceline.config.checks import listed
from paceline.config.spec import Spec, parse_options
from paceline.errors import UsageError
from paceline.topologies import choices


class Strategy(Spec):
    """How a team trains a model: a value such as `KSync(k=3)`, which prints as `k-sync:k=3`."""

    def group_count(self, workers: int) -> int:
        """How many groups of so many workers push as one."""
        return 0

    def check_option(self, name: str, allowed: Collection[str]) -> None:
        """Refuses a value of an option that is not one of those allowed."""
        value = getattr(self, name)
        if value not in allowed:
            raise UsageError(f"option '{name}' of strategy '{self.spec}' is '{value}'; it must be {listed(allowed)}")


class AllReduce(Strategy):
    """Every worker contributes its gradient to one mean, and all go on with the same new version."""

    spec = "all-reduce"
    topology: str = "auto"
    """The shape of messages between machines; inside a machine gradients are summed in shared memory."""

    def __post_init__(self) -> None:
        self.check_option("topology", choices())


STRATEGIES: dict[str, str] = {
    "all-reduce": "paceline.config.strategy:AllReduce",
    "sync": "paceline.policies.synchronous:Sync",
    "async": "paceline.policies.asynchronous:Async",
    "k-sync": "paceline.policies.synchronous:KSync",
    "k-async": "paceline.policies.asynchronous:KAsync",
    "backup": "paceline.policies.synchronous:Backup",
    "k-batch-sync": "paceline.policies.synchronous:KBatchSync",
    "k-batch-async": "paceline.policies.asynchronous:KBatchAsync",
    "ssp": "paceline.policies.bounded:Ssp",
    "groups": "paceline.policies.groups:Groups",
    "adaptive": "paceline.policies.adaptive:Adaptive",
    "auto": "paceline.policies.auto:Auto",
    "pipeline": "paceline.config.model_parallel:Pipeline",
    "tensor": "paceline.config.model_parallel:Tensor",
    "mesh": "paceline.config.model_parallel:Mesh",
}
"""The module and class of each strategy, imported when it is first asked for; simple ones first.

A new policy is one file in `policies/` and one line here. A strategy of another kind also needs its trainer, in
`strategies/`.
"""

_MODULE_AND_CLASS = re.compile(r"(?P<name>[A-Za-z_][\w.]*:[A-Za-z_]\w*)(?::(?P<options>.*))?")


def parse_strategy(spec: str | Strategy) -> Strategy:
    """`name`, `name:option=value,…`, or a user's own as `module:Class` or `module:Class:option=value,…`."""
    if isinstance(spec, Strategy):
        return spec
    name, options = name_and_options(spec)
    return parse_options(strategy_class(name), options, "strategy")


def name_and_options(spec: str) -> tuple[str, str]:
    """The parts of a spec, where a user's own strategy has a name with a colon in it."""
    name, _, options = spec.partition(":")
    own = _MODULE_AND_CLASS.fullmatch(spec) if name not in STRATEGIES else None
    return (name, options) if own is None else (own["name"], own["options"] or "")


def search_beside(script: Path) -> None:
    """Lets modules in a script's folder be found, as they are in the script itself."""
    if (folder := str(script.resolve().parent)) not in sys.path:
        sys.path.append(folder)


def strategy_class(name: str) -> type[Strategy]:
    """The class of this name: one of the registry, or a user's own as `module:Class`."""
    module, _, of_module = STRATEGIES.get(name, name).partition(":")
    if not of_module:
        raise UsageError(f"unknown strategy '{name}'; there is {listed(STRATEGIES)}, or your own as 'module:Class'")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # as for `python -m`; an installed command does not search it
    try:
        found = getattr(importlib.import_module(module), of_module, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"strategy '{name}': importing '{module}' fails: {error}") from error
        raise UsageError(
            f"strategy '{name}': there is no module '{module}' beside the script or in the current folder"
        ) from None
    except Exception as error:
        raise UsageError(f"strategy '{name}': importing '{module}' fails: {type(error).__name__}: {error}") from error
    if found is None:
        raise UsageError(f"strategy '{name}': module '{module}' has no class '{of_module}'")
    own = name not in STRATEGIES
    if not isinstance(found, type) or not issubclass(found, Strategy) or (own and not hasattr(found, "for_workers")):
        raise UsageError(f"strategy '{name}': '{of_module}' is not a subclass of paceline.policies.Policy")
    if inspect.isabstract(found):
        methods = listed(sorted(found.__abstractmethods__))  # type: ignore[attr-defined]
        raise UsageError(f"strategy '{name}': class '{of_module}' does not define {methods}")
    return found
