"""The attributes of a user's loader, for objects that stand in its place."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


class LoaderAttributes:
    """Has the attributes of the loader in `_loader` besides its own: dataset, sampler, batch_size, …"""

    _loader: DataLoader[Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)
