"""Lets Accelerate, and so the Hugging Face Trainer, use the process groups of Paceline.

Accelerate knows its backends by name, without a registry: its own choice comes first, and is replaced if there is none.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from paceline.config import Launch, Place

_NAME = "paceline"


def register_backend() -> None:
    """Let `InitProcessGroupKwargs(backend="paceline")` and `TrainingArguments(ddp_backend="paceline")` work.

    It is the default in workers of `paceline run`, and in other processes of a distributed run without an accelerator,
    for which Accelerate has no backend unless it is told `cpu=True`.
    """
    plain = PartialState._prepare_backend
    if getattr(plain, "knows_paceline", False):
        return

    @functools.wraps(plain)
    def prepare(self: Any, cpu: bool = False, sagemaker_dp: Any = False, backend: str | None = None) -> Any:
        if backend == _NAME:
            return _NAME, DistributedType.MULTI_CPU
        found, kind = plain(self, cpu, sagemaker_dp, backend)
        alone = kind == DistributedType.NO and not torch.accelerator.is_available()
        launched = kind == DistributedType.MULTI_CPU and Launch.VARIABLE in os.environ
        if backend is None and (alone or launched) and Place.from_environment().world_size > 1:
            return _NAME, DistributedType.MULTI_CPU
        return found, kind

    prepare.knows_paceline = True  # type: ignore[attr-defined]
    PartialState._prepare_backend = prepare
