"""Click log -> prepared log -> batches. The schema needs no package; the rest is loaded, with pyarrow, when used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparrow.data._rows import batches
    from sparrow.data.groups import Repeats, repeats
    from sparrow.data.inferred import infer
    from sparrow.data.loader import Dataset, Loader, open
    from sparrow.data.prepared import Prepared, prepare
    from sparrow.data.read import open_log, table_log
    from sparrow.data.synthetic import Generated, generate
    from sparrow.data.transformed import Transforms

# No file bears the name of what it exports here: importing it would put the module in the function's place.
_HOMES = {
    "Dataset": "loader",
    "Loader": "loader",
    "Generated": "synthetic",
    "Prepared": "prepared",
    "Repeats": "groups",
    "Transforms": "transformed",
    "batches": "_rows",
    "generate": "synthetic",
    "infer": "inferred",
    "open": "loader",
    "open_log": "read",
    "prepare": "prepared",
    "repeats": "groups",
    "table_log": "read",
}

__all__ = [
    "Dataset",
    "Generated",
    "Loader",
    "Prepared",
    "Repeats",
    "Transforms",
    "batches",
    "generate",
    "infer",
    "open",
    "open_log",
    "prepare",
    "repeats",
    "table_log",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
