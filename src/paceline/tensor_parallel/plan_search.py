"""Finds which layers of a model can be computed in parts, by the way that values take through its graph.

A layer whose outputs are cut (`column`) hands on parts. As long as what follows can be done in parts, it is; a layer
whose inputs are those parts (`row`) ends the stretch with one sum. So the first guess is that every layer that gets the
whole is cut by its outputs, and every one that gets parts by its inputs. Where that fails, because an operation needs
the whole, the layers from which its parts come are cut otherwise (by blocks: of queries, keys and values each), or, if
gathering the whole there costs more than it saves, not at all; and it is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_flatten, tree_map

from paceline.tensor_parallel.call_graph import CallGraph, GraphCall, Ref
from paceline.tensor_parallel.layers import CONVOLUTIONS
from paceline.tensor_parallel.partial_tensor import RULES
from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.roles import Role
from paceline.tensor_parallel.rule_result import NO, RuleRefusal, ShadowTensor

_FLOPS = 2e10
"""Per second, of one worker: to weigh what is saved against what is moved."""
_BYTES = 2e9
"""Per second, that workers exchange."""
_LATENCY = 4e-5
_LARGE = 1 << 20
"""Elements of an embedding that is cut for the memory that it takes, though nothing is saved by it."""

WHOLE = Role("whole")
_NAMES = """__getitem__ narrow select slice view view_as reshape reshape_as flatten unflatten squeeze unsqueeze
transpose swapaxes swapdims movedim permute t T mT expand expand_as chunk split split_with_sizes tensor_split unbind
diagonal"""
_VIEWS = frozenset(_NAMES.split())
"""What gives the same memory, or a part of it."""
_CALLS: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "embedding": (nn.Embedding,),
    "conv1d": (nn.Conv1d,),
    "conv2d": (nn.Conv2d,),
    "conv3d": (nn.Conv3d,),
    "batch_norm": (_BatchNorm,),
    "group_norm": (nn.GroupNorm,),
    "multi_head_attention_forward": (nn.MultiheadAttention,),
}
"""Functions that layers call in their forward."""


class _Parts(NamedTuple):
    """What each worker has of a tensor, and which layers it was cut by."""

    placement: Placement
    sources: frozenset[str]


class _Failure(NamedTuple):
    """Something needs the whole of what is in parts."""

    sources: frozenset[str]
    elements: int
    blocks: tuple[int, ...] | None = None
    """With which it would not."""
    final: bool = False
    """It can not be had by gathering either."""


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that could be cut, if they are just what torch has them be."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        for kinds in _CALLS.values():
            for kind in kinds:
                own = type(module).forward is kind.forward or getattr(type(module), "by_channel", False)
                if isinstance(module, kind) and own and "forward" not in vars(module) and _plain(module):
                    found[name] = module
    return found


def _plain(module: nn.Module) -> bool:
    """Whether its weight is a parameter of its own, and not made of others."""
    if isinstance(module, nn.MultiheadAttention):
        return module.bias_k is None and not module.add_zero_attn
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return False
    return isinstance(module, (_BatchNorm, nn.GroupNorm)) or "weight" in module._parameters


class PlanSearch:
    """Tries and learns, until nothing fails that could be done better."""

    def __init__(self, model: nn.Module, graph: CallGraph, workers: int, given: Mapping[str, Role]) -> None:
        self._graph, self._workers = graph, workers
        self._layers = layers_of(model)
        self._fixed = dict(given)
        """What is known of layers: by the user, or by trying."""
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._dear: set[str] = set()
        """Layers that are whole only because gathering what they make would cost more than it saves."""
        self._given = set(given)
        self._outside = self._used_outside()
        self._fixed.update((name, WHOLE) for name in self._outside if name not in self._given)
        self._states: dict[int, _Parts] = {}
        self._views: dict[int, list[tuple[int, _Parts]]] = {}
        """What is gathered and then looked at in part: to change that would not change the parts."""
        self._roles: dict[str, Role] = {}
        self._saved: dict[str, float] = {}
        self._failures: list[_Failure] = []

    def find(self) -> dict[str, Role]:
        """The role of each layer that is to be cut."""
        self._learn_all(frugal=True)
        if not self._cut():
            for name in self._dear:
                del self._fixed[name]
            self._learn_all(frugal=False)
        found = self._cut()
        for name in [name for name, role in found.items() if role.name == "heads"]:
            found[f"{name}.out_proj"] = Role("row", (self._layers[name].embed_dim,))  # type: ignore[arg-type]
        return found

    def impossible(self) -> dict[str, str]:
        """Layers of which the user wants what cannot be, and why."""
        changed = "the model changes what it makes in place, in a way that cannot be done in parts"
        used = "the model also uses its weights in another way than by calling it"
        failed = {name for failure in self._failures if failure.final for name in failure.sources & self._given}
        outside = {name for name in self._outside & self._given if self._fixed[name] is not WHOLE}
        return dict.fromkeys(failed, changed) | dict.fromkeys(outside, used)

    def _cut(self) -> dict[str, Role]:
        return {name: role for name, role in self._roles.items() if role is not WHOLE}

    # -- trying ------------------------------------------------------------------------------------------------------

    def _learn_all(self, *, frugal: bool) -> None:
        for _ in range(4 * len(self._layers) + 4):
            self._try()
            if not (self._untie() or self._learn(frugal)):
                return

    def _try(self) -> None:
        self._states, self._views, self._roles, self._saved, self._failures = {}, {}, {}, {}, []
        for call in self._graph.calls:
            layer = self._layers.get(call.path[-1]) if call.path else None
            if layer is not None and isinstance(layer, _CALLS.get(call.name, ())):
                self._through(call, call.path[-1], layer)
            else:
                self._pass(call)
        for number in self._graph.outputs:
            if number in self._states:
                self._fail(self._states[number], number)

    def _fail(self, parts: _Parts, number: int, blocks: tuple[int, ...] | None = None, final: bool = False) -> None:
        self._failures.append(_Failure(parts.sources, math.prod(self._graph.shapes[number]), blocks, final))

    def _pass(self, call: GraphCall) -> None:
        """An operation between layers."""
        refs = [value for value in tree_flatten((call.args, call.kwargs))[0] if isinstance(value, Ref)]
        cut = [(ref.number, self._states[ref.number]) for ref in refs if ref.number in self._states]
        if refs and call.args and refs[0] is call.args[0] and refs[0].number in self._views:
            self._look(call, self._views[refs[0].number])
        if not cut:
            for out in call.outs:
                self._states.pop(out, None)
            return
        in_place = call.name.endswith("_") and not call.name.endswith("__")
        rule = RULES.get(call.name) or (RULES.get(call.name[:-1]) if in_place else None)
        outcome: Any = NO
        if rule is not None:
            args, kwargs = tree_map(self._shadow, (list(call.args), call.kwargs))
            outcome = rule(args, kwargs, self._workers)
        changes = (in_place or call.name == "__setitem__") and isinstance(call.args[0], Ref)
        changed = call.args[0].number in self._states if changes else False
        if isinstance(outcome, RuleRefusal) or (changes and not changed):
            for number, parts in cut:
                blocks = outcome.blocks if isinstance(outcome, RuleRefusal) else None
                self._fail(parts, number, blocks, final=changed)
            if not changes:
                self._look(call, cut)
            return
        sources = frozenset().union(*(parts.sources for _, parts in cut))
        places = [outcome.out] * len(call.outs) if isinstance(outcome.out, Placement) else outcome.out
        for out, place in zip(call.outs, places, strict=False):
            self._states[out] = _Parts(place, sources)

    def _look(self, call: GraphCall, at: list[tuple[int, _Parts]]) -> None:
        """Something is done with the whole of what is in parts, or with a view of that."""
        if call.name == "__setitem__" or (call.name[-1] == "_" and call.name[-2:] != "__"):
            for number, parts in at:
                self._fail(parts, number, final=True)
        elif call.name in _VIEWS:
            self._views.update(dict.fromkeys(call.outs, at))

    def _used_outside(self) -> set[str]:
        """Layers whose parameters the model also uses in another way than by calling them."""
        owners: dict[int, list[str]] = {}
        for name, layer in self._layers.items():
            for parameter in layer.parameters():
                number = self._graph.parameters.get(id(parameter))
                if number is not None:
                    owners.setdefault(number, []).append(name)
        found: set[str] = set()
        for call in self._graph.calls:
            for value in tree_flatten((call.args, call.kwargs))[0]:
                names = owners.get(value.number, ()) if isinstance(value, Ref) else ()
                if not any(name in call.path for name in names):
                    found.update(names)
        return found

    def _shadow(self, value: Any) -> Any:
        if not isinstance(value, Ref):
            return value
        parts = self._states.get(value.number)
        return ShadowTensor(self._graph.shapes[value.number], None if parts is None else parts.placement)

    # -- layers ------------------------------------------------------------------------------------------------------

    def _through(self, call: GraphCall, name: str, layer: nn.Module) -> None:
        number = call.args[0].number
        parts, shape = self._states.get(number), self._graph.shapes[number]
        features = len(shape) - 1
        if isinstance(layer, _ConvNd):
            features = len(shape) - len(layer.kernel_size) - 1
        elif isinstance(layer, (_BatchNorm, nn.GroupNorm)):
            features = 1
        fits = parts is not None and parts.placement.dim == features
        role = self._fixed.get(name) or self._roles.get(name)
        if role is None or (role.name == "column" and not role.blocks):
            role = self._role(name, layer, parts.placement if fits and parts is not None else None, role)
        elif role.name == "vocabulary" and not role.blocks and isinstance(layer, nn.Embedding):
            role = Role("vocabulary", (layer.num_embeddings,))
        elif role.name == "row" and not role.blocks:
            role = Role("row", parts.placement.blocks if fits and parts is not None else (_inputs(layer),))
        self._roles[name] = role
        takes_parts = role.name in ("row", "channels")
        if parts is not None and not (takes_parts and fits):
            self._fail(parts, number)
        out = call.outs[0]
        self._saved[name] = self._saved.get(name, 0.0) + self._saving(layer, number, out)
        if role.name == "column":
            dim = len(self._graph.shapes[out]) - 1 if not isinstance(layer, _ConvNd) else features
            self._states[out] = _Parts(Placement(dim, role.blocks), frozenset({name}))
        elif role.name == "channels":
            sources = parts.sources if parts is not None else frozenset({name})
            self._states[out] = _Parts(Placement(features, role.blocks), sources)

    def _role(self, name: str, layer: nn.Module, parts: Placement | None, fixed: Role | None) -> Role:
        """What a layer is, given what goes in; `fixed` if it must be a column."""
        workers = self._workers
        if isinstance(layer, nn.MultiheadAttention):
            return Role("heads") if layer.num_heads % workers == 0 else WHOLE
        if isinstance(layer, _BatchNorm):
            return Role("channels", parts.blocks) if parts is not None else WHOLE
        if isinstance(layer, nn.GroupNorm):
            fine = parts is not None and len(parts.blocks) == 1 and layer.num_groups % workers == 0
            return Role("channels", (layer.num_channels,)) if fine else WHOLE
        if isinstance(layer, CONVOLUTIONS) and layer.groups > 1:
            fine = parts is not None and len(parts.blocks) == 1 and layer.groups % workers == 0
            return Role("channels", (layer.out_channels,)) if fine else WHOLE
        if parts is not None and fixed is None and not isinstance(layer, nn.Embedding):
            return Role("row", parts.blocks)
        blocks = self._blocks.get(name, (_outputs(layer),))
        # What the user wants and can not have is told later, not passed over.
        return Role("column", blocks) if fixed is not None or Placement(0, blocks).divides(workers) else WHOLE

    def _saving(self, layer: nn.Module, source: int, out: int) -> float:
        """Seconds of a training step that each worker is spared if it computes only its part; less what it costs."""
        shapes = self._graph.shapes
        made = math.prod(shapes[out])
        if isinstance(layer, nn.Embedding):
            return math.inf if layer.weight.numel() >= _LARGE else 0.0
        each = layer.in_features if isinstance(layer, nn.Linear) else 1
        if isinstance(layer, _ConvNd):
            each = layer.in_channels // layer.groups * math.prod(layer.kernel_size)
        spared = 6 * made * each * (1 - 1 / self._workers) / _FLOPS
        return spared - 2 * 4 * math.prod(shapes[source]) / _BYTES - _LATENCY

    # -- learning ----------------------------------------------------------------------------------------------------

    def _untie(self) -> bool:
        """Layers that share a weight must be cut alike, or not at all."""
        shared: dict[int, list[str]] = {}
        for name, layer in self._layers.items():
            if name in self._roles and getattr(layer, "weight", None) is not None:
                shared.setdefault(id(layer.weight), []).append(name)
        changed = False
        for names in shared.values():
            ways = {_way(self._layers[name], self._roles[name]) for name in names}
            if len(ways) == 1:
                continue
            changed = True
            embeddings = [name for name in names if isinstance(self._layers[name], nn.Embedding)]
            others = {_way(self._layers[name], self._roles[name]) for name in names if name not in embeddings}
            together = others.pop() if len(others) == 1 else None
            fine = together is not None and together[0] == 0 and len(together[1]) == 1
            for name in names:
                known = self._fixed.get(name)
                if fine and together is not None and name in embeddings and known is not WHOLE:
                    self._fixed[name] = Role("vocabulary", together[1])
                elif not fine or known is WHOLE:
                    fine = False
            if not fine:
                self._fixed.update(dict.fromkeys(names, WHOLE))
        return changed

    def _learn(self, frugal: bool) -> bool:
        failing: dict[str, list[_Failure]] = {}
        for failure in self._failures:
            for source in failure.sources:
                if source not in self._given:
                    failing.setdefault(source, []).append(failure)
        changed = False
        for source, failures in failing.items():
            wish = next((failure.blocks for failure in failures if failure.blocks is not None), None)
            if wish is not None and source not in self._blocks and sum(wish) == _outputs(self._layers[source]):
                self._blocks[source] = wish
                changed = True
        if changed:
            return True
        for source, failures in failing.items():
            if any(failure.final for failure in failures):
                self._fixed[source] = WHOLE
                changed = True
        if changed or not frugal:
            return changed
        for source, failures in failing.items():
            cost = sum(2 * 4 * failure.elements / _BYTES + _LATENCY for failure in failures)
            if self._saved.get(source, 0.0) < cost:
                self._fixed[source] = WHOLE
                self._dear.add(source)
                changed = True
        return changed


def _outputs(layer: nn.Module) -> int:
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, nn.Embedding):
        return layer.embedding_dim
    assert isinstance(layer, _ConvNd)
    return layer.out_channels


def _inputs(layer: nn.Module) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels  # type: ignore[return-value]


def _way(layer: nn.Module, role: Role) -> tuple[int, tuple[int, ...]]:
    """Along which dimension a weight is cut, and how."""
    if role is WHOLE:
        return -1, ()
    column = 1 if isinstance(layer, nn.Embedding) else 0
    return {"column": column, "row": 1, "vocabulary": 0}.get(role.name, 0), role.blocks
