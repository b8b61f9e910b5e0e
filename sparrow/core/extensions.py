"""Extensions: capabilities that a run or a preparation may switch on. What is used of one is
loaded; of the others, nothing is.
"""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from sparrow.core.errors import UserError

PACKAGE = "sparrow.extensions"


def _never(run: Any, options: Collection[str]) -> bool:
    return False


def _adapts_none(run: Any) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What the `__init__.py` of a folder in `sparrow/extensions` says of it, under the name
    `EXTENSION`.

    Args:
        members: package of a family -> name of a member -> its module in this folder, with a
            `Config`.
        settings: whether the module `settings` of the folder has a `Config`, a frozen dataclass
            with a default for every field. A run's settings have it as a table with the name of
            the folder. A table in which all has its default is as none.
        earlier_names: dotted name of a setting before this `Config` had it -> its field. The
            earlier name is still read.
        may_differ: fields that each rank may have for itself, such as the name of a folder.
        applies: whether the extension goes along with a run that sets nothing of it, by the other
            settings and by what else was asked for. The module `callback` of the folder then has a
            function `callback(job)`.
        calls_back: whether it has that module.
        elsewhere: name of a file in a run's directory, which says that the run has more elsewhere
            -> the module that knows what. It has `forget(run_dir)`, which removes that, and
            `hand_over(run_dir, heir)`, which gives it to another directory.
        files: names of the files that it writes into a run's directory. A new run there drops
            those of an earlier one.
        adapts: whether it changes the model or the dense optimizer of a run, by its settings. The
            module `adaptation` then has functions `adapt_model(model, run)` and
            `adapt_optimizer(optimizer, run)`, which are called before anything is loaded into them.
        tries: name of a model -> what a search tries for it beside the defaults, by dotted name,
            in order. The first is {}.
        plans: whether the module `plan` has `Hooks`, see `training.plan.PlanHooks`. They are asked
            of runs to which the extension applies.
        engine: what the flag of its engine says, see `sparrow.data.preparation.engine`. The flag
            of `sparrow prepare` and the argument of `data.prepare` are called as the folder, and
            get where the engine works, such as an address. The module `engine` then has a function
            `open_engine(place, schema, logs, work, progress)`.
    """

    members: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: bool = False
    earlier_names: Mapping[str, str] = field(default_factory=dict)
    may_differ: Collection[str] = ()
    applies: Callable[[Any, Collection[str]], bool] = _never
    calls_back: bool = True
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    files: Collection[str] = ()
    adapts: Callable[[Any], bool] = _adapts_none
    tries: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    plans: bool = False
    engine: str | None = None


@functools.cache
def extensions() -> Mapping[str, Extension]:
    """Returns name -> extension, in the order of names. Only their `__init__.py` are loaded."""
    folders = tuple(importlib.import_module(PACKAGE).__path__)
    names = sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg)
    return {name: importlib.import_module(f"{PACKAGE}.{name}").EXTENSION for name in names}


def extension_members(family: str) -> Mapping[str, str]:
    """Returns name -> module of the members that extensions add to a family. family: its
    package.
    """
    members: dict[str, str] = {}
    for name, extension in extensions().items():
        for member, module in extension.members.get(family, {}).items():
            members[member] = f"{PACKAGE}.{name}.{module}"
    return members


def settings_names() -> list[str]:
    """Returns the names of the extensions that have settings."""
    return [name for name, extension in extensions().items() if extension.settings]


def settings_class(name: str) -> type:
    """Returns the `Config` of an extension that has settings."""
    config: type = importlib.import_module(f"{PACKAGE}.{name}.settings").Config
    return config


def extension_of(settings: object) -> str:
    """Returns the name of the extension whose `Config` made `settings`."""
    return type(settings).__module__.removeprefix(f"{PACKAGE}.").partition(".")[0]


def take_earlier_names(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns settings without those that have an earlier name, and the latter by their dotted
    name of today.

    Args:
        settings: of a run, nested or by dotted name.

    Raises:
        UserError: when a setting has both names.
    """
    rest = copy.deepcopy(dict(settings))
    renamed = {}
    for name, extension in extensions().items():
        for earlier, setting in extension.earlier_names.items():
            table, key = _place(rest, earlier)
            if key not in table:
                continue
            today = f"{name}.{setting}"
            table_of_today, key_of_today = _place(rest, today)
            if key_of_today in table_of_today:
                raise UserError(f"{earlier}, {today}: two names of one setting; give {today} alone")
            renamed[today] = table.pop(key)
    return rest, renamed


