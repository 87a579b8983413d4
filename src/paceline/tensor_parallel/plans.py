"""The plan by which a model is sharded: found from its graph, and for some layers requested by the user."""

from __future__ import annotations

import fnmatch
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from paceline.cluster.membership import Members
from paceline.config.example_inputs import ExampleInputs
from paceline.errors import UsageError
from paceline.parameters.step_snapshot import StepSnapshot
from paceline.tensor_parallel.call_graph import record_calls
from paceline.tensor_parallel.layer_kinds import layers_of
from paceline.tensor_parallel.layers import CONVOLUTIONS, ROLES, Role
from paceline.tensor_parallel.linear_layers import is_linear
from paceline.tensor_parallel.plan_report import described, left_whole
from paceline.tensor_parallel.plan_search import REPLICATED, PlanSearch
from paceline.transport import BarrierKind

_STYLES = {"ColwiseParallel": "column", "RowwiseParallel": "row"}
"""Classes of torch.distributed.tensor.parallel that a plan may use as well."""

_SAMPLES = 8
"""Of a batch to run the model on, where the loader does not say how many it has."""


def agree_on_plan(
    model: nn.Module,
    members: Members,
    loaders: Sequence[DataLoader[Any]],
    given: ExampleInputs | None,
    workers: int,
    requested: Mapping[str, Any] | None,
    sequence: bool,
    say: Callable[[str], None],
) -> dict[str, Role]:
    """The lead's plan on every worker. The lead runs the model on these inputs, or on one batch of its loader."""
    payload, origin = b"", "its loader's first batch" if given is None else given.origin
    if members.rank == 0:
        snapshot = StepSnapshot(model)
        snapshot.take()
        try:
            inputs = given or ExampleInputs(_first_batch(loaders, model))
            roles, reasons = _find_plan(model, inputs, workers, requested, sequence)
            payload = msgspec.msgpack.encode(roles)
            say(described(model, roles, workers))
            left = left_whole(model, roles, reasons)
            if left:
                say(left)
        except UsageError as refusal:
            payload = b"!" + str(refusal).encode()
        except Exception as failure:
            way = "; show how it is called with team.setup(..., example_inputs=(x,))" if given is None else ""
            payload = (
                f"!the model could not be run on {origin}, which shows how its layers can be split: "
                f"{type(failure).__name__}: {failure}{way}"
            ).encode()
        finally:
            snapshot.restore()
    plan = members.gather(payload, BarrierKind.ALLOCATE)[0]
    if plan[:1] == b"!":
        raise UsageError(plan[1:].decode())
    return msgspec.msgpack.decode(plan, type=dict[str, Role])


def _first_batch(loaders: Sequence[DataLoader[Any]], model: nn.Module) -> list[Any]:
    """The model's arguments for the first batch of the first loader.

    The last part of a batch is its targets, which are left out unless the model needs them. Of a batch of named tensors
    it is given those that its `forward` names.
    """
    loader: Any = loaders[0]
    size = loader.batch_size
    if size is None and loader.batch_sampler is not None:
        # Its batches are not drawn here: it may count its epochs, or have random numbers of its own.
        size = getattr(loader.batch_sampler, "batch_size", None) or _SAMPLES
    if isinstance(loader.dataset, IterableDataset):
        samples = list(itertools.islice(iter(loader.dataset), size or 1))
    else:
        samples = [loader.dataset[number] for number in range(min(size or 1, len(loader.dataset)))]
    batch = loader.collate_fn(samples if loader.batch_sampler is not None else samples[0])
    signature = inspect.signature(model.forward)
    if isinstance(batch, (list, tuple)):
        fewer = list(batch[:-1]) if len(batch) > 1 else list(batch)
        return fewer if _fits(signature, fewer) or not _fits(signature, batch) else list(batch)
    named = [name for name in signature.parameters if isinstance(batch, Mapping) and name in batch]
    if named and (len(named) == len(batch) or not _fits(signature, [batch])):
        names = list(signature.parameters)[: list(signature.parameters).index(named[-1]) + 1]
        return [batch[name] if name in named else signature.parameters[name].default for name in names]
    return [batch]


