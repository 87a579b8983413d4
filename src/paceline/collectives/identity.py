"""A process group's rank, size and names, under each name that torch.distributed uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

NAME = "paceline"


class Identity(distributed.ProcessGroup):
    """Identity shared by all members of the group, and this member's rank."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._name = self._description = ""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    getRank, getSize = rank, size  # noqa: N815
    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def bound_device_id(self) -> torch.device | None:
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        """Ignored: a group has no device."""

    def getGroupName(self) -> Any:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    group_name = property(getGroupName)
    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._description = desc

    group_desc = property(getGroupDesc)
    _set_group_desc = setGroupDesc

    def _get_backend(self, device: torch.device) -> Any:
        return self
