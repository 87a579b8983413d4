"""Corrections of stale gradients, compression of pushed ones, and the places of servers."""

from __future__ import annotations

import dataclasses
import math
import re

import msgspec

from paceline.config.checks import NUMBER, listed
from paceline.config.spec import Spec, parse_spec
from paceline.errors import UsageError


class Correction(Spec):
    """A change of a gradient, or of its learning rate, by its staleness."""


class RateOverStaleness(Correction):
    """Divides the learning rate by the staleness."""

    spec = "lr/staleness"


class DropAbove(Correction):
    """Drops a gradient of a larger staleness."""

    spec = "drop"
    above: int


class DcAsgd(Correction):
    """Extrapolates the gradient to the newest version."""

    spec = "dc-asgd"
    strength: float = dataclasses.field(default=0.04, metadata={"option": "lambda"})


class DcAsgdAdaptive(Correction):
    """Extrapolates as DC-ASGD does, less where gradients have been large."""

    spec = "dc-asgd-adaptive"
    strength: float = dataclasses.field(default=2.0, metadata={"option": "lambda"})
    mean: float = 0.95


class DuttaRate(Correction):
    """Sets the learning rate to `c` over the squared distance to the gradient's version, but at most to `max`."""

    spec = "distance"
    c: float
    max: float | None = None
    """By default the optimizer's learning rate."""


CORRECTIONS: dict[str, type[Correction]] = {
    kind.spec: kind for kind in (RateOverStaleness, DropAbove, DcAsgd, DcAsgdAdaptive, DuttaRate)
}


def parse_correction(spec: str) -> Correction:
    """`lr/staleness`, `drop:above=8`, `dc-asgd:lambda=0.04`, `dc-asgd-adaptive`, `distance:c=0.1,max=0.05`."""
    correction = parse_spec(spec, CORRECTIONS, "correction")
    if isinstance(correction, DropAbove) and correction.above < 0:
        raise UsageError(f"correction '{spec}': above is {correction.above}; it must be a number of updates, 0 or more")
    if isinstance(correction, DuttaRate) and not (correction.c > 0 and (correction.max is None or correction.max > 0)):
        raise UsageError(f"correction '{spec}': c and max must be above 0")
    if isinstance(correction, DcAsgd | DcAsgdAdaptive) and not math.isfinite(correction.strength):
        raise UsageError(f"correction '{spec}': lambda is {correction.strength:g}; it must be finite")
    if isinstance(correction, DcAsgdAdaptive) and not 0 <= correction.mean < 1:
        raise UsageError(f"correction '{spec}': mean is {correction.mean:g}; it must be from 0 to below 1")
    return correction


class Compression(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a pushed gradient."""

    form: str = "none"
    share: float = 0.01
    """The share of elements that top-k keeps."""


FORMS = ("none", "fp32", "bf16", "fp16", "int8", "topk")


def parse_compression(spec: str) -> Compression:
    """`none`, `bf16`, `fp16`, `int8`, `topk` or `topk:SHARE`."""
    form, _, share = spec.partition(":")
    if form not in FORMS or (share and form != "topk"):
        raise UsageError(f"compress is '{spec}'; it must be {listed(FORMS)}, or 'topk:SHARE'")
    if not share:
        return Compression(form=form)
    if not NUMBER.match(share) or not 0 < float(share) <= 1:
        raise UsageError(f"compress is '{spec}'; the share of the elements to keep must be above 0 and at most 1")
    return Compression(form=form, share=float(share))


_MOST = 64
"""Server processes of a run: each imports torch, and the parameters are divided among them."""


def parse_servers(text: str) -> int | str:
    """`lead`, `all`, `each`, `MACHINE:COUNT,…`, or a number of server processes."""
    if text in ("lead", "all", "each") or _BY_MACHINE.match(text):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"servers is '{text}'; it must be a number of processes, at least 1, or 'lead' or 'all', "
            "or over machines 'each', or MACHINE:COUNT,… as in 0:1,2:1"
        )
    if int(text) > _MOST:
        raise UsageError(f"servers is {text}; it must be at most {_MOST}, as every server is a process")
    return int(text)


_BY_MACHINE = re.compile(r"^\d+:[1-9]\d*(,\d+:[1-9]\d*)*$")


def place_servers(text: str, machines: list[list[int]]) -> list[int]:
    """The machine of each server; the first server is on the first machine, that of rank 0."""
    where = parse_servers(text)
    if where == "all":
        machine_of = {rank: number for number, ranks in enumerate(machines) for rank in ranks}
        return [machine_of[rank] for rank in sorted(machine_of)]
    if where == "each":
        return list(range(len(machines)))
    if isinstance(where, int) or where == "lead":
        return [0] * (1 if where == "lead" else int(where))
    placed: list[int] = []
    for part in where.split(","):
        machine, count = map(int, part.split(":"))
        placed += [machine] * count
    if 0 not in placed or max(placed) >= len(machines):
        raise UsageError(
            f"servers is '{text}'; there are machines 0 to {len(machines) - 1}, and one server must be on machine 0"
        )
    return sorted(placed)
