"""Key-value caches of language models, which generation needs and training does not.

Models of the Hugging Face kind return one unless `config.use_cache` is False. A trace could not keep it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

from torch import nn


def returns_cache(model: nn.Module) -> bool:
    """True if a call of the model returns a cache unless the script says otherwise."""
    return "use_cache" in inspect.signature(model.forward).parameters and bool(_caching(model))


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Turns `use_cache` off in the configurations of the model and its modules until the context exits."""
    configs = _caching(model)
    for config in configs:
        config.use_cache = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True  # type: ignore[attr-defined]


def _caching(model: nn.Module) -> list[object]:
    """The configurations with `use_cache`, each once."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if getattr(config, "use_cache", False) is True]
