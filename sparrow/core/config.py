"""Configs: frozen dataclasses that are read from plain data and written back. Errors name the
key.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pkgutil
import tomllib
import types
import typing
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sparrow.core.errors import UserError, suggest
from sparrow.core.extensions import (
    extension_members,
    settings_class,
    settings_names,
    with_names_of_today,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Family:
    """The members of a package, one file each: file `x.py` with a dataclass `Config` is the member
    named "x".

    A field annotated `Annotated[Protocol, Family("sparrow.models")]` is read from a table whose
    `name` key picks the member. Adding a member is adding its file. Extensions have members of
    families too.
    """

    package: str

    def names(self) -> list[str]:
        """Returns the names of all members, sorted; files that begin with an underscore are not
        members.
        """
        return sorted(_modules(self.package))

    def module(self, name: str, place: str = "name") -> types.ModuleType:
        """Returns the module of a member.

        Args:
            name: the member's.
            place: the setting that names it, for errors.

        Raises:
            UserError: if there is no such member.
        """
        modules = _modules(self.package)
        if name not in modules:
            raise UserError(f"{place}: there is no {name!r}{suggest(str(name), self.names())}")
        return importlib.import_module(modules[name])

    def config(self, name: str, place: str = "name") -> type:
        """Returns the `Config` class of a member. The arguments are those of `module`.

        Raises:
            UserError: if there is no such member, or it has no `Config`.
        """
        module = self.module(name, place)
        config: type | None = getattr(module, "Config", None)
        if not (config and dataclasses.is_dataclass(config)):
            raise UserError(
                f"{module.__file__}: no dataclass named Config; add one with the settings of"
                f" {name!r}"
            )
        return config

    def name_of(self, config: object) -> str:
        """Returns the name of the member whose `Config` made `config`."""
        path = type(config).__module__
        by_module = {module: name for name, module in extension_members(self.package).items()}
        return by_module.get(path, path.rpartition(".")[2])


def _modules(package: str) -> dict[str, str]:
    """Returns name -> module of all members of a family; files that begin with an underscore are
    none.
    """
    names = _files(tuple(importlib.import_module(package).__path__))
    return {name: f"{package}.{name}" for name in names} | dict(extension_members(package))


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The names that a field annotated `Annotated[str, OneOf(names)]` may hold, where they are not
    known in its file.

    Help and documents show them. The field's class checks them.
    """

    names: Callable[[], list[str]]


@functools.cache
def _files(folders: tuple[str, ...]) -> tuple[str, ...]:
    """The names of all modules in a package's folders, but for those that begin with an
    underscore.
    """
    return tuple(m.name for m in pkgutil.iter_modules(folders) if not m.name.startswith("_"))


@dataclasses.dataclass(frozen=True)
class OfExtensions:
    """Annotates a field of name -> settings of an extension. As plain data they are tables beside
    the other fields.
    """


@dataclasses.dataclass(frozen=True)
class CsvLine:
    """Annotates a field of names whose flag gets them as a line of CSV, such as click,like."""


def flag(name: str | None) -> dict[str, str | None]:
    """Returns the metadata of a field whose flag on the command line is not called as the field.

    name: the flag's, with underscores; None for a field that users do not set, which has no flag.
    """
    return {"flag": name}


def from_dict(cls: type[T], data: object, place: str = "") -> T:
    """Returns an instance of the dataclass `cls`, made from plain data.

    Args:
        cls: the class.
        data: what TOML or JSON gives.
        place: the dotted name of the data, for errors.

    Raises:
        UserError: for an unknown key, a wrong type or a missing key; names the place, the value and
            the remedy.
    """
    return typing.cast(T, _convert(cls, data, place))


def changed(config: T, data: dict[str, Any]) -> T:
    """Returns a config with some fields made from plain data. The others are not read again.

    Raises:
        UserError: as `from_dict`.
    """
    fields = _convert_fields(type(config), data, "")
    if field := extensions_field(type(config)):
        others = {k: v for k, v in getattr(config, field).items() if k not in data}
        fields[field] = others | fields[field]
    return typing.cast(T, dataclasses.replace(typing.cast(Any, config), **fields))


