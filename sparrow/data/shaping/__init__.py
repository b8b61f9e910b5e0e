"""Rows of a raw log into others: repaired cells, columns of structs, rows of candidates, joined
side tables.
"""

from typing import TYPE_CHECKING

from sparrow.core.on_use import loaded_on_use

__all__ = ["candidates", "conversion", "joins", "structs", "vectors"]

if TYPE_CHECKING:
    from sparrow.data.shaping import candidates, conversion, joins, structs, vectors
else:
    __getattr__ = loaded_on_use(__name__, __all__)
