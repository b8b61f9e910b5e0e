"""Records and protocols that everything else stands on.

Shape suffixes, used on every tensor name in the library:
`B` samples, `F` features, `D` dim, `N` values (ids), `C` dense columns, `T` tasks, `L` tokens,
`R` rows of a table, `U` unique rows, `W` ranks; `B1` means B + 1 (offsets).
"""

from sparrow.core.batch import Batch, Jagged, KeyedJagged
from sparrow.core.chunk import Chunk
from sparrow.core.errors import UserError
from sparrow.core.progress import Progress

__all__ = ["Batch", "Chunk", "Jagged", "KeyedJagged", "Progress", "UserError"]
