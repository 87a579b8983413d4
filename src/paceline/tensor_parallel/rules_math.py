"""Rules of operations that compute."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from paceline.tensor_parallel.placement import Placement
from paceline.tensor_parallel.rule_result import (
    NO,
    LocalRule,
    Outcome,
    Replicated,
    RuleRefusal,
    Sharded,
    argument,
    dimension,
    is_tensor,
    placed,
)


def alone(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """Each element of the first tensor by itself."""
    place = placed(args[0]) if args else None
    return NO if place is None else LocalRule(args, kwargs, place)


def drawn(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """The same, with random numbers."""
    place = placed(args[0]) if args else None
    return NO if place is None else LocalRule(args, kwargs, place, random=True)


def together(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """Elements of several tensors, one by one, with broadcasting."""
    tensors = [value for value in (*args, *kwargs.values()) if is_tensor(value)]
    dims = max(len(tensor.shape) for tensor in tensors)
    found: Placement | None = None
    for tensor in tensors:
        place = placed(tensor)
        if place is None:
            continue
        aligned = place.at(place.dim + dims - len(tensor.shape))
        if found is not None and found != aligned:
            return NO
        found = aligned
    assert found is not None
    where = found

    def fit(value: Any) -> Any:
        if not is_tensor(value) or placed(value) is not None:
            return value
        dim = where.dim - dims + len(value.shape)
        if dim < 0 or value.shape[dim] == 1:
            return Replicated(value)
        return Sharded(value, where.at(dim))

    fitted = {name: fit(value) for name, value in kwargs.items()}
    return LocalRule([fit(value) for value in args], fitted, where)


def chosen(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`where`; of a condition alone it tells places, whose number is not known."""
    return together(args, kwargs, workers) if len(args) + len(kwargs) == 3 else NO


