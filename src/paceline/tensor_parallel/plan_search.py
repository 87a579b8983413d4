"""Search for the layers of a model to shard, by propagating placements through its graph.

A layer whose outputs are cut (`column`) returns a sharded value, and the operations after it are computed on shards as
long as they can be; a layer whose inputs are these shards (`row`) ends that with one sum. So the first guess is that
every layer with a whole input is cut by its outputs, and every one with a sharded input by its inputs. If an operation
then needs the whole of a sharded value, the layers that it comes from are cut by other blocks (queries, keys and values
one by one), or, if gathering the value costs more than sharding saves, not at all; and the search is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_flatten, tree_map

from paceline.tensor_parallel.call_graph import CallGraph, GraphCall, Ref
from paceline.tensor_parallel.layer_kinds import inputs_of, layer_input, layers_of, outputs_of, weight_cut
from paceline.tensor_parallel.layers import CONVOLUTIONS, Role
from paceline.tensor_parallel.linear_layers import is_linear
from paceline.tensor_parallel.partial_tensor import RULES
from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.rule_result import REFUSED, RuleRefusal, TensorSpec

_FLOPS = 2e10
"""Floating-point operations per second of one worker, to weigh computation against communication."""
_BYTES = 2e9
"""Bytes per second that workers exchange."""
_LATENCY = 4e-5
"""Seconds of one collective."""
_LARGE = 1 << 20
"""Elements from which on an embedding is sharded for its memory, though that saves no computation."""

REPLICATED = Role("replicated")
_OUTSIDE = "the model also uses its weights other than by calling it"
_CHANGED = "the model changes its output in place, in a way that is impossible on shards"
_COSTS_MORE = "to gather its output would cost more than its shards save"
_VIEW_NAMES = """__getitem__ narrow select slice view view_as reshape reshape_as flatten unflatten squeeze unsqueeze
transpose swapaxes swapdims movedim permute t T mT expand expand_as chunk split split_with_sizes tensor_split unbind
diagonal"""
_VIEWS = frozenset(_VIEW_NAMES.split())
"""Functions whose result may share memory with their argument."""


class _ShardedValue(NamedTuple):
    """A sharded tensor, and the layers that shard it."""

    placement: Placement
    sources: frozenset[str]


class _Failure(NamedTuple):
    """An operation that needs the whole of a sharded value."""

    sources: frozenset[str]
    elements: int
    blocks: tuple[int, ...] | None = None
    """Blocks with which it would not."""
    final: bool = False
    """True if gathering the value does not help either."""


class PlanSearch:
    """Repeats the propagation with revised roles until no failure can be avoided."""

    def __init__(self, model: nn.Module, graph: CallGraph, workers: int, requested: Mapping[str, Role]) -> None:
        self._graph, self._workers = graph, workers
        self._layers = layers_of(model)
        self._decided = dict(requested)
        """Roles that the user has requested or that a failure has decided."""
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._gathered: set[str] = set()
        """Embeddings and linear layers whose outputs are gathered at once, since operations need the whole of them."""
        self._reasons: dict[str, str] = {}
        """Why layers are not sharded."""
        self._uneconomical: set[str] = set()
        """Layers that are replicated only since gathering their outputs would cost more than sharding saves."""
        self._requested = set(requested)
        self._outside = self._used_outside()
        self._replicate([name for name in self._outside if name not in self._requested], _OUTSIDE)
        self._values: dict[int, _ShardedValue] = {}
        self._views: dict[int, list[tuple[int, _ShardedValue]]] = {}
        """Views of gathered values: to change one would not change the shards."""
        self._roles: dict[str, Role] = {}
        self._saved: dict[str, float] = {}
        self._elements: dict[str, int] = {}
        """Of each layer's outputs."""
        self._failures: list[_Failure] = []

    def find(self) -> dict[str, Role]:
        """The role of each layer that is sharded."""
        self._search(economical=True)
        if not self._sharded():
            for name in self._uneconomical:
                del self._decided[name]
            self._search(economical=False)
        found = self._sharded()
        for name in [name for name, role in found.items() if role.name == "heads"]:
            found[f"{name}.out_proj"] = Role("row", (self._layers[name].embed_dim,))  # type: ignore[arg-type]
        return found

    def reasons(self) -> dict[str, str]:
        """Layers that are not sharded, and why."""
        left = [name for name in self._layers if name not in self._sharded()]
        asked = dict.fromkeys(self._requested, "the plan says so")
        return {name: asked.get(name) or self._reasons.get(name, "the first batch does not use it") for name in left}

    def _replicate(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self._decided[name] = REPLICATED
            self._reasons[name] = why

    def impossible(self) -> dict[str, str]:
        """Layers whose requested role is impossible, and why."""
        failed = {name for failure in self._failures if failure.final for name in failure.sources & self._requested}
        outside = {name for name in self._outside & self._requested if self._decided[name] is not REPLICATED}
        return dict.fromkeys(failed, _CHANGED) | dict.fromkeys(outside, _OUTSIDE)

    def _sharded(self) -> dict[str, Role]:
        return {name: role for name, role in self._roles.items() if role is not REPLICATED}

    # -- propagation -------------------------------------------------------------------------------------------------

    def _search(self, *, economical: bool) -> None:
        for _ in range(4 * len(self._layers) + 4):
            self._propagate()
            if not (self._match_shared_weights() or self._revise(economical)):
                return

    def _propagate(self) -> None:
        self._values, self._views, self._roles, self._saved, self._elements, self._failures = {}, {}, {}, {}, {}, []
        for call in self._graph.calls:
            layer = self._layers.get(call.path[-1]) if call.path else None
            number = layer_input(call, layer) if layer is not None else None
            if layer is not None and number is not None:
                self._pass_layer(call, call.path[-1], layer, number)
            else:
                self._pass_operation(call)
        for number in self._graph.outputs:
            if number in self._values:
                self._fail(self._values[number], number)

    def _fail(
        self, value: _ShardedValue, number: int, blocks: tuple[int, ...] | None = None, final: bool = False
    ) -> None:
        self._failures.append(_Failure(value.sources, math.prod(self._graph.shapes[number]), blocks, final))

    def _pass_operation(self, call: GraphCall) -> None:
        """Propagates placements through an operation between layers."""
        refs = [value for value in tree_flatten((call.args, call.kwargs))[0] if isinstance(value, Ref)]
        sharded = [(ref.number, self._values[ref.number]) for ref in refs if ref.number in self._values]
        if refs and call.args and refs[0] is call.args[0] and refs[0].number in self._views:
            self._use_whole(call, self._views[refs[0].number])
        if not sharded:
            for out in call.outs:
                self._values.pop(out, None)
            return
        in_place = call.name.endswith("_") and not call.name.endswith("__")
        rule = RULES.get(call.name) or (RULES.get(call.name[:-1]) if in_place else None)
        outcome: Any = REFUSED
        if rule is not None:
            args, kwargs = tree_map(self._spec, (list(call.args), call.kwargs))
            outcome = rule(args, kwargs, self._workers)
        changes = (in_place or call.name == "__setitem__") and isinstance(call.args[0], Ref)
        changed = call.args[0].number in self._values if changes else False
        if isinstance(outcome, RuleRefusal) or (changes and not changed):
            for number, value in sharded:
                blocks = outcome.blocks if isinstance(outcome, RuleRefusal) else None
                self._fail(value, number, blocks, final=changed)
            if not changes:
                self._use_whole(call, sharded)
            return
        sources = frozenset().union(*(value.sources for _, value in sharded))
        placements = [outcome.out] * len(call.outs) if isinstance(outcome.out, Placement) else outcome.out
        for out, placement in zip(call.outs, placements, strict=False):
            self._values[out] = _ShardedValue(placement, sources)

    def _use_whole(self, call: GraphCall, at: list[tuple[int, _ShardedValue]]) -> None:
        """Handles an operation on the whole of sharded values, or on a view of that."""
        if call.name == "__setitem__" or (call.name[-1] == "_" and call.name[-2:] != "__"):
            for number, value in at:
                self._fail(value, number, final=True)
        elif call.name in _VIEWS:
            self._views.update(dict.fromkeys(call.outs, at))

    def _used_outside(self) -> set[str]:
        """Layers whose parameters the model also uses other than by calling the layer."""
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

    def _spec(self, value: Any) -> Any:
        if not isinstance(value, Ref):
            return value
        known = self._values.get(value.number)
        return TensorSpec(self._graph.shapes[value.number], None if known is None else known.placement)

    # -- layers ------------------------------------------------------------------------------------------------------

    def _pass_layer(self, call: GraphCall, name: str, layer: nn.Module, number: int) -> None:
        """number: of the layer's input."""
        value, shape = self._values.get(number), self._graph.shapes[number]
        features = len(shape) - 1
        if isinstance(layer, _ConvNd):
            features = len(shape) - len(layer.kernel_size) - 1
        elif isinstance(layer, (_BatchNorm, nn.GroupNorm)):
            features = 1
        fits = value is not None and value.placement.dim == features
        role = self._decided.get(name) or self._roles.get(name)
        if role is None or (role.name == "column" and not role.blocks):
            role = self._role(name, layer, value.placement if fits and value is not None else None, role)
        elif role.name == "vocabulary" and not role.blocks and isinstance(layer, nn.Embedding):
            role = Role("vocabulary", (layer.num_embeddings,))
        elif role.name == "row" and not role.blocks:
            role = Role("row", value.placement.blocks if fits and value is not None else (inputs_of(layer),))
        self._roles[name] = role
        takes_shards = role.name in ("row", "channels")
        if value is not None and not (takes_shards and fits):
            self._fail(value, number)
        out = call.outs[0]
        self._saved[name] = self._saved.get(name, 0.0) + self._saving(layer, number, out)
        self._elements[name] = self._elements.get(name, 0) + math.prod(self._graph.shapes[out])
        if role.name == "column" and not role.gathered:
            dim = len(self._graph.shapes[out]) - 1 if not isinstance(layer, _ConvNd) else features
            self._values[out] = _ShardedValue(Placement(dim, role.blocks), frozenset({name}))
        elif role.name == "channels":
            sources = value.sources if value is not None else frozenset({name})
            self._values[out] = _ShardedValue(Placement(features, role.blocks), sources)

    def _role(self, name: str, layer: nn.Module, placement: Placement | None, fixed: Role | None) -> Role:
        """The role of a layer, given its input's placement; `fixed` if it must be a column."""
        if isinstance(layer, nn.MultiheadAttention):
            divides = layer.num_heads % self._workers == 0
            return Role("heads") if divides else self._not_divided(name, f"its {layer.num_heads} heads")
        if isinstance(layer, (_BatchNorm, nn.GroupNorm)) or (isinstance(layer, CONVOLUTIONS) and layer.groups > 1):
            return self._channel_role(name, layer, placement)
        if placement is not None and fixed is None and not isinstance(layer, nn.Embedding):
            return Role("row", placement.blocks)
        blocks = self._blocks.get(name, (outputs_of(layer),))
        # An impossible request is reported later, not ignored.
        if fixed is None and not Placement(0, blocks).divides(self._workers):
            return self._not_divided(name, f"its {sum(blocks)} outputs" if len(blocks) == 1 else "its heads")
        return Role("column", blocks, gathered=name in self._gathered)

    def _channel_role(self, name: str, layer: nn.Module, placement: Placement | None) -> Role:
        """The role of a layer that computes each channel, or group of them, by itself."""
        if placement is None:
            self._reasons[name] = "its input is whole"
            return REPLICATED
        if isinstance(layer, _BatchNorm):
            return Role("channels", placement.blocks)
        norm = isinstance(layer, nn.GroupNorm)
        groups, channels = (layer.num_groups, layer.num_channels) if norm else (layer.groups, layer.out_channels)
        if len(placement.blocks) > 1 or groups % self._workers:  # type: ignore[operator]
            return self._not_divided(name, f"its {groups} groups")
        return Role("channels", (channels,))  # type: ignore[arg-type]

    def _not_divided(self, name: str, what: str) -> Role:
        self._reasons[name] = f"{what} do not divide by {self._workers}"
        return REPLICATED

    def _saving(self, layer: nn.Module, source: int, out: int) -> float:
        """Seconds of a training step that a worker saves by computing only its shard, less those of communication."""
        shapes = self._graph.shapes
        elements = math.prod(shapes[out])
        if isinstance(layer, nn.Embedding):
            return math.inf if layer.weight.numel() >= _LARGE else 0.0
        each = inputs_of(layer) if is_linear(layer) else 1
        if isinstance(layer, _ConvNd):
            each = layer.in_channels // layer.groups * math.prod(layer.kernel_size)
        saved = 6 * elements * each * (1 - 1 / self._workers) / _FLOPS
        return saved - 2 * 4 * math.prod(shapes[source]) / _BYTES - _LATENCY

    # -- revision ----------------------------------------------------------------------------------------------------

    def _match_shared_weights(self) -> bool:
        """Gives layers that share a weight equal cuts of it, or none; True if that changes a role."""
        shared: dict[int, list[str]] = {}
        for name, layer in self._layers.items():
            if name in self._roles and getattr(layer, "weight", None) is not None:
                shared.setdefault(id(layer.weight), []).append(name)
        changed = False
        for names in shared.values():
            cuts = {weight_cut(self._layers[name], self._roles[name]) for name in names}
            if len(cuts) == 1:
                continue
            changed = True
            embeddings = [name for name in names if isinstance(self._layers[name], nn.Embedding)]
            others = {weight_cut(self._layers[name], self._roles[name]) for name in names if name not in embeddings}
            together = others.pop() if len(others) == 1 else None
            fine = together is not None and together[0] == 0 and len(together[1]) == 1
            for name in names:
                known = self._decided.get(name)
                if fine and together is not None and name in embeddings and known is not REPLICATED:
                    self._decided[name] = Role("vocabulary", together[1])
                elif not fine or known is REPLICATED:
                    fine = False
            if not fine:
                self._replicate(names, f"{' and '.join(names[:2])} share a weight, which they would cut differently")
        return changed

    def _revise(self, economical: bool) -> bool:
        """Revises the roles of layers whose outputs an operation needs whole; True if that changes a role."""
        failing: dict[str, list[_Failure]] = {}
        for failure in self._failures:
            for source in failure.sources:
                if source not in self._requested:
                    failing.setdefault(source, []).append(failure)
        if self._settle_embeddings(failing, economical):
            return True
        changed = False
        for source, failures in failing.items():
            blocks = next((failure.blocks for failure in failures if failure.blocks is not None), None)
            if blocks is not None and source not in self._blocks and sum(blocks) == outputs_of(self._layers[source]):
                self._blocks[source] = blocks
                changed = True
        if changed:
            return True
        for source, failures in failing.items():
            if any(failure.final for failure in failures):
                self._replicate([source], _CHANGED)
                changed = True
        if changed or not economical:
            return changed
        return self._drop_uneconomical(failing) or self._gather_at_once(failing)

    def _gather_at_once(self, failing: Mapping[str, list[_Failure]]) -> bool:
        """Gathers the output of one layer whose shards would be gathered in several places; True if there is one."""
        excess = {
            source: sum(failure.elements for failure in failures) / self._elements[source]
            for source, failures in failing.items()
            if source not in self._gathered and is_linear(self._layers[source])
        }
        worst = max(excess, key=lambda source: excess[source], default=None)
        if worst is None or excess[worst] <= 1:
            return False
        self._gathered.add(worst)
        return True

    def _settle_embeddings(self, failing: Mapping[str, list[_Failure]], economical: bool) -> bool:
        """Replicates embeddings whose outputs are needed whole, or gathers them at once; True if that changes a role.

        It comes before all else: shards of an embedding would spread along the residual connections of a transformer,
        and each layer that takes its input from them would be cut by its inputs.
        """
        failed = {source for failure in self._failures for source in failure.sources} - self._gathered
        embeddings = {source for source in failed if isinstance(self._layers[source], nn.Embedding)}
        dropped = economical and self._drop_uneconomical({one: failing[one] for one in embeddings & set(failing)})
        gathered = {one for one in embeddings if self._decided.get(one) is not REPLICATED}
        self._gathered |= gathered
        for name in gathered & self._requested:
            self._decided[name] = Role("column", gathered=True)
        return dropped or bool(gathered)

    def _drop_uneconomical(self, failing: Mapping[str, list[_Failure]]) -> bool:
        """Replicates layers whose outputs cost more to gather than their shards save; True if there are any."""
        found = [
            source
            for source, failures in failing.items()
            if self._saved.get(source, 0.0) < sum(2 * 4 * one.elements / _BYTES + _LATENCY for one in failures)
        ]
        self._replicate(found, _COSTS_MORE)
        self._uneconomical.update(found)
        return bool(found)
