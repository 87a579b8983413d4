"""Rules for operations that compute new values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.rule_result import (
    REFUSED,
    LocalRule,
    Replicated,
    Rule,
    RuleRefusal,
    RuleResult,
    Sharded,
    argument,
    dimension,
    is_tensor,
    placement_of,
)


def elementwise(args: Sequence[Any], kwargs: dict[str, Any], workers: int, random: bool = False) -> RuleResult:
    """Functions of each element of the first tensor by itself; some draw random numbers."""
    placement = placement_of(args[0]) if args else None
    return REFUSED if placement is None else LocalRule(args, kwargs, placement, random)


def broadcast(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """Elementwise functions of several tensors, with broadcasting."""
    tensors = [value for value in (*args, *kwargs.values()) if is_tensor(value)]
    dims = max(len(tensor.shape) for tensor in tensors)
    found: Placement | None = None
    for tensor in tensors:
        placement = placement_of(tensor)
        if placement is None:
            continue
        aligned = placement.at(placement.dim + dims - len(tensor.shape))
        if found is not None and found != aligned:
            return REFUSED
        found = aligned
    assert found is not None
    where = found

    def fit(value: Any) -> Any:
        if not is_tensor(value) or placement_of(value) is not None:
            return value
        dim = where.dim - dims + len(value.shape)
        if dim < 0 or value.shape[dim] == 1:
            return Replicated(value)
        return Sharded(value, where.at(dim))

    named = {name: fit(value) for name, value in kwargs.items()}
    return LocalRule([fit(value) for value in args], named, where)


def where_(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`where`; given a condition only it returns indices, whose number is unknown."""
    return broadcast(args, kwargs, workers) if len(args) + len(kwargs) == 3 else REFUSED


