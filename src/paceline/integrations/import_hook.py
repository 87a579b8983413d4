"""Puts Paceline's adapters in the place of Accelerate's Accelerator and the Hugging Face Trainer as they are imported.

Workers of `paceline run` import this module before their script, so that scripts of these frameworks need no line of
Paceline. Nothing of a framework is imported that the script does not import.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ADAPTED = {
    "accelerate.accelerator": ("Accelerator", "paceline.integrations.accelerate"),
    "transformers.trainer": ("Trainer", "paceline.integrations.transformers"),
}
"""By the module that defines it, the class that is replaced, and the module of the class of the same name that does."""
_EXPORTS = {"accelerate.accelerator": ("accelerate",), "transformers.trainer": ("transformers",)}
"""Modules that have the class, too, if they were imported before."""


class _AdaptingLoader(Loader):
    """Loads a module as its own loader does, and replaces its class then."""

    def __init__(self, plain: Loader) -> None:
        self._plain = plain

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._plain.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._plain
        _replace(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class _Finder(MetaPathFinder):
    """Finds the modules whose classes are replaced."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _ADAPTED:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _AdaptingLoader(spec.loader)
                return spec
        return None


def _replace(module: ModuleType) -> None:
    name, source = _ADAPTED[module.__name__]
    if source in sys.modules:  # the script, or a module that it has imported, uses the adapter itself
        adapter = sys.modules[source]
        if not hasattr(adapter, name):  # it is being imported now
            return
    else:
        adapter = importlib.import_module(source)
    plain, adapted = getattr(module, name), getattr(adapter, name)
    for other in (module, *(sys.modules.get(one) for one in _EXPORTS[module.__name__])):
        if other is not None and vars(other).get(name) is plain:
            setattr(other, name, adapted)


def install() -> None:
    """Replace the classes of modules that are imported from now on, or were before."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in _ADAPTED:
        if name in sys.modules:
            _replace(sys.modules[name])


install()
