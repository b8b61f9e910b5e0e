"""The fields of dataclasses as the keywords of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def keywords(*settings: type) -> Callable[[F], F]:
    """Returns a decorator for a function with **settings: its signature shows the fields of the
    dataclasses instead.
    """

    def show(function: F) -> F:
        shown = inspect.signature(function)
        own = [p for p in shown.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        for group in settings:
            own.extend(inspect.signature(group).parameters.values())
        vars(function)["__signature__"] = shown.replace(parameters=own)
        return function

    return show
