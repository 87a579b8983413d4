"""The tensors of one worker's stages where the workers of a pipeline share no memory.

A worker holds the parameters and buffers that its stages use, and the optimizer's state of the parameters that it
updates. Those of other stages keep their shapes, but have no memory: their values are not a number. For a state dict
they are fetched from the workers that have them, one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.cluster.membership import Members
from paceline.collectives.machines_group import MachinesGroup
from paceline.errors import UsageError
from paceline.graph.trace import ModelTrace
from paceline.parameters.absent_tensor import AbsentTensor
from paceline.parameters.meta_model import MetaModel, mapped, no_value
from paceline.pipeline.runtime import PipelineRuntime
from paceline.pipeline.stage_links import from_memory_order, memory_order
from paceline.transport import BarrierKind
from paceline.transport.network_mailbox import NetworkMailbox

_SPREAD = 0.02
"""Standard deviation of random parameters by which operations are measured."""


class _StateTensor(msgspec.Struct, array_like=True):
    """One value of an optimizer's state."""

    name: str
    value: Any
    """Bytes of a tensor, or a plain value."""
    dtype: str = ""
    """Empty for a plain value."""
    shape: list[int] = []

    def decode(self) -> Any:
        if not self.dtype:
            return self.value
        dtype = getattr(torch, self.dtype)
        flat = torch.frombuffer(bytearray(self.value), dtype=dtype) if self.value else torch.empty(0, dtype=dtype)
        return flat.view(self.shape)

    def kind(self) -> Any:
        """A tensor without values, or the plain value."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta") if self.dtype else self.value


def stand_ins(kinds: dict[str, Any], fetch: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The values of a parameter's state, with stand-ins for tensors; fetch: gets one of them, by its name."""
    found = dict(kinds)
    for name, kind in kinds.items():
        if isinstance(kind, torch.Tensor):
            found[name] = AbsentTensor(kind.shape, kind.dtype, lambda name=name: fetch(name)[name])  # type: ignore[misc]
    return found


_Question = tuple[str, int, str]
"""What is asked for, the number of a tensor, and the name of a value of the optimizer's state; empty for all."""
_ask = msgspec.msgpack.Encoder().encode
_question = msgspec.msgpack.Decoder(_Question).decode
_states = msgspec.msgpack.Decoder(list[_StateTensor]).decode


