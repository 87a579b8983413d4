"""What a run is: strategy specs, timeouts, slowness put on for a test; parsed and checked here, once."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from paceline.errors import UsageError

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait, in seconds. Every wait in Paceline ends by one of these."""

    join: Positive = 120.0
    """Until all members of the team are there, once this one is."""
    meeting: Positive = 300.0
    """For the other workers, at an update, a barrier or the start of an epoch."""
    notice: Positive = 5.0
    """After which a waiting worker says for whom it waits."""
    stop: Positive = 3.0
    """For the others to end by themselves after one has failed, before they are told to."""


# -- strategies ------------------------------------------------------------------------------------------------------


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """How a team trains a model. A subclass names itself and its options; options are its attributes."""

    spec: ClassVar[str] = ""

    def __str__(self) -> str:
        options = ",".join(
            f"{field.encode_name}={getattr(self, field.name)}"
            for field in msgspec.structs.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"{self.spec}:{options}" if options else self.spec


class AllReduce(Strategy, frozen=True, kw_only=True):
    """Every worker contributes its gradient to one mean, and all go on with the same new version."""

    spec: ClassVar[str] = "all-reduce"


STRATEGIES: dict[str, type[Strategy]] = {kind.spec: kind for kind in (AllReduce,)}
"""A new strategy is one class here and one file in `strategies/`."""


def parse_strategy(spec: str | Strategy) -> Strategy:
    """`name` or `name:option=value,option=value` as a value, or one sentence about what is wrong with it."""
    if isinstance(spec, Strategy):
        return spec
    name, _, rest = spec.partition(":")
    kind = STRATEGIES.get(name)
    if kind is None:
        raise UsageError(f"unknown strategy '{name}'; there is {_listed(STRATEGIES)}")
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in fields:
            allowed = f"it takes {_listed(fields)}" if fields else "it takes no options"
            raise UsageError(f"strategy '{name}' has no option '{key}'; {allowed}")
        if not equals or not value:
            raise UsageError(f"option '{key}' of strategy '{name}' has no value; write {key}=VALUE")
        options[key] = value
    try:
        return msgspec.convert(options, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"strategy '{spec}': {str(error)[0].lower()}{str(error)[1:]}") from None


def _listed(names: Iterable[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


# -- slowness on purpose ---------------------------------------------------------------------------------------------

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
_FACTOR = re.compile(rf"^{_NUMBER}$")
_EXPONENTIAL = re.compile(rf"^(?:(?P<shift>{_NUMBER})\+)?exp\((?P<mean>{_NUMBER})\)$")
_PARETO = re.compile(rf"^pareto\((?P<least>{_NUMBER}),(?P<shape>{_NUMBER})\)$")


class Slowness(msgspec.Struct, frozen=True, kw_only=True):
    """How slow a worker is made: a factor on its computing, or a drawn length of each step."""

    factor: float = 1.0
    """Its computing takes this many times as long."""
    shift: float = 0.0
    """Seconds that every drawn step lasts at least."""
    mean: float = 0.0
    """Mean of the exponential part of a drawn step, in seconds."""
    least: float = 0.0
    """Smallest value of a Pareto-distributed step, in seconds."""
    shape: float = 0.0
    """Shape of that distribution: the smaller, the heavier its tail."""

    def seconds(self, computing: float, source: random.Random) -> float:
        """How long a step should last that took `computing` seconds; never less than that."""
        drawn = self.shift
        if self.mean:
            drawn += source.expovariate(1 / self.mean)
        if self.least:
            drawn += self.least * source.paretovariate(self.shape)
        return max(computing * self.factor, drawn)


def parse_slowness(specs: Iterable[str], workers: int) -> dict[int, Slowness]:
    """`1:4`, `all:exp(0.1)`, `all:0.05+exp(0.05)`, `2:pareto(0.02,2.5)` by rank; a later one wins."""
    slow: dict[int, Slowness] = {}
    for spec in specs:
        who, _, what = spec.replace(" ", "").partition(":")
        if who == "all":
            ranks: Iterable[int] = range(workers)
        elif who.isdecimal() and int(who) < workers:
            ranks = [int(who)]
        else:
            raise UsageError(f"--slow '{spec}': '{who}' is not a rank from 0 to {workers - 1}, nor 'all'")
        for rank in ranks:
            slow[rank] = _slowness(spec, what)
    return slow


def _slowness(spec: str, what: str) -> Slowness:
    if _FACTOR.match(what) and 1 <= float(what) < math.inf:
        return Slowness(factor=float(what))
    if (match := _EXPONENTIAL.match(what)) and 0 < float(match["mean"]) < math.inf:
        return Slowness(shift=float(match["shift"] or 0), mean=float(match["mean"]))
    if (match := _PARETO.match(what)) and float(match["least"]) > 0 and float(match["shape"]) > 0:
        return Slowness(least=float(match["least"]), shape=float(match["shape"]))
    raise UsageError(
        f"--slow '{spec}': '{what}' is neither a factor of at least 1, exp(MEAN), SHIFT+exp(MEAN) "
        "nor pareto(LEAST,SHAPE), in seconds"
    )


# -- what a launcher hands to its workers ----------------------------------------------------------------------------


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What `paceline run` tells each worker, in one environment variable."""

    VARIABLE: ClassVar[str] = "PACELINE_LAUNCH"

    strategy: str | None = None
    """The strategy asked for on the command line; it wins over the script's."""
    timeouts: Timeouts = Timeouts()
    slow: dict[int, Slowness] = {}
    seed: int = 0
    """Seeds the slowness that is drawn."""
    folder: str | None = None
    """Where the run leaves its events, checkpoints and summary."""
    control: int | None = None
    """Descriptor of the shared memory in which the workers meet."""

    def to_environment(self) -> dict[str, str]:
        return {self.VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls) -> Launch:
        text = os.environ.get(cls.VARIABLE)
        return msgspec.json.decode(text, type=cls) if text else cls()


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process stands in its team, as torchrun says it in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Place:
        def number(name: str, default: int) -> int:
            value = os.environ.get(name, str(default))
            if not value.isdecimal():
                raise UsageError(f"{name} is '{value}' in the environment; it must be a whole number")
            return int(value)

        world_size = number("WORLD_SIZE", 1)
        rank = number("RANK", 0)
        place = cls(
            rank=rank,
            local_rank=number("LOCAL_RANK", rank),
            world_size=world_size,
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        )
        if not (world_size >= 1 and rank < world_size):
            raise UsageError(f"RANK is {rank} and WORLD_SIZE {world_size}; RANK must be below WORLD_SIZE")
        return place


T = TypeVar("T")


def one_of(name: str, value: T, allowed: Iterable[T]) -> T:
    """`value`, if it is allowed; else one sentence."""
    choices = list(allowed)
    if value not in choices:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value


def positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or not math.isfinite(value):
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value