def _fits(signature: inspect.Signature, arguments: Sequence[Any]) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def find_plan(
    model: nn.Module, inputs: Sequence[Any], workers: int, requested: Mapping[str, Any] | None, sequence: bool
) -> dict[str, Role]:
    """The role of every layer that is sharded; refuses a model that has none."""
    return _find_plan(model, ExampleInputs(inputs), workers, requested, sequence)[0]


def _find_plan(
    model: nn.Module, inputs: ExampleInputs, workers: int, requested: Mapping[str, Any] | None, sequence: bool
) -> tuple[dict[str, Role], dict[str, str]]:
    """The roles, and for other layers the reasons for which they are not sharded."""
    roles = _requested_roles(model, requested or {})
    graph = record_calls(model, inputs.args, inputs.kwargs)
    search = PlanSearch(model, graph, workers, roles)
    found = search.find()
    for name, why in search.impossible().items():
        raise UsageError(f"plan says '{roles[name].name}' of '{name}', but {why}; make it 'replicated'")
    _check(model, found, workers)
    if not found:
        others = [n for n in range(2, 17) if n != workers and PlanSearch(model, graph, n, roles).find()]
        would = f"degree={others[0]} would do" if others else "no other degree up to 16 would do either"
        raise UsageError(
            f"nothing in this model can be split over {workers} workers: it has no Linear, Conv, Embedding or "
            f"attention whose outputs or heads divide by {workers}; {would}"
        )
    if sequence:
        found = {
            name: msgspec.structs.replace(role, sequence=role.name in ("row", "vocabulary", "heads"))
            for name, role in found.items()
        }
    return found, search.reasons()


def _requested_roles(model: nn.Module, requested: Mapping[str, Any]) -> dict[str, Role]:
    """Roles by layer, from the user's plan, whose keys are names or patterns."""
    known, roles = layers_of(model), {}
    for pattern, request in requested.items():
        names = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(
                f"plan names '{pattern}', but the model has no such layer that could be split; "
                f"it has {', '.join(list(known)[:8])}{', …' if len(known) > 8 else ''}"
            )
        role = _role(pattern, request)
        for name in names:
            can = _possible(known[name])
            if role.name not in can:
                raise UsageError(
                    f"plan says '{role.name}' of '{name}', which is a {type(known[name]).__name__}; it can be "
                    + " or ".join(f"'{one}'" for one in can)
                )
            roles[name] = role
    return roles


def _possible(layer: nn.Module) -> tuple[str, ...]:
    """Names of the roles that a layer can have."""
    if isinstance(layer, nn.Embedding):
        return ("column", "vocabulary", "replicated")
    if isinstance(layer, nn.MultiheadAttention):
        return ("heads", "replicated")
    if is_linear(layer) or (isinstance(layer, CONVOLUTIONS) and layer.groups == 1):
        return ("column", "row", "replicated")
    return ("channels", "replicated")


def _role(pattern: str, request: Any) -> Role:
    text = _STYLES.get(request if isinstance(request, str) else type(request).__name__, request)
    if text == "replicated":
        return REPLICATED
    if isinstance(text, str) and text in ROLES:
        return Role(text)
    raise UsageError(
        f"plan says {request!r} of '{pattern}'; it must be 'column', 'row', 'vocabulary', 'channels', 'heads' "
        "or 'replicated', or ColwiseParallel() or RowwiseParallel()"
    )


def _check(model: nn.Module, found: Mapping[str, Role], workers: int) -> None:
    for name, role in found.items():
        if role.name == "channels" and not role.blocks:
            raise UsageError(
                f"layer '{name}' has a whole input, and can be split by its channels only after a layer that is split; "
                "make it 'replicated'"
            )
        odd = [block for block in role.blocks if block % workers]
        if odd:
            raise UsageError(
                f"layer '{name}' can not be split over {workers} workers: its {odd[0]} do not divide by {workers}"
            )
        layer = model.get_submodule(name)
        if role.name == "heads" and isinstance(layer, nn.MultiheadAttention) and layer.num_heads % workers:
            raise UsageError(f"layer '{name}' has {layer.num_heads} heads, which do not divide by {workers}")
