"""Tables of a model folder that are read from an SSD, with the rows that are used most in memory.

`blocks.py` writes a table's rows as blocks, once. `rows.py` reads them, and keeps some. `pooled.py`
keeps the vectors of whole lists. `lookup.py` answers the lookups of a batch, whose missing rows of
all tables are read at the same time. `settings.py` says which tables these are.
"""

from sparrow.extensions.tiers.serving.lookup import OnSsd
from sparrow.extensions.tiers.serving.settings import Ssd

__all__ = ["OnSsd", "Ssd"]
