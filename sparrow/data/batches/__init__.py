"""Prepared log -> batches."""

from typing import TYPE_CHECKING

from sparrow.core.on_use import loaded_on_use

__all__ = ["repeats"]

if TYPE_CHECKING:
    from sparrow.data.batches import repeats
else:
    __getattr__ = loaded_on_use(__name__, __all__)