def with_names_of_today(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted name, all with the names of today. See `take_earlier_names`."""
    rest, renamed = take_earlier_names(settings)
    return {**rest, **renamed}


def _place(settings: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Returns the table in which a setting is, if it is set, and its key there."""
    first, _, rest = name.partition(".")
    inner = settings.get(first)
    if name in settings or not rest or not isinstance(inner, dict):
        return settings, name
    return _place(inner, rest)


def callback_modules(run: Any, options: Collection[str]) -> list[ModuleType]:
    """Returns the modules `callback` of the extensions that go along with a run, in the order of
    their names.

    Args:
        run: its settings.
        options: what else was asked for, such as "probe".
    """
    return _modules(
        "callback",
        lambda name: extensions()[name].calls_back and _goes_along(name, run, options),
    )


def _goes_along(name: str, run: Any, options: Collection[str]) -> bool:
    return name in run.extensions or extensions()[name].applies(run, options)


def adapt_model(model: Any, run: Any) -> None:
    """Let the extensions that change the model of a run do so, in the order of their names. run:
    its settings.
    """
    for module in _modules("adaptation", lambda name: extensions()[name].adapts(run)):
        module.adapt_model(model, run)


def adapt_optimizer(optimizer: Any, run: Any) -> None:
    """Let them change the dense optimizer."""
    for module in _modules("adaptation", lambda name: extensions()[name].adapts(run)):
        module.adapt_optimizer(optimizer, run)


def plan_modules(run: Any, options: Collection[str]) -> list[ModuleType]:
    """Returns the modules `plan` of the extensions that go along with a run. run, options: see
    `callback_modules`.
    """
    return _modules(
        "plan", lambda name: extensions()[name].plans and _goes_along(name, run, options)
    )


def all_plan_modules() -> list[ModuleType]:
    """Returns the modules `plan` of all extensions."""
    return _modules("plan", lambda name: extensions()[name].plans)


def engine_texts() -> dict[str, str]:
    """Returns name -> what its flag says of each engine, see `Extension.engine`."""
    pairs = extensions().items()
    return {name: extension.engine for name, extension in pairs if extension.engine}


def engine_module(name: str) -> ModuleType:
    """Returns the module that opens the engine of an extension."""
    return importlib.import_module(f"{PACKAGE}.{name}.engine")


def tries_of_all() -> dict[str, tuple[Mapping[str, Any], ...]]:
    """Returns name of a model -> what a search tries for it, see `Extension.tries`."""
    by_model: dict[str, tuple[Mapping[str, Any], ...]] = {}
    for extension in extensions().values():
        by_model |= extension.tries
    return by_model


def files_of_all() -> list[str]:
    """Returns the names of the files that extensions write into a run's directory."""
    return [name for extension in extensions().values() for name in extension.files]


def modules_elsewhere(run_dir: Path) -> list[ModuleType]:
    """Returns the modules that know what a run has outside its directory, see
    `Extension.elsewhere`; most have none.
    """
    modules = []
    for name, extension in extensions().items():
        for file, module in extension.elsewhere.items():
            if (run_dir / file).exists():
                modules.append(importlib.import_module(f"{PACKAGE}.{name}.{module}"))
    return modules


def _modules(name: str, is_used: Callable[[str], bool]) -> list[ModuleType]:
    """Returns a module of each extension that is used, in the order of their names."""
    used = [folder for folder in extensions() if is_used(folder)]
    return [importlib.import_module(f"{PACKAGE}.{folder}.{name}") for folder in used]
