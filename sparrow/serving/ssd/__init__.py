"""Tables of a model folder that are read from an SSD, with the rows that are used most in memory.

`blocks.py` writes a table's rows as blocks, once. `rows.py` reads them, and keeps some. `pooled.py` keeps the vectors
of whole lists. `lookup.py` answers the lookups of a batch, whose missing rows of all tables are read at the same time.
`hot.py` finds the rows with which caches begin.
"""

from sparrow.serving.ssd.blocks import UnreadableError
from sparrow.serving.ssd.hot import hot_rows
from sparrow.serving.ssd.lookup import OnSsd, put_on_ssd
from sparrow.serving.ssd.settings import Ssd

__all__ = ["OnSsd", "Ssd", "UnreadableError", "hot_rows", "put_on_ssd"]
