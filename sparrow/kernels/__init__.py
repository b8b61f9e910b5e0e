"""Operators, row formats and row rules.

Each operator has a folder. Its `reference.py` is the definition, and its other implementations do
the same, faster. The argument `impl` names the implementation everywhere: "reference", "cpp",
"triton", or "auto". "auto" is the compiled kernels for CPU tensors if they are built, the Triton
kernels for GPU tensors if the operator has some and triton is installed, else the reference; within
`torch.export` it is the reference. The compiled kernels are in one library, which `make setup`
builds. Triton is an extra.

Imports: numerics and below. Imported by: distributed and above.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from sparrow.core.errors import UserError

Impl = Literal["auto", "reference", "cpp", "triton"]

_problem: str | None = None  # None: not tried yet; "": loaded; else why there is no library
_warned: set[str] = set()


def missing() -> str:
    """Returns why the compiled kernels cannot be used, or "" when they are loaded; the first call
    loads them.
    """
    global _problem
    if _problem is None:
        library = next(Path(__file__).parent.glob("_cpp*.so"), None)
        try:
            if library is None:
                why = Path(__file__).with_name("_not_built.txt")  # setup.py writes it
                reason = f" ({why.read_text().strip()})" if why.exists() else ""
                _problem = f"the compiled kernels are not built{reason}"
            else:
                torch.ops.load_library(library)
                _problem = ""
        except OSError as error:
            _problem = f"the compiled kernels do not load ({str(error).splitlines()[0]})"
    return _problem


def let_go() -> None:
    """Give memory back to the system that the compiled kernels keep for the next step."""
    if not missing():
        torch.ops.sparrow.let_go()


def close(operator: Callable[[int], None], handle: int) -> None:
    """Call an operator that frees what a handle names.

    Garbage is also freed while this thread traces a program, which must neither record the call nor
    only pretend it.
    """
    with _disable_current_modes():
        operator(handle)


def is_interpreted() -> bool:
    """Returns whether Triton kernels that are defined now run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def missing_triton(device: torch.device) -> str:
    """Returns why Triton kernels cannot run on tensors on `device`, or "" when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install it with `pip install sparrow-rec[triton]`"
    if device.type == "cpu" and not is_interpreted():
        return (
            "triton runs on a GPU; on a CPU set TRITON_INTERPRET=1 before the start, which is slow"
            " and meant for tests"
        )
    if device.type != "cpu" and is_interpreted():
        return "TRITON_INTERPRET is set, which is for tensors on a CPU; unset it"
    return ""


def resolve(
    impl: Impl, device: torch.device, *, has_triton: bool = False
) -> Literal["reference", "cpp", "triton"]:
    """Returns the implementation to run for tensors on `device`.

    "auto" falls back to the reference. If only the library or triton is missing, it says so once.

    Args:
        impl: what is asked for.
        device: where the tensors are.
        has_triton: whether the operator has Triton kernels.

    Raises:
        UserError: when "cpp" or "triton" is asked for and cannot run.
    """
    if impl not in ("auto", "reference", "cpp", "triton"):
        raise UserError(f"impl: {impl!r} is not one of 'auto', 'reference', 'cpp', 'triton'")
    if impl == "triton":
        if not has_triton:
            raise UserError(
                "impl: 'triton', but this operator has no Triton kernels; use impl='auto'"
            )
        if problem := missing_triton(device):
            raise UserError(f"impl: 'triton', but {problem}, or use impl='auto'")
        return "triton"
    if impl == "cpp":
        if device.type != "cpu":
            raise UserError(
                f"impl: 'cpp' runs on the CPU and the tensors are on {device}; use impl='auto'"
            )
        if problem := missing():
            raise UserError(
                f"impl: 'cpp', but {problem}; build them with `make setup` or use impl='auto'"
            )
        return "cpp"
    # what is exported runs where our operators are not
    if impl == "reference" or torch.compiler.is_exporting():
        return "reference"
    if device.type == "cpu":
        if not (problem := missing()):
            return "cpp"
        _say(f"{problem}: the slower reference runs instead; build them with `make setup`")
    elif device.type == "cuda" and has_triton:
        if not (problem := missing_triton(device)):
            return "triton"
        _say(f"the slower reference runs on {device}: {problem}")
    return "reference"


class Operator:
    """The implementations of an operator: modules "reference", "cpp" and "triton" of its folder,
    alike in signature.

    A module is loaded when it is first chosen. What `torch.compile` must know of an operator stands
    in the module too.

    Args:
        package: the folder's, `__name__` in its `__init__.py`.
        has_triton: whether it has Triton kernels.
    """

    def __init__(self, package: str, *, has_triton: bool = False) -> None:
        self._package = sys.modules[package]
        self._has_triton = has_triton

    def choose(self, impl: Impl, device: torch.device) -> ModuleType:
        """Returns the implementation for tensors on `device`; see `resolve`."""
        return self.load(resolve(impl, device, has_triton=self._has_triton))

    def load(self, name: Literal["reference", "cpp", "triton"]) -> ModuleType:
        """Returns an implementation that can run."""
        if not hasattr(self._package, name):
            _import(f"{self._package.__name__}.{name}")
        module: ModuleType = getattr(self._package, name)
        return module


def _import(module: str) -> bool:
    importlib.import_module(module)
    return True


# Imported, not traced, where `torch.compile` chooses first. `torch.compiler.assume_constant_result`
# sets the same, and imports the compiler for it: 5 s and 140 MB that no other run pays.
_import._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _say(problem: str) -> None:
    """Warn of a problem, once."""
    if problem not in _warned:
        _warned.add(problem)
        warnings.warn(problem, stacklevel=3)


__all__ = [
    "Impl",
    "Operator",
    "close",
    "is_interpreted",
    "let_go",
    "missing",
    "missing_triton",
    "resolve",
]
