"""Operators, row formats and row rules.

Each operator has a folder. Its `reference.py` is the definition, and its C++ does the same, faster. The argument `impl`
names the implementation everywhere: "reference", "cpp", or "auto". "auto" is the compiled kernels for CPU tensors if
they are built, else the reference. The compiled kernels are in one library, which `make setup` builds.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import torch

from sparrow.core.errors import UserError

Impl = Literal["auto", "reference", "cpp"]

_problem: str | None = None  # None: not tried yet; "": loaded; else why there is no library
_warned = False


def missing() -> str:
    """Returns why the compiled kernels cannot be used, or "" when they are loaded; the first call loads them."""
    global _problem
    if _problem is None:
        library = next(Path(__file__).parent.glob("_cpp*.so"), None)
        try:
            if library is None:
                _problem = "the compiled kernels are not built"
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


def resolve(impl: Impl, device: torch.device) -> Literal["reference", "cpp"]:
    """Returns the implementation to run for tensors on `device`.

    "auto" falls back to the reference. If only the library is missing, it says so once.

    Raises:
        UserError: when "cpp" is asked for and cannot run.
    """
    global _warned
    if impl not in ("auto", "reference", "cpp"):
        raise UserError(f"impl: {impl!r} is not one of 'auto', 'reference', 'cpp'")
    if impl == "reference" or (impl == "auto" and device.type != "cpu"):
        return "reference"
    if device.type != "cpu":
        raise UserError(f"impl: 'cpp' runs on the CPU and the tensors are on {device}; use impl='auto'")
    if not (problem := missing()):
        return "cpp"
    if impl == "cpp":
        raise UserError(f"impl: 'cpp', but {problem}; build them with `make setup` or use impl='auto'")
    if not _warned:
        _warned = True
        warnings.warn(f"{problem}: the slower reference runs instead; build them with `make setup`", stacklevel=2)
    return "reference"


__all__ = ["Impl", "let_go", "missing", "resolve"]