def along(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`softmax` and the like: something happens along one dimension, and the shape stays."""
    place = placed(args[0])
    dim = argument(args, kwargs, 1, "dim")
    if place is None or not isinstance(dim, int) or dimension(dim, len(args[0].shape)) == place.dim:
        return NO
    return LocalRule(args, kwargs, place)


def reduced(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`sum`, `mean` and the like along some dimensions."""
    place, dims = placed(args[0]), len(args[0].shape)
    given = argument(args, kwargs, 1, "dim")
    if place is None or given is None or is_tensor(given) or isinstance(given, bool):
        return NO
    gone = {dimension(dim, dims) for dim in ([given] if isinstance(given, int) else given)}
    if place.dim in gone or not gone:
        return NO
    keep = bool(argument(args, kwargs, 2, "keepdim", False))
    return LocalRule(args, kwargs, place if keep else place.at(place.dim - sum(dim < place.dim for dim in gone)))


def spread(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`std` and `var`, whose third argument has two meanings."""
    return reduced(args, kwargs, workers) if len(args) < 3 else NO


def gated(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`glu`: one half of a dimension, gated by the other."""
    place = placed(args[0])
    if place is None:
        return NO
    dim = dimension(argument(args, kwargs, 1, "dim", -1), len(args[0].shape))
    if dim != place.dim:
        return LocalRule(args, kwargs, place)
    half = place.size // 2
    if len(place.blocks) == 2 and place.blocks[0] == half:
        return LocalRule(args, kwargs, Placement(dim, (half,)))
    return RuleRefusal((half, half) if half % workers == 0 else None)


def normalised(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`layer_norm` and `rms_norm`, over dimensions that are whole."""
    place = placed(args[0])
    shape = argument(args, kwargs, 1, "normalized_shape")
    if place is None or place.dim >= len(args[0].shape) - len(shape):
        return NO
    fitted = {name: Replicated(value) if is_tensor(value) else value for name, value in kwargs.items()}
    return LocalRule(
        [args[0], *(Replicated(value) if is_tensor(value) else value for value in args[1:])], fitted, place
    )


def batch_norm(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """With a layer whose parameters and statistics are in parts, too."""
    place = placed(args[0])
    others = [value for value in (*args[1:], *kwargs.values()) if is_tensor(value)]
    if place is None or place.dim != 1 or any(value.shape[0] != place.size // workers for value in others):
        return NO
    return LocalRule(args, kwargs, place)


def weighted(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`prelu`: one weight for all, or one per channel."""
    place, weight = placed(args[0]), argument(args, kwargs, 1, "weight")
    if place is None or placed(weight) is not None:
        return NO
    if weight.shape.numel() == 1:
        return LocalRule((args[0], Replicated(weight)), {}, place)
    return LocalRule((args[0], Sharded(weight, place.at(0))), {}, place) if place.dim == 1 else NO


def spatial(dimensions: int) -> Any:
    """Pooling and the like over the last dimensions."""

    def rule(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
        place = placed(args[0])
        return NO if place is None or place.dim >= len(args[0].shape) - dimensions else LocalRule(args, kwargs, place)

    return rule


def resized(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`interpolate`: all dimensions but the first two change."""
    place = placed(args[0])
    return NO if place is None or place.dim > 1 else LocalRule(args, kwargs, place)


def padded(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    place, amounts = placed(args[0]), argument(args, kwargs, 1, "pad")
    if place is None or place.dim >= len(args[0].shape) - len(amounts) // 2:
        return NO
    return LocalRule(args, kwargs, place)


# -- products --------------------------------------------------------------------------------------------------------


def linear(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """A whole layer on a tensor that is cut along another dimension than its features."""
    place = placed(args[0])
    others = [*args[1:], *kwargs.values()]
    if place is None or place.dim == len(args[0].shape) - 1 or any(placed(value) for value in others):
        return NO
    fitted = {name: Replicated(value) if is_tensor(value) else value for name, value in kwargs.items()}
    return LocalRule(
        [args[0], *(Replicated(value) if is_tensor(value) else value for value in args[1:])], fitted, place
    )


def matmul(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    left, right = args[0], argument(args, kwargs, 1, "other")
    if min(len(left.shape), len(right.shape)) < 2:
        return NO
    dims = max(len(left.shape), len(right.shape))
    names = "".join(chr(ord("a") + number) for number in range(dims - 2))
    a = names[dims - len(left.shape) :] + "xy"
    b = names[dims - len(right.shape) :] + "yz"
    outcome = by_letters([left, right], [a, b], names + "xz")
    return outcome if isinstance(outcome, RuleRefusal) else LocalRule(outcome.args, {}, outcome.out)


def einsum(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    equation, operands = args[0], list(args[1]) if isinstance(args[1], (list, tuple)) else list(args[1:])
    match = re.fullmatch(r"([a-zA-Z,]+)->([a-zA-Z]*)", equation.replace(" ", "")) if isinstance(equation, str) else None
    if match is None:
        return NO
    outcome = by_letters(operands, match[1].split(","), match[2])
    return outcome if isinstance(outcome, RuleRefusal) else LocalRule([equation, outcome.args], {}, outcome.out)


def by_letters(operands: list[Any], letters: list[str], result: str) -> Outcome:
    """Operands whose dimensions have letters; what is cut must be one letter, and still be there in the result."""
    found: tuple[str, tuple[int, ...]] | None = None
    for operand, names in zip(operands, letters, strict=True):
        place = placed(operand)
        if place is not None:
            one = names[place.dim], place.blocks
            if found is not None and one != found:
                return NO
            found = one
    if found is None or found[0] not in result:
        return NO
    letter, blocks = found

    def fit(operand: Any, names: str) -> Any:
        if placed(operand) is not None:
            return operand
        if letter not in names or operand.shape[names.index(letter)] == 1:
            return Replicated(operand)
        return Sharded(operand, Placement(names.index(letter), blocks))

    args = [fit(operand, names) for operand, names in zip(operands, letters, strict=True)]
    return LocalRule(args, {}, Placement(result.index(letter), blocks))


def attention(args: Sequence[Any], kwargs: dict[str, Any], workers: int) -> Outcome:
    """`scaled_dot_product_attention` with heads, or whatever comes before them, in parts."""
    tensors = list(args[:3])
    mask = argument(args, kwargs, 3, "attn_mask")
    dims = len(tensors[0].shape)
    cuts = {place.at(place.dim - dims) for tensor in tensors if (place := placed(tensor)) is not None}
    ends = {place.dim for place in cuts}
    if len(ends) != 1 or any(len(tensor.shape) != dims for tensor in tensors) or dims + min(ends) >= dims - 2:
        return NO
    dim = dims + ends.pop()
    place = next(iter(cuts)).at(dim)
    for number, tensor in enumerate(tensors):
        own = placed(tensor)
        if own is None:
            size = tensor.shape[dim]
            tensors[number] = Replicated(tensor) if size == 1 else Sharded(tensor, Placement(dim, (size,)))
            if size % workers and size != 1:
                return NO
        elif len(own.blocks) > 1:
            return NO
    if is_tensor(mask) and placed(mask) is None:
        at = dim - dims + len(mask.shape)
        mask = Replicated(mask) if at < 0 or mask.shape[at] == 1 else Sharded(mask, place.at(at))
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs | {"attn_mask": mask}
    out = placed(args[0]) or Placement(dim, (args[0].shape[dim],))
    return LocalRule(tensors, named, out, random=bool(named.get("dropout_p")))


_ALONE = """abs acos alias asin atan bfloat16 ceil celu clone contiguous cos cosh cpu data deg2rad detach digamma double
elu empty_like erf erfc exp exp2 expm1 float floor frac full_like gelu half hardshrink hardsigmoid hardswish hardtanh
int isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit logsigmoid long mish
nan_to_num neg negative ones_like positive real reciprocal relu relu6 requires_grad_ round rsqrt selu sigmoid sign silu
sin sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold to trunc type type_as view_as_real
zeros_like bool fill_ zero_"""
_TOGETHER = """add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor clamp clamp_max clamp_min clip copysign div
divide eq floor_divide fmod ge greater gt heaviside hypot le lerp less logaddexp logical_and logical_or logical_xor lt
masked_fill max_ maximum minimum mul multiply ne not_equal pow remainder rsub sub subtract true_divide xlogy
__and__ __or__ __xor__ __eq__ __ne__ __rdiv__ __rpow__ __rsub__ __radd__ __rmul__ __truediv__ __rtruediv__ __invert__
float_power __pow__ __mod__"""
_DRAWN = (
    "alpha_dropout bernoulli dropout dropout1d dropout2d dropout3d feature_alpha_dropout rand_like randn_like rrelu"
)
_ALONG = "cumprod cumsum log_softmax softmax softmin argsort sort logcumsumexp"
_REDUCED = "all amax amin any argmax argmin count_nonzero logsumexp max mean median min prod sum"

RULES = {
    **dict.fromkeys(_ALONE.split(), alone),
    **dict.fromkeys(_TOGETHER.split(), together),
    **dict.fromkeys(_DRAWN.split(), drawn),
    **dict.fromkeys(_ALONG.split(), along),
    **dict.fromkeys(_REDUCED.split(), reduced),
    "where": chosen,
    "std": spread,
    "var": spread,
    "glu": gated,
    "layer_norm": normalised,
    "rms_norm": normalised,
    "batch_norm": batch_norm,
    "prelu": weighted,
    "linear": linear,
    "matmul": matmul,
    "__matmul__": matmul,
    "bmm": matmul,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
    "interpolate": resized,
    "pad": padded,
    **{
        f"{kind}{number}d": spatial(number)
        for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
        for number in (1, 2, 3)
    },
}
