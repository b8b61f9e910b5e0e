"""Records and protocols that everything else stands on.

Shape suffixes, used on every tensor name in the library:
`B` samples, `F` features, `D` dim, `N` values (ids), `C` dense columns, `T` tasks, `L` tokens,
`R` rows of a table, `U` unique rows, `W` ranks; `B1` means B + 1 (offsets). Docstrings say what
others mean.

Imports: nothing. Imported by: numerics and above.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparrow.core.errors import UserError
from sparrow.core.progress import Progress

if TYPE_CHECKING:
    from sparrow.core.batch import Batch, Jagged, KeyedJagged
    from sparrow.core.chunk import Chunk

__all__ = ["Batch", "Chunk", "Jagged", "KeyedJagged", "Progress", "UserError"]

_WITH_TORCH = {"Batch": "batch", "Jagged": "batch", "KeyedJagged": "batch", "Chunk": "chunk"}


def __getattr__(name: str) -> Any:  # preparing a log should not wait for torch
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
