"""Flags of a command: the arguments of its function, and the fields of the settings among them.

Settings are a frozen dataclass. Name, type, default and text (the docstring's section Args) of each
field are those of its flag, so a new setting is a new field, and nothing else.
`sparrow.core.config.flag` names a flag that is called otherwise than its field. An argument that is
annotated with the dataclass gets one, and one that is annotated with
`Annotated[Mapping[str, Any], Changes(TheDataclass)]` gets those fields alone that were given. The
flag of a field that `sparrow.core.config.CsvLine` annotates is a line of CSV.
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import partial
from inspect import Parameter
from typing import Annotated, Any

import tyro

from sparrow.core.config import CsvLine


@dataclasses.dataclass(frozen=True)
class Changes:
    """Annotates an argument that gets the settings that were given, by the names of their fields.

    Args:
        settings: their dataclass.
    """

    settings: Any


@dataclasses.dataclass(frozen=True)
class _Group:
    """A dataclass whose fields are flags.

    Args:
        settings: the dataclass.
        is_change: whether only what was given counts.
        is_optional: whether there is none where a field without a default was not given.
    """

    settings: Any
    is_change: bool = False
    is_optional: bool = False

    def fields(self) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
        """Yields each field that users set, and its annotation or the group that it holds."""
        hints = typing.get_type_hints(self.settings, include_extras=True)
        for field in dataclasses.fields(self.settings):
            if _name(field) is not None:
                yield field, _group(hints[field.name]) or hints[field.name]

    def names(self) -> dict[str, str]:
        """Returns the name of each flag, by that of its field."""
        names: dict[str, str] = {}
        for field, kind in self.fields():
            names |= kind.names() if isinstance(kind, _Group) else {field.name: str(_name(field))}
        return names

    def parameters(self, names: dict[str, str]) -> Iterator[Parameter]:
        """Yields an argument for each flag. names: those of all flags of the command, see
        `names`.
        """
        texts = field_texts(self.settings)
        names = names | self.names()
        for field, kind in self.fields():
            if isinstance(kind, _Group):
                yield from kind.parameters(names)
                continue
            default = _default(field)
            is_required = default is dataclasses.MISSING
            is_line = _is_line(kind)
            is_said = (self.is_change or is_line) and not (is_required or default in (None, ()))
            hint = f"(default: {default})" if is_said else None
            if is_line:
                kind = str
            if self.is_change or (self.is_optional if is_required else is_line):
                kind = kind | None
                default = None
            elif is_required:
                default = Parameter.empty
            help = re.sub(r"`(\w+)`", partial(_spelt, names), texts[field.name])
            marks = tyro.conf.arg(help=help[0].upper() + help[1:], help_behavior_hint=hint)
            yield Parameter(
                str(_name(field)),
                Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, marks],
            )

    def take(self, values: dict[str, Any]) -> Any:
        """Remove the values of its flags from those of all, and return the settings that they
        make.
        """
        settings: dict[str, Any] = {}
        for field, kind in self.fields():
            if isinstance(kind, _Group):
                settings[field.name] = kind.take(values)
                continue
            value = values.pop(str(_name(field)))
            is_line = _is_line(kind)
            if is_line and value is not None:
                value = columns(value)
            elif is_line and not self.is_change and field.default is not dataclasses.MISSING:
                value = field.default
            settings[field.name] = value
        if self.is_change:
            return {name: value for name, value in settings.items() if value is not None}
        required = [
            field.name for field, _ in self.fields() if _default(field) is dataclasses.MISSING
        ]
        if self.is_optional and any(settings[name] is None for name in required):
            return None
        return self.settings(**settings)


def expand(command: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """Returns a function for tyro: it has an argument for each flag, and returns the command with
    its arguments.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()
    groups = {argument.name: group for argument in own if (group := _group(hints[argument.name]))}
    names = {name: name for name in hints.keys() - groups.keys()}
    for group in groups.values():
        names |= group.names()
    parameters: list[Parameter] = []
    for argument in own:
        if argument.name in groups:
            parameters += groups[argument.name].parameters(names)
        else:
            kind = (
                argument.kind
                if argument.kind is Parameter.POSITIONAL_ONLY
                else Parameter.KEYWORD_ONLY
            )
            parameters.append(argument.replace(annotation=hints[argument.name], kind=kind))

    def bound(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return partial(run, args, kwargs)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        settings = {name: group.take(kwargs) for name, group in groups.items()}
        return command(*args, **kwargs, **settings)

    bound.__doc__ = command.__doc__
    bound.__name__ = command.__name__
    bound.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    bound.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return bound


def field_texts(settings: Any) -> dict[str, str]:
    """Returns what a dataclass's docstring says of each field, in its section Args."""
    _, _, section = (inspect.getdoc(settings) or "").partition("Args:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if begin := re.match(r"    (\w+): (.+)", line):
            name = begin[1]
            texts[begin[1]] = begin[2]
        elif name and line.startswith(" " * 8):
            texts[name] += f" {line.strip()}"
        else:
            break
    for field in dataclasses.fields(settings):
        assert field.name in texts, (
            f"{settings.__qualname__}.{field.name}: the section Args does not say what it is"
        )
    return texts


def columns(text: str | None) -> tuple[str, ...]:
    """Returns the columns that a flag names, as a line of CSV: a name with a comma stands in
    quotes.
    """
    return (
        tuple(name.strip() for name in next(csv.reader([text], skipinitialspace=True), []))
        if text
        else ()
    )


def _is_line(kind: Any) -> bool:
    return CsvLine() in getattr(kind, "__metadata__", ())


def _group(kind: Any) -> _Group | None:
    """Returns the settings that an annotation asks for."""
    changes = [mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, Changes)]
    if changes:
        return _Group(changes[0].settings, is_change=True)
    if dataclasses.is_dataclass(kind):
        return _Group(kind)
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    inside = (
        [part for part in typing.get_args(kind) if dataclasses.is_dataclass(part)]
        if is_union
        else []
    )
    return _Group(inside[0], is_optional=True) if inside else None


def _name(field: dataclasses.Field[Any]) -> str | None:
    """Returns the name of a field's flag, or None where users do not set it."""
    name: str | None = field.metadata.get("flag", field.name)
    return name


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def _spelt(names: dict[str, str], mention: re.Match[str]) -> str:
    """Returns a name in a text as users of the command line spell it."""
    return f"--{names[mention[1]].replace('_', '-')}" if mention[1] in names else mention[0]
