"""Values that are written as text: `name:option=value,option=value`."""

from __future__ import annotations

import dataclasses
import inspect
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform, get_args, get_type_hints

import msgspec

from paceline.config.checks import listed
from paceline.errors import UsageError


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
class Spec:
    """A value with a name and options, which prints as the text that it is parsed from.

    Every subclass is a dataclass with keyword-only fields: each annotated attribute is an option. A value cannot be
    changed, equals one of the same class with the same options, and can be the key of a dictionary.
    """

    spec: ClassVar[str] = ""
    """The name in text. A class without one is named by its module, as in `mymodule:MyPolicy`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "spec" not in cls.__dict__:
            cls.spec = f"{cls.__module__}:{cls.__qualname__}"
        dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)

    @classmethod
    def options(cls) -> dict[str, dataclasses.Field[Any]]:
        """The options by their names in text: those of the class itself, then those of its bases."""
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        names = dict.fromkeys(name for base in cls.__mro__ for name in inspect.get_annotations(base) if name in fields)
        return {fields[name].metadata.get("option", name): fields[name] for name in names}

    def _given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        values = {name: (getattr(self, field.name), field.default) for name, field in self.options().items()}
        return {name: value for name, (value, default) in values.items() if value != default}

    def __str__(self) -> str:
        given = ",".join(f"{name}={_text(value)}" for name, value in self._given().items())
        return f"{self.spec}:{given}" if given else self.spec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(
            getattr(self, field.name) == getattr(other, field.name) for field in self.options().values()
        )

    def __hash__(self) -> int:
        return hash(str(self))

    if not TYPE_CHECKING:  # a checker would take it for a class with any attribute

        def __setattr__(self, name: str, value: Any) -> None:
            if name in self.__dict__ or name not in self.__dataclass_fields__:
                raise AttributeError(f"'{self}' cannot be changed; make another {type(self).__name__}")
            self.__dict__[name] = value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(_text, value))
    if isinstance(value, dict):
        return "+".join(f"{key}:{item}" for key, item in value.items())
    return value.spec if isinstance(value, type) and issubclass(value, Spec) else str(value)


Kind = TypeVar("Kind", bound=Spec)


def parse_options(kind: type[Kind], text: str, what: str) -> Kind:
    """`option=value,…` as a value of this kind, or one sentence about what is wrong with it."""
    name, fields = kind.spec, kind.options()
    given: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        last = next(reversed(given), "")
        if key not in fields and ":" in given.get(last, ""):
            given[last] += f",{part}"  # of the spec that is this option's value
            continue
        if key not in fields:
            allowed = f"it takes {listed(fields)}" if fields else "it takes no options"
            raise UsageError(f"{what} '{name}' has no option '{key}'; {allowed}")
        if not equals or not value:
            raise UsageError(f"option '{key}' of {what} '{name}' has no value; write {key}=VALUE")
        if key in given:
            raise UsageError(f"option '{key}' of {what} '{name}' is given twice; give it once")
        given[key] = value
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in given]
    if missing:
        raise UsageError(f"{what} '{name}' needs the option '{missing[0]}'; write {name}:{missing[0]}=NUMBER")
    types = get_type_hints(kind)
    values = {}
    for key, value in given.items():
        wanted = types[fields[key].name]
        try:
            # An option that is not a number may be given as text; its class parses that.
            values[fields[key].name] = value if _takes_text(wanted) else msgspec.convert(value, wanted, strict=False)
        except msgspec.ValidationError:
            allowed = "a whole number" if wanted in (int, int | None) else "a number"
            raise UsageError(f"option '{key}' of {what} '{name}' is '{value}'; it must be {allowed}") from None
    return kind(**values)


def _takes_text(wanted: Any) -> bool:
    return not set(get_args(wanted) or [wanted]) <= {int, float, bool, NoneType}


def parse_spec(text: str, kinds: dict[str, type[Kind]], what: str) -> Kind:
    """`name:option=value,…` as one of these kinds."""
    name, _, rest = text.partition(":")
    if name not in kinds:
        raise UsageError(f"unknown {what} '{name}'; there is {listed(kinds)}")
    return parse_options(kinds[name], rest, what)
