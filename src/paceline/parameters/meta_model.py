"""A model that was made on the meta device, as one is that fits into no machine's memory: its tensors have no values.

Its tensors become tensors of the CPU without memory. Then they get values module by module, by each module's own
`reset_parameters`, by a function of the script, or from a checkpoint: all of them, or those that one worker needs. In
either case the random numbers are those that the plain model would have drawn, so that the values are the plain
model's wherever its modules initialise themselves in the order in which they are registered.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError

_UNTOUCHED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
Init = Callable[[nn.Module], object]
"""Initialises the parameters and buffers that a module has itself."""


class MetaModel:
    """The tensors of a model that have no values yet."""

    def __init__(self, model: nn.Module, init: Init | Path | None) -> None:
        """init: a function, or a checkpoint; by default the modules' own `reset_parameters`."""
        self._model, self._init = model, init
        tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
        self._check()
        for tensor in tensors:
            _give_up_meta(tensor)
        self._known = {id(tensor): tensor for tensor in tensors}
        self._random = torch.get_rng_state()

    @classmethod
    def of(cls, model: nn.Module, init: Any) -> MetaModel | None:
        """None if the model has all of its values."""
        if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            if init is not None:
                raise UsageError(
                    "init is for a model that was made under torch.device('meta'), and this one has values"
                )
            return None
        if isinstance(init, str | Path):
            init = Path(init)
            if not init.is_file():
                raise UsageError(f"init is '{init}', which is no file; it must be a function or a checkpoint")
        elif init is not None and not callable(init):
            raise UsageError(f"init is a {type(init).__name__}; it must be a function of a module, or a checkpoint")
        return cls(model, init)

    def has(self, tensor: torch.Tensor) -> bool:
        """True if the tensor was on the meta device."""
        return id(tensor) in self._known

    def draw(self, random: torch.Tensor) -> None:
        """Draws the random numbers that the plain model would have drawn, from this state on, and keeps no values."""
        self._random = random
        torch.set_rng_state(random)
        if not isinstance(self._init, Path):
            self._initialise(lambda _: False)

    def fill(self, wanted: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        """Gives the wanted tensors their values."""
        if isinstance(self._init, Path):
            self._load(self._init, wanted)
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            self._initialise(wanted)

    # -- by the modules themselves -----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuses modules with tensors that nothing would initialise, and tensors outside of parameters and buffers."""
        for name, module in self._model.named_modules():
            where = f"'{name}' ({type(module).__name__})" if name else f"the model itself ({type(module).__name__})"
            loose = [key for key, value in vars(module).items() if isinstance(value, torch.Tensor) and value.is_meta]
            if loose:
                raise UsageError(
                    f"{where} has a tensor '{loose[0]}' on the meta device that is no parameter or buffer, so it can "
                    "get no values; register it as a buffer"
                )
            own = [key for key, value in _own(module) if value.is_meta]
            if own and self._init is None and _reset_of(module) is None:
                raise UsageError(
                    f"{where} is on the meta device and has no reset_parameters by which '{own[0]}' would get values; "
                    "give setup a function init=f that initialises what a module has itself, or a checkpoint init=path"
                )

    def _initialise(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        known: set[int] = set()
        for name, module in _children_first(self._model):
            own = {id(value) for _, value in _own(module) if self.has(value)}
            if not own:
                continue
            restored: list[tuple[torch.Tensor, torch.Tensor]] = []
            for tensor in (*module.parameters(), *module.buffers()):
                if not self.has(tensor) or (wanted(tensor) and id(tensor) in known and id(tensor) not in own):
                    continue  # a module may also change what its children have
                passing = id(tensor) in known or not wanted(tensor)
                if passing:
                    restored.append((tensor, tensor.data))  # a shared weight has the values of its first module
                tensor.data = _blank(tensor, passing)
            with torch.no_grad():
                (self._init or _reset_of(module))(module)  # type: ignore[operator,misc]
            empty = [key for key, value in _own(module) if self.has(value) and _is_blank(value)]
            if empty:
                raise UsageError(
                    f"'{empty[0]}' of '{name}' ({type(module).__name__}) still has no values after it was initialised; "
                    "give setup a function init=f that sets it"
                )
            for tensor, before in restored:
                tensor.data = before
            known |= own

    # -- from a checkpoint -------------------------------------------------------------------------------------------

    def _load(self, path: Path, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Reads the wanted tensors only: the file is mapped, and what is not read takes no memory."""
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # of many kinds
            raise UsageError(f"init is {path}, which is no checkpoint of torch: {str(error).splitlines()[0]}") from None
        values = content["model"] if isinstance(content, dict) and isinstance(content.get("model"), dict) else content
        model = self._model
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        found: set[int] = set()
        for name, tensor in named:
            if self.has(tensor) and wanted(tensor) and name in values and id(tensor) not in found:
                value = values[name]
                if value.shape != tensor.shape:
                    raise UsageError(f"'{name}' has {list(tensor.shape)} elements, and {list(value.shape)} in {path}")
                tensor.data = value.to(tensor.dtype, copy=True)
                found.add(id(tensor))
        missing = [name for name, one in named if self.has(one) and wanted(one) and id(one) not in found]
        if missing:
            raise UsageError(f"the checkpoint {path} has no '{missing[0]}', and the model has no value for it either")


def _own(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*module._parameters.items(), *module._buffers.items()]
    return [(name, value) for name, value in named if value is not None]


def _reset_of(module: nn.Module) -> Init | None:
    reset = getattr(type(module), "reset_parameters", None) or getattr(type(module), "_reset_parameters", None)
    return reset if callable(reset) else None


def _children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules in the order in which their constructors end."""
    seen: set[nn.Module] = set()

    def walk(one: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if one in seen:
            return
        seen.add(one)
        for key, child in one.named_children():
            yield from walk(child, f"{name}.{key}" if name else key)
        yield name, one

    return walk(module, "")


def _give_up_meta(tensor: torch.Tensor) -> None:
    """Makes a tensor one of the CPU, without memory of its own, that is still the same object."""
    nothing = torch.full([1] * tensor.dim(), no_value(tensor.dtype), dtype=tensor.dtype).expand(tensor.shape)
    new = nn.Parameter(nothing, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else nothing
    torch.utils.swap_tensors(tensor, new)


def _blank(tensor: torch.Tensor, passing: bool) -> torch.Tensor:
    """passing: it is in memory that goes back to the system at once, and leaves no gaps in this process's own."""
    empty = mapped if passing and tensor.numel() else torch.empty
    return empty(tensor.shape, dtype=tensor.dtype).fill_(no_value(tensor.dtype))


def mapped(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in memory that takes space only where it is written, and is not this process's private memory."""
    room = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=_UNTOUCHED)
    return torch.frombuffer(room, dtype=dtype).view(list(shape))


def _is_blank(tensor: torch.Tensor) -> bool:
    """True if a tensor has no values yet; of types without such a value it is not known."""
    if not tensor.numel() or tensor.dtype in (torch.bool, torch.uint8):
        return False
    flat = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 64)]
    same = flat.isnan() if tensor.is_floating_point() or tensor.is_complex() else flat == no_value(tensor.dtype)
    return bool(same.any())


def no_value(dtype: torch.dtype) -> float | int:
    """What stands for a missing value of a type."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min
