"""Raw logs: CSV and its kin, Parquet and tables in memory, as record batches; a schema inferred; a
log that is made.
"""

from typing import TYPE_CHECKING

from sparrow.core.on_use import loaded_on_use

__all__ = ["archives", "folders", "parquet", "partitions", "places", "tables"]

if TYPE_CHECKING:
    from sparrow.data.logs import archives, folders, parquet, partitions, places, tables
else:
    __getattr__ = loaded_on_use(__name__, __all__)