class StageState:
    """One worker's tensors, with the surface of `SharedState`."""

    def __init__(self, members: Members, model: nn.Module, optimizer: Optimizer, meta: MetaModel | None = None) -> None:
        """meta: the model as one without values, if it was made so."""
        self._meta = meta
        self._members, self._model, self._optimizer = members, model, optimizer
        self.parameters = list(model.parameters())
        self._tensors: list[torch.Tensor] = [*self.parameters, *model.buffers()]
        """Parameters, then buffers."""
        self._orders = [memory_order(tensor) for tensor in self._tensors]
        self._held = {number for number, one in enumerate(self._tensors) if meta is None or not meta.has(one)}
        """The numbers of the tensors that have values here."""
        self._owners: list[int] = []
        """By tensor, the worker whose value counts."""
        self._runtime: PipelineRuntime | None = None
        self._network: NetworkMailbox | None = None
        self._undo: list[Callable[[], None]] = []
        self._streams = False
        """True while a state dict is made whose tensors are fetched later."""

    def listen(self, network: NetworkMailbox) -> None:
        """Answers questions of other workers from now on."""
        self._network = network
        network.answer = self._answer

    def attach(self, runtime: PipelineRuntime) -> None:
        """The model is cut: get the first worker's values of this one's stages, and let go of the tensors of others.

        All workers call it.
        """
        self._runtime = runtime
        assert isinstance(runtime.group, MachinesGroup)
        self.listen(runtime.group.network)
        runtime.on_routes = self._place
        count = len(self.parameters)
        self._owners = [runtime.ownership.owner(number) for number in range(count)]
        self._owners += [self._buffer_workers(number)[0] for number in range(count, len(self._tensors))]
        self._members.gather(b"", BarrierKind.ALLOCATE)  # from here on all workers answer
        held = self._needed()
        self._take(held)
        if self._meta is not None:
            own = {id(self._tensors[number]) for number in held}
            self._meta.fill(lambda tensor: id(tensor) in own)
        self._members.gather(b"", BarrierKind.ALLOCATE)  # until then the first worker needs all
        self._hold(held)

        # A function, since torch sets attributes on it.
        def exported(module: nn.Module, *_: Any) -> None:
            self._after(module)

        for module in self._model.modules():
            self._undo += [
                module.register_state_dict_pre_hook(self._before_export).remove,
                module.register_state_dict_post_hook(exported).remove,
                module.register_load_state_dict_pre_hook(self._before_import).remove,
                module.register_load_state_dict_post_hook(self._after).remove,
            ]

    @property
    def _rank(self) -> int:
        """This worker's pipeline rank."""
        return 0 if self._runtime is None else self._runtime.group.rank

    # -- which tensors are here --------------------------------------------------------------------------------------

    def _buffer_workers(self, number: int) -> list[int]:
        """The workers whose stages use a buffer."""
        assert self._runtime is not None
        return self._runtime.workers_of(self._runtime.buffer_stages.get(number - len(self.parameters), ()))

    def _needed(self) -> set[int]:
        """The numbers of the tensors that this worker updates or its stages use."""
        assert self._runtime is not None
        rank, count = self._rank, len(self.parameters)
        needed = self._runtime.ownership.uses(rank)
        needed |= {number for number, owner in enumerate(self._owners) if owner == rank}
        for number in range(count, len(self._tensors)):
            workers = self._buffer_workers(number)
            if rank in workers:
                needed.add(number)
            stages = self._runtime.buffer_stages.get(number - count, set())
            if len(workers) > 1 and stages & self._runtime.changing_stages:
                raise UsageError(
                    "a buffer that a batch may change, as one of batch norm, is used by several workers of the "
                    "pipeline, which share no memory over machines; let one stage use it"
                )
        return needed

    def _place(self) -> None:
        """Stages may use other tensors than before: get their values."""
        needed = self._needed()
        for number in sorted(needed - self._held):
            self._tensors[number].data = self._value(number)
        self._hold(needed)

    def _take(self, held: set[int]) -> None:
        """Gets the first worker's values of these."""
        assert self._runtime is not None
        first = self._runtime.context.ranks[0]  # of the first replica
        for number in sorted(held & self._held) if self._members.rank != first else ():
            self._tensors[number].data = self.value_of(number, first)

    def _hold(self, numbers: set[int]) -> None:
        """Lets go of all other tensors."""
        for number in self._held - numbers:
            self._let_go(number)
        self._held = numbers

    def _let_go(self, number: int) -> None:
        tensor = self._tensors[number]
        nothing = torch.full([1] * tensor.dim(), no_value(tensor.dtype), dtype=tensor.dtype)
        tensor.data = nothing.expand(tensor.shape)

    def _make_room(self, number: int) -> None:
        """Gives a tensor memory in its usual layout; pages that are never touched cost nothing."""
        tensor, order = self._tensors[number], self._orders[number]
        if tensor.numel():
            tensor.data = from_memory_order(mapped([tensor.shape[dim] for dim in order], tensor.dtype), order)

    def value_of(self, number: int, member: int) -> torch.Tensor:
        """The value of a tensor that a worker has."""
        tensor, order = self._tensors[number], self._orders[number]
        if member == self._members.rank:
            return tensor.detach()
        assert self._network is not None
        data = self._network.ask(member, _ask(("value", number, "")))
        shape = [tensor.shape[dim] for dim in order]
        flat = torch.frombuffer(data, dtype=tensor.dtype) if len(data) else torch.empty(0, dtype=tensor.dtype)
        return from_memory_order(flat.view(shape), order)

    def state_of(self, number: int, member: int, name: str = "") -> dict[str, Any]:
        """The optimizer's state of a parameter that a worker has; name: of one value only."""
        if member == self._members.rank:
            state = self._optimizer.state.get(self.parameters[number], {})
            return {key: value for key, value in state.items() if name in ("", key)}
        assert self._network is not None
        answer = self._network.ask(member, _ask(("state", number, name)))
        return {one.name: one.decode() for one in _states(answer)}

    def kinds_of(self, number: int, member: int) -> dict[str, Any]:
        """The same without values: tensors are on the meta device."""
        if member == self._members.rank:
            return {one.name: one.kind() for one in self._pack_state(number, "", values=False)}
        assert self._network is not None
        return {one.name: one.kind() for one in _states(self._network.ask(member, _ask(("kind", number, ""))))}

    def _answer(self, question: bytes) -> memoryview:
        """Another worker asks for a value, or for the optimizer's state of a parameter."""
        what, number, name = _question(question)
        if what == "value":
            packed = self._tensors[number].detach().permute(self._orders[number]).contiguous()
            return packed.view(-1).view(torch.uint8).numpy().data if packed.numel() else memoryview(b"")
        return memoryview(msgspec.msgpack.encode(self._pack_state(number, name, values=what == "state")))

    def _pack_state(self, number: int, wanted: str, *, values: bool) -> list[_StateTensor]:
        found = []
        for name, value in self._optimizer.state.get(self.parameters[number], {}).items():
            if wanted not in ("", name):
                continue
            if isinstance(value, torch.Tensor):
                flat = value.detach().contiguous().view(-1).view(torch.uint8).numpy().data if values else b""
                found.append(_StateTensor(name, flat, str(value.dtype).removeprefix("torch."), list(value.shape)))
            else:
                found.append(_StateTensor(name, value))
        return found

    # -- state dicts that are streamed -------------------------------------------------------------------------------

    def streamed_model(self) -> dict[str, Any]:
        """The model's state dict with stand-ins for tensors that are elsewhere."""
        self._streams = True
        try:
            state = self._model.state_dict(keep_vars=True)
        finally:
            self._streams = False
        numbers = {id(tensor): number for number, tensor in enumerate(self._tensors)}
        absent: dict[int, AbsentTensor] = {}

        def found(value: Any) -> Any:
            number = numbers.get(id(value))
            if number is not None and number not in self._held:
                return absent.setdefault(number, AbsentTensor(value.shape, value.dtype, lambda: self._value(number)))
            return value.detach() if isinstance(value, torch.Tensor) else value

        return {name: found(value) for name, value in state.items()}

    def _value(self, number: int) -> torch.Tensor:
        """The value of a tensor, from the worker that has it."""
        assert self._runtime is not None
        return self.value_of(number, self._runtime.context.team_ranks[self._owners[number]])

    def streamed_optimizer(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The optimizer's state for all parameters, with stand-ins for tensors that are elsewhere."""
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for number, parameter in enumerate(self.parameters):
            if state := self._streamed_state(number):
                found[parameter] = state
        return found

    def _streamed_state(self, number: int) -> dict[str, Any]:
        assert self._runtime is not None
        member = self._runtime.context.team_ranks[self._owners[number]]
        if member == self._members.rank:
            return self.state_of(number, member)
        kinds = self.kinds_of(number, member)
        return stand_ins(kinds, lambda name: self.state_of(number, member, name))

    # -- state dicts of modules --------------------------------------------------------------------------------------

    def _foreign(self, module: nn.Module) -> list[int]:
        """The numbers of a module's own tensors that have no values here."""
        own = {id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())}
        return [number for number, one in enumerate(self._tensors) if id(one) in own and number not in self._held]

    def _before_export(self, module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        if self._streams:
            return
        foreign = self._foreign(module)
        if foreign and keep_vars:
            raise UsageError(
                "a state dict with keep_vars=True would have parameters of other workers' stages, which have no values "
                "here; leave keep_vars out"
            )
        for number in foreign:
            self._tensors[number].data = self._value(number)

    def _before_import(self, module: nn.Module, *_: Any) -> None:
        for number in self._foreign(module):
            self._make_room(number)

    def _after(self, module: nn.Module, *_: Any) -> None:
        """Lets go of tensors of other stages; a state dict keeps what it has."""
        for number in self._foreign(module):
            self._let_go(number)

    @contextlib.contextmanager
    def traceable(self) -> Iterator[None]:
        """While entered, tensors of other stages have their usual layout, and values of no meaning."""
        foreign = [number for number in range(len(self._tensors)) if number not in self._held]
        for number in foreign:
            self._make_room(number)
        try:
            yield
        finally:
            for number in foreign:
                self._let_go(number)

    @contextlib.contextmanager
    def measurable(self, trace: ModelTrace) -> Iterator[None]:
        """While entered, the trace's operations can be run: those of a model without values on random ones."""
        if len(self._held) == len(self._tensors):
            yield
            return
        parameters = dict(self._model.named_parameters(remove_duplicate=False))

        @contextlib.contextmanager
        def drawn(number: int) -> Iterator[None]:
            own = {name: parameters[name] for name in trace.operations[number].parameters if name in parameters}
            before = {name: value.data for name, value in own.items()}
            random = torch.Generator().manual_seed(number)
            for value in own.values():
                value.data = torch.randn(value.shape, generator=random).mul_(_SPREAD).to(value.dtype)
            try:
                yield
            finally:
                for name, value in own.items():
                    value.data = before[name]

        with self.traceable():
            trace.with_values = drawn
            try:
                yield
            finally:
                del trace.with_values

    # -- as SharedState has it ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """While entered, owners update their parameters; then all workers that use these have the new values."""
        yield
        if self._runtime is not None:
            self._runtime.ownership.share_values()

    def changed(self) -> bool:
        """What a script changes itself counts where the parameter is; that of other stages cannot be changed."""
        return False

    def share_changes(self) -> None: ...

    def share_new_state(self) -> None: ...

    def keep(self, own: Iterable[nn.Parameter]) -> None:
        """Keeps the optimizer's state of this worker's own parameters only."""
        ids = {id(parameter) for parameter in own}
        for parameter in list(self._optimizer.state):
            if id(parameter) not in ids:
                del self._optimizer.state[parameter]

    def all_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The optimizer's state for all parameters of the model."""
        found: dict[nn.Parameter, dict[str, Any]] = {}
        assert self._runtime is not None
        for number, parameter in enumerate(self.parameters):
            if state := self.state_of(number, self._runtime.context.team_ranks[self._owners[number]]):
                found[parameter] = state
        return found

    def release(self) -> None:
        """Gives every tensor its value; all workers call it."""
        for number in range(len(self._tensors)):
            if number not in self._held:
                self._tensors[number].data = self._value(number)
        self._members.gather(b"")  # others may still ask
        for undo in self._undo:
            undo()
