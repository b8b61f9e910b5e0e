from __future__ import annotations

import inspect
from typing import TypeVar

import torch
from torch.optim import Optimizer

T = TypeVar("T", bound=Optimizer)

_GUARDED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def lean(kind: type[T]) -> type[T]:
    """Returns the same optimizer class without the wrappers that torch puts around its methods for
    `torch.compile`.

    Sparrow compiles only models. The first call of a wrapped method imports the compiler, which
    takes about a second and 70 MB.
    """
    plain = {name: inspect.unwrap(getattr(kind, name)) for name in _GUARDED}
    return type(
        kind.__name__, (kind,), {"step": torch.no_grad()(inspect.unwrap(kind.step)), **plain}
    )
