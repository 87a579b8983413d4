"""Strategy specs: their base, the registry, and how text becomes one."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import msgspec

from paceline.config.checks import listed
from paceline.errors import UsageError


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


STRATEGIES: dict[str, type[Strategy]] = {}
"""By name; a new strategy is one class, one file in `strategies/` or `policies/`, and one line in `__init__`."""


def parse_strategy(spec: str | Strategy) -> Strategy:
    """`name` or `name:option=value,option=value` as a value, or one sentence about what is wrong with it."""
    return spec if isinstance(spec, Strategy) else parse_spec(spec, STRATEGIES, "strategy")


Spec = TypeVar("Spec", bound=msgspec.Struct)


def parse_spec(spec: str, kinds: dict[str, type[Spec]], what: str) -> Spec:
    """`name:option=value,…` as one of these kinds."""
    name, _, rest = spec.partition(":")
    kind = kinds.get(name)
    if kind is None:
        raise UsageError(f"unknown {what} '{name}'; there is {listed(kinds)}")
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        last = next(reversed(options), "")
        if key not in fields and ":" in options.get(last, ""):
            options[last] += f",{part}"  # of the spec that is this option's value
            continue
        if key not in fields:
            allowed = f"it takes {listed(fields)}" if fields else "it takes no options"
            raise UsageError(f"{what} '{name}' has no option '{key}'; {allowed}")
        if not equals or not value:
            raise UsageError(f"option '{key}' of {what} '{name}' has no value; write {key}=VALUE")
        options[key] = value
    missing = [field.encode_name for field in fields.values() if field.required and field.encode_name not in options]
    if missing:
        raise UsageError(f"{what} '{name}' needs the option '{missing[0]}'; write {name}:{missing[0]}=NUMBER")
    for key, value in options.items():
        kind_of_value: Any = fields[key].type
        try:
            msgspec.convert(value, kind_of_value, strict=False)
        except msgspec.ValidationError:
            allowed = "a whole number" if kind_of_value in (int, int | None) else "a number"
            raise UsageError(f"option '{key}' of {what} '{name}' is '{value}'; it must be {allowed}") from None
    try:
        return msgspec.convert(options, kind, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UsageError):  # what the kind itself has to say about its options
            raise error.__cause__ from None
        raise
