"""Distributions of the length of a step, parsed from a spec and drawn from."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError

Draws = NDArray[np.float64]


class Distribution(ABC):
    """A distribution of seconds; draws are independent."""

    @abstractmethod
    def mean(self) -> float:
        """Seconds."""

    @abstractmethod
    def draw(self, source: np.random.Generator, shape: int | tuple[int, ...]) -> Draws:
        """An array of draws."""

    def __str__(self) -> str:
        """The spec that it is parsed from."""
        numbers = ",".join(f"{value:g}" for value in vars(self).values())
        return f"{type(self).__name__.lower()}({numbers})"


@dataclasses.dataclass(frozen=True)
class Constant(Distribution):
    """Always the same length."""

    seconds: float

    def mean(self) -> float:
        return self.seconds

    def draw(self, source: np.random.Generator, shape: int | tuple[int, ...]) -> Draws:
        return np.full(shape, self.seconds)

    def __str__(self) -> str:
        return f"{self.seconds:g}"


@dataclasses.dataclass(frozen=True)
class Exponential(Distribution):
    """shift + exp(scale), where scale is the mean of the exponential part."""

    scale: float
    shift: float = 0.0

    def mean(self) -> float:
        return self.shift + self.scale

    def draw(self, source: np.random.Generator, shape: int | tuple[int, ...]) -> Draws:
        return self.shift + self.scale * source.standard_exponential(shape)

    def __str__(self) -> str:
        return f"{self.shift:g}+exp({self.scale:g})" if self.shift else f"exp({self.scale:g})"


@dataclasses.dataclass(frozen=True)
class Pareto(Distribution):
    """A Pareto distribution from `least` seconds on; a smaller shape has a heavier tail."""

    least: float
    shape: float

    def mean(self) -> float:
        return self.least * self.shape / (self.shape - 1) if self.shape > 1 else math.inf

    def draw(self, source: np.random.Generator, shape: int | tuple[int, ...]) -> Draws:
        return self.least * (1 + source.pareto(self.shape, shape))


@dataclasses.dataclass(frozen=True)
class Gamma(Distribution):
    """A gamma distribution."""

    shape: float
    scale: float

    def mean(self) -> float:
        return self.shape * self.scale

    def draw(self, source: np.random.Generator, shape: int | tuple[int, ...]) -> Draws:
        return self.scale * source.standard_gamma(self.shape, shape)


@dataclasses.dataclass(frozen=True)
class Lognormal(Distribution):
    """A lognormal distribution: `median` in seconds, `spread` the standard deviation of the logarithm."""

    median: float
    spread: float

    def mean(self) -> float:
        return self.median * math.exp(self.spread**2 / 2)

    def draw(self, source: np.random.Generator, shape: int | tuple[int, ...]) -> Draws:
        return self.median * np.exp(self.spread * source.standard_normal(shape))


@dataclasses.dataclass(frozen=True)
class Empirical(Distribution):
    """Measured lengths, drawn with replacement."""

    seconds: tuple[float, ...]

    def mean(self) -> float:
        return math.fsum(self.seconds) / len(self.seconds)

    def draw(self, source: np.random.Generator, shape: int | tuple[int, ...]) -> Draws:
        return source.choice(np.array(self.seconds), shape)

    def __str__(self) -> str:
        return f"empirical({len(self.seconds)} steps)"


_NUMBER = r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)"
LONGEST = 1e12
"""The most seconds of anything: sums of longer ones overflow."""
_WILDEST = 0.1
"""The least shape of a Pareto distribution whose draws can be added without overflow."""
FORMS = (
    "constant(SECONDS), exp(MEAN), SHIFT+exp(MEAN), pareto(LEAST,SHAPE), gamma(SHAPE,SCALE), lognormal(MEDIAN,SPREAD)"
)


@functools.cache
def parse_distribution(spec: str) -> Distribution:
    """`0.1` or `constant(0.1)`, `exp(1)`, `1+exp(1)`, `pareto(1,2.5)`, `gamma(2,0.5)`, `lognormal(1,0.3)`; seconds."""
    text = spec.replace(" ", "")
    if any(float(number) > LONGEST for number in re.findall(_NUMBER, text)):
        raise UsageError(f"'{spec}' has a number above {LONGEST:g}, more seconds than can be simulated")
    if (match := re.fullmatch(rf"{_NUMBER}|constant\({_NUMBER}\)", text)) and float(match[1] or match[2]) > 0:
        return Constant(float(match[1] or match[2]))
    if (match := re.fullmatch(rf"(?:{_NUMBER}\+)?exp\({_NUMBER}\)", text)) and float(match[2]) > 0:
        return Exponential(float(match[2]), float(match[1] or 0))
    kinds: dict[str, type[Pareto | Gamma | Lognormal]] = {"pareto": Pareto, "gamma": Gamma, "lognormal": Lognormal}
    if match := re.fullmatch(rf"(\w+)\({_NUMBER},{_NUMBER}\)", text):
        kind, first, second = kinds.get(match[1]), float(match[2]), float(match[3])
        if (kind is Pareto and second < _WILDEST) or (kind is Lognormal and second > 2 / _WILDEST):
            raise UsageError(f"'{spec}' has so heavy a tail that some steps would never end")
        if kind is not None and first > 0 and second > 0:
            return kind(first, second)
    raise UsageError(f"'{spec}' is not a distribution of seconds; there are SECONDS, {FORMS}")