def _convert(kind: Any, value: Any, place: str) -> Any:
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if isinstance(value, str) and (_is_named(kind) or (origin is dict and args[1] is Any)):
        value = {"name": value}  # a bare word names a member
    if origin is typing.Annotated:
        family = family_of(kind)
        return _convert_member(family, value, place) if family else _convert(args[0], value, place)
    if dataclasses.is_dataclass(kind):
        return (
            value
            if isinstance(value, typing.cast(type, kind))
            else _convert_dataclass(kind, value, place)
        )
    if origin is typing.Literal:
        if value not in args:
            raise UserError(f"{place}: {value!r} is not one of {', '.join(map(repr, args))}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, place)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{place}: expected a list, got {value!r}; write {_value([value])}")
        return tuple(_convert(args[0], v, f"{place}[{i}]") for i, v in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise UserError(f"{place}: expected a table, got {value!r}")
        return {k: _convert(args[1], v, f"{place}.{k}".lstrip(".")) for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        remedy = (
            "; write it without quotes" if isinstance(value, str) and kind in (int, float) else ""
        )
        raise UserError(f"{place}: expected {kind.__name__}, got {value!r}{remedy}")
    return value


def _convert_dataclass(cls: Any, value: Any, place: str, also: tuple[str, ...] = ()) -> Any:
    if not isinstance(value, dict):
        raise UserError(f"{place or cls.__name__}: expected a table, got {value!r}")
    at = f"{place}." if place else ""
    converted = _convert_fields(cls, value, at, also)
    for f in dataclasses.fields(cls):
        missing = (
            f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        )
        if missing and f.name not in value:
            raise UserError(f"{at}{f.name}: missing; add it")
    try:
        return cls(**converted)
    except UserError as error:
        raise UserError(f"{at}{error}") from None


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """Returns the types of a config's fields, which take long to find."""
    return typing.get_type_hints(cls, include_extras=True)


def _convert_fields(
    cls: Any, value: dict[str, Any], at: str, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    hints = type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    of_extensions = extensions_field(cls)
    tables: list[str] = []
    if of_extensions:
        del fields[of_extensions]
        tables = settings_names()
    for key in value:
        if key not in fields and key not in tables:
            raise UserError(f"{at}{key}: unknown key{suggest(key, [*also, *fields, *tables])}")
    # in the order of the class: members are loaded whose files declare what later fields name
    converted = {
        k: _convert(hints[k], _named(hints[k], f, value[k]), at + k)
        for k, f in fields.items()
        if k in value
    }
    if of_extensions:
        set_here = {k: settings_class(k) for k in tables if k in value}
        settings = {k: _convert(kind, value[k], at + k) for k, kind in set_here.items()}
        converted[of_extensions] = {k: v for k, v in settings.items() if v != set_here[k]()}
    return converted


def extensions_field(cls: Any) -> str | None:
    """Returns the name of the field that has the settings of extensions, see `OfExtensions`."""
    kinds = type_hints(cls).items()
    return next((name for name, kind in kinds if OfExtensions() in typing.get_args(kind)[1:]), None)


def _named(kind: Any, f: dataclasses.Field[Any], value: Any) -> Any:
    """A member's settings without its name mean the field's default member."""
    family = family_of(kind)
    if family and isinstance(value, dict) and f.default_factory is not dataclasses.MISSING:
        return {"name": family.name_of(f.default_factory()), **value}
    return value


@functools.cache
def family_of(kind: Any) -> Family | None:
    """Returns the family that a field's annotation names."""
    return next((a for a in typing.get_args(kind)[1:] if isinstance(a, Family)), None)


def named(cls: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted name with {"model.name": "dlrm"} for {"model": "dlrm"}: a bare
    word names a member. Earlier names of settings become those of today.

    cls: the config that they are of.

    Raises:
        UserError: when a setting has its earlier name and that of today.
    """
    if extensions_field(cls):
        settings = with_names_of_today(settings)

    def is_member(path: list[str]) -> bool:
        kind: Any = cls
        for part in path:
            kind = _kind_of_field(kind, part)
        return _is_named(kind) or family_of(kind) is not None

    bare = {
        key
        for key, value in settings.items()
        if isinstance(value, str) and is_member(key.split("."))
    }
    return {f"{key}.name" if key in bare else key: value for key, value in settings.items()}


def _kind_of_field(cls: Any, name: str) -> Any:
    """Returns the type of a field of a config, or of an extension's settings; None where there is
    none.
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return None
    if extensions_field(cls) and name in settings_names():
        return settings_class(name)
    return type_hints(cls).get(name)


def _is_named(kind: Any) -> bool:
    """Whether it is a config that a name alone makes."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and "name" in type_hints(kind)


def _convert_member(family: Family, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        if value is None or dataclasses.is_dataclass(value):
            return value
        if not isinstance(value, str):
            raise UserError(f"{place}: expected a name or a table with a name, got {value!r}")
        value = {"name": value}
    if "name" not in value:
        raise UserError(f"{place}.name: missing; one of {', '.join(family.names())}")
    rest = {k: v for k, v in value.items() if k != "name"}
    return _convert_dataclass(family.config(value["name"], f"{place}.name"), rest, place, ("name",))


def to_dict(
    config: Any, *, unset: bool = False, only: Container[str] | None = None
) -> dict[str, Any]:
    """Returns plain data that `from_dict` reads back to an equal config; a family member gets its
    name.

    unset: keeps fields that are None. By default they are left out, because TOML has no None. only:
    these fields.
    """
    hints = type_hints(config.__class__)
    of_extensions = extensions_field(config.__class__)
    out: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name == of_extensions:
            out |= {} if only is not None else _plain(hints[f.name], value, unset)
        elif (only is None or f.name in only) and (value is not None or unset):
            out[f.name] = _plain(hints[f.name], value, unset)
    return out


def _plain(kind: Any, value: Any, unset: bool) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        family = family_of(kind)
        return ({"name": family.name_of(value)} if family else {}) | to_dict(value, unset=unset)
    item_kind = ([arg for arg in typing.get_args(kind) if arg is not ...] or [Any])[-1]
    if isinstance(value, (list, tuple)):
        return [_plain(item_kind, v, unset) for v in value]
    if isinstance(value, dict):
        return {k: _plain(item_kind, v, unset) for k, v in value.items()}
    return value


def flatten(data: Any, place: str = "") -> dict[str, Any]:
    """Returns nested plain data as dotted name -> leaf, with lists for tuples."""
    if isinstance(data, Mapping):
        leaves: dict[str, Any] = {}
        for key, value in data.items():
            leaves |= flatten(value, f"{place}.{key}".lstrip("."))
        return leaves
    return {place: list(data) if isinstance(data, tuple) else data}


def differences(left: Any, right: Any) -> list[tuple[str, Any, Any]]:
    """Returns the dotted name, the left value and the right one of every leaf that differs, in the
    order of names; None for no value.
    """
    left_leaves = flatten(left)
    right_leaves = flatten(right)
    names = sorted(left_leaves.keys() | right_leaves.keys())
    pairs = [(name, left_leaves.get(name), right_leaves.get(name)) for name in names]
    return [(name, left, right) for name, left, right in pairs if left != right]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Returns what a TOML file says; UserError with file and line when it is absent or
    malformed.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def write_toml(data: Mapping[str, Any], *, header: str = "") -> str:
    """Returns nested plain data as TOML text for people: scalars first, each innermost table on one
    line.
    """
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    _write_table(data, "", lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: Mapping[str, Any], name: str, lines: list[str]) -> None:
    def is_leaf(value: Any) -> bool:
        return not isinstance(value, Mapping) or (
            name != "" and not any(isinstance(v, Mapping) for v in value.values())
        )

    leaves = {k: v for k, v in table.items() if is_leaf(v)}
    if name and (leaves or not table):
        lines += ["", f"[{name}]"]
    if leaves:
        width = max(len(_key(k)) for k in leaves)
        lines += [f"{_key(k):<{width}} = {_value(v)}" for k, v in leaves.items()]
    for k, v in table.items():
        if k not in leaves:
            _write_table(v, f"{name}.{_key(k)}" if name else _key(k), lines)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "a").replace("-", "a").isalnum()
    return key if bare else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, (list, tuple)):
        if len(value) > 1 and isinstance(value[0], Mapping):  # a table on each line
            return "[\n" + "".join(f"  {_value(v)},\n" for v in value) + "]"
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    return repr(value)  # repr keeps every bit of a float; 1e-06, inf and nan are TOML too


def _text(text: str) -> str:
    # TOML strings may not hold DEL
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
