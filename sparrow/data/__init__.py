"""Click log -> prepared log -> batches.

`logs` reads raw logs and infers a schema, `preparation` makes a prepared log of them, `batches`
reads what that wrote. What is named here is loaded when it is used: opening a prepared log loads
neither of the first two.

Imports: features, layers, losses, metrics and below. Imported by: models, sharding, checkpoint and
above.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparrow.data.batches.dataset import Dataset, open
    from sparrow.data.preparation.job import prepare

_HOMES = {
    "Dataset": "batches.dataset",
    "open": "batches.dataset",
    "prepare": "preparation.job",
}
__all__ = ["Dataset", "open", "prepare"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
