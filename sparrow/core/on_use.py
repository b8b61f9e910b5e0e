"""Files of a package that are loaded when they are first used: what a rare log or run needs, others
do not load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

NONE: Mapping[str, str] = MappingProxyType({})


def loaded_on_use(
    package: str, files: Collection[str], functions: Mapping[str, str] = NONE
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, with which `package.name` loads the file `name` of
    its folder.

    With `functions`, `package.name` is also a function of a file that is loaded then.

    The package imports these files for type checkers alone:

        __all__ = ["rare"]

        if TYPE_CHECKING:
            from package import rare
        else:
            __getattr__ = loaded_on_use(__name__, __all__)

    Args:
        package: its name.
        files: their names.
        functions: name of a function -> the file that has it.
    """

    def load(name: str) -> Any:
        if name in functions:
            return getattr(import_module(f"{package}.{functions[name]}"), name)
        if name not in files:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return load