def along_dim(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """Functions along one dimension that keep the shape, such as `softmax`."""
    placement = placement_of(args[0])
    dim = argument(args, kwargs, 1, "dim")
    if placement is None or not isinstance(dim, int) or dimension(dim, len(args[0].shape)) == placement.dim:
        return REFUSED
    return LocalRule(args, kwargs, placement)


def reduction(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """Reductions along some dimensions, such as `sum` and `mean`."""
    placement, dims = placement_of(args[0]), len(args[0].shape)
    dim_argument = argument(args, kwargs, 1, "dim")
    if placement is None or dim_argument is None or is_tensor(dim_argument) or isinstance(dim_argument, bool):
        return REFUSED
    gone = {dimension(dim, dims) for dim in ([dim_argument] if isinstance(dim_argument, int) else dim_argument)}
    if placement.dim in gone or not gone:
        return REFUSED
    keep = bool(argument(args, kwargs, 2, "keepdim", False))
    return LocalRule(
        args, kwargs, placement if keep else placement.at(placement.dim - sum(dim < placement.dim for dim in gone))
    )


def variance(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`std` and `var`, whose third argument has two meanings."""
    return reduction(args, kwargs, workers) if len(args) < 3 else REFUSED


def glu(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`glu`: one half of a dimension, gated by the other."""
    placement = placement_of(args[0])
    if placement is None:
        return REFUSED
    dim = dimension(argument(args, kwargs, 1, "dim", -1), len(args[0].shape))
    if dim != placement.dim:
        return LocalRule(args, kwargs, placement)
    half = placement.size // 2
    if len(placement.blocks) == 2 and placement.blocks[0] == half:
        return LocalRule(args, kwargs, Placement(dim, (half,)))
    return RuleRefusal((half, half) if half % workers == 0 else None)


def layer_norm(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`layer_norm` and `rms_norm`, over dimensions that are whole."""
    placement = placement_of(args[0])
    shape = argument(args, kwargs, 1, "normalized_shape")
    if placement is None or placement.dim >= len(args[0].shape) - len(shape):
        return REFUSED
    return _others_replicated(args, kwargs, placement)


def _others_replicated(args: Sequence[Any], kwargs: dict[str, Any], placement: Placement) -> LocalRule:
    """Each worker computes its shard of the first tensor with the whole of all others."""

    def fit(value: Any) -> Any:
        return Replicated(value) if is_tensor(value) else value

    return LocalRule([args[0], *map(fit, args[1:])], {name: fit(value) for name, value in kwargs.items()}, placement)


def batch_norm(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`batch_norm` of a layer whose parameters and statistics are sharded as well."""
    placement = placement_of(args[0])
    others = [value for value in (*args[1:], *kwargs.values()) if is_tensor(value)]
    if placement is None or placement.dim != 1 or any(value.shape[0] != placement.size // workers for value in others):
        return REFUSED
    return LocalRule(args, kwargs, placement)


def prelu(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`prelu`: one weight for all, or one per channel."""
    placement, weight = placement_of(args[0]), argument(args, kwargs, 1, "weight")
    if placement is None or placement_of(weight) is not None:
        return REFUSED
    if weight.shape.numel() == 1:
        return LocalRule((args[0], Replicated(weight)), {}, placement)
    return LocalRule((args[0], Sharded(weight, placement.at(0))), {}, placement) if placement.dim == 1 else REFUSED


def spatial(args: Sequence[Any], kwargs: dict[str, Any], workers: int, dimensions: int) -> RuleResult:
    """Functions over the last dimensions, such as pooling."""
    placement = placement_of(args[0])
    if placement is None or placement.dim >= len(args[0].shape) - dimensions:
        return REFUSED
    return LocalRule(args, kwargs, placement)


def interpolate_(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`interpolate`: all dimensions but the first two change."""
    return spatial(args, kwargs, workers, len(args[0].shape) - 2)


def pad(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    return spatial(args, kwargs, workers, len(argument(args, kwargs, 1, "pad")) // 2)


# -- products --------------------------------------------------------------------------------------------------------


def linear(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`linear` with a whole weight, on a tensor that is cut along another dimension than its features."""
    placement = placement_of(args[0])
    others = [*args[1:], *kwargs.values()]
    if placement is None or placement.dim == len(args[0].shape) - 1 or any(placement_of(value) for value in others):
        return REFUSED
    return _others_replicated(args, kwargs, placement)


def matmul(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    left, right = args[0], argument(args, kwargs, 1, "other")
    if min(len(left.shape), len(right.shape)) < 2:
        return REFUSED
    dims = max(len(left.shape), len(right.shape))
    names = "".join(chr(ord("a") + number) for number in range(dims - 2))
    a = names[dims - len(left.shape) :] + "xy"
    b = names[dims - len(right.shape) :] + "yz"
    outcome = contraction([left, right], [a, b], names + "xz")
    return outcome if isinstance(outcome, RuleRefusal) else LocalRule(outcome.args, {}, outcome.out)


def einsum(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    equation, operands = args[0], list(args[1]) if isinstance(args[1], (list, tuple)) else list(args[1:])
    match = re.fullmatch(r"([a-zA-Z,]+)->([a-zA-Z]*)", equation.replace(" ", "")) if isinstance(equation, str) else None
    if match is None:
        return REFUSED
    outcome = contraction(operands, match[1].split(","), match[2])
    return outcome if isinstance(outcome, RuleRefusal) else LocalRule([equation, outcome.args], {}, outcome.out)


def contraction(operands: list[Any], subscripts: list[str], result: str) -> RuleResult:
    """A contraction of operands by subscripts, as in `einsum`; the subscript that is cut must be in the result."""
    found: tuple[str, tuple[int, ...]] | None = None
    for operand, names in zip(operands, subscripts, strict=True):
        placement = placement_of(operand)
        if placement is not None:
            one = names[placement.dim], placement.blocks
            if found is not None and one != found:
                return REFUSED
            found = one
    if found is None or found[0] not in result:
        return REFUSED
    subscript, blocks = found

    def fit(operand: Any, names: str) -> Any:
        if placement_of(operand) is not None:
            return operand
        if subscript not in names or operand.shape[names.index(subscript)] == 1:
            return Replicated(operand)
        return Sharded(operand, Placement(names.index(subscript), blocks))

    args = [fit(operand, names) for operand, names in zip(operands, subscripts, strict=True)]
    return LocalRule(args, {}, Placement(result.index(subscript), blocks))


def attention(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> RuleResult:
    """`scaled_dot_product_attention`, cut along the heads or a dimension before them."""
    tensors = list(args[:3])
    mask = argument(args, kwargs, 3, "attn_mask")
    dims = len(tensors[0].shape)
    cuts = {placement.at(placement.dim - dims) for tensor in tensors if (placement := placement_of(tensor)) is not None}
    ends = {placement.dim for placement in cuts}
    if len(ends) != 1 or any(len(tensor.shape) != dims for tensor in tensors) or dims + min(ends) >= dims - 2:
        return REFUSED
    dim = dims + ends.pop()
    placement = next(iter(cuts)).at(dim)
    for number, tensor in enumerate(tensors):
        own = placement_of(tensor)
        if own is None:
            size = tensor.shape[dim]
            tensors[number] = Replicated(tensor) if size == 1 else Sharded(tensor, Placement(dim, (size,)))
            if size % workers and size != 1:
                return REFUSED
        elif len(own.blocks) > 1:
            return REFUSED
    if is_tensor(mask) and placement_of(mask) is None:
        at = dim - dims + len(mask.shape)
        mask = Replicated(mask) if at < 0 or mask.shape[at] == 1 else Sharded(mask, placement.at(at))
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs | {"attn_mask": mask}
    out = placement_of(args[0]) or Placement(dim, (args[0].shape[dim],))
    return LocalRule(tensors, named, out, random=bool(named.get("dropout_p")))


_ELEMENTWISE = """abs acos alias asin atan bfloat16 ceil celu clone contiguous cos cosh cpu data deg2rad detach
digamma double elu empty_like erf erfc exp exp2 expm1 float floor frac full_like gelu half hardshrink hardsigmoid
hardswish hardtanh int isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit
logsigmoid long mish nan_to_num neg negative ones_like positive real reciprocal relu relu6 requires_grad_ round rsqrt
selu sigmoid sign silu sin sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold to trunc type
type_as view_as_real zeros_like bool fill_ zero_"""
_BROADCAST = """add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor clamp clamp_max clamp_min clip copysign
div divide eq floor_divide fmod ge greater gt heaviside hypot le lerp less logaddexp logical_and logical_or
logical_xor lt masked_fill max_ maximum minimum mul multiply ne not_equal pow remainder rsub sub subtract true_divide
xlogy __and__ __or__ __xor__ __eq__ __ne__ __rdiv__ __rpow__ __rsub__ __radd__ __rmul__ __truediv__ __rtruediv__
__invert__ float_power __pow__ __mod__"""
_RANDOM = (
    "alpha_dropout bernoulli dropout dropout1d dropout2d dropout3d feature_alpha_dropout rand_like randn_like rrelu"
)
_ALONG_DIM = "cumprod cumsum log_softmax softmax softmin argsort sort logcumsumexp"
_REDUCTIONS = "all amax amin any argmax argmin count_nonzero logsumexp max mean median min prod sum"

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(_BROADCAST.split(), broadcast),
    **dict.fromkeys(_RANDOM.split(), partial(elementwise, random=True)),
    **dict.fromkeys(_ALONG_DIM.split(), along_dim),
    **dict.fromkeys(_REDUCTIONS.split(), reduction),
    "where": where_,
    "std": variance,
    "var": variance,
    "glu": glu,
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "batch_norm": batch_norm,
    "prelu": prelu,
    "linear": linear,
    "matmul": matmul,
    "__matmul__": matmul,
    "bmm": matmul,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
    "interpolate": interpolate_,
    "pad": pad,
    **{
        f"{kind}{number}d": partial(spatial, dimensions=number)
        for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
        for number in (1, 2, 3)
    },
}
