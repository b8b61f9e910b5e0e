"""ids -> vectors: a table is addressing x row format x placement x fused rule (each chosen by
itself).

Imports: features, layers, losses, metrics and below. Imported by: models, sharding, checkpoint and
above.
"""

from typing import TYPE_CHECKING

from sparrow.core.on_use import loaded_on_use
from sparrow.embeddings.addressing import Addressing, Direct, Hashed, LogTable, Numbering
from sparrow.embeddings.choices import TableChoices
from sparrow.embeddings.records import RowGradients, RowRecords
from sparrow.embeddings.spec import ON_CPU, Component, Feature, Placement, TableSpec
from sparrow.embeddings.stores import UNALLOCATED
from sparrow.embeddings.tables import EmbeddingTables, Handle

__all__ = [
    "ON_CPU",
    "UNALLOCATED",
    "Addressing",
    "Component",
    "Direct",
    "EmbeddingTables",
    "Feature",
    "Handle",
    "Hashed",
    "LogTable",
    "Numbering",
    "Placement",
    "RowGradients",
    "RowRecords",
    "TableChoices",
    "TableSpec",
    "admission",
    "combined",
    "compiled",
    "moved_rows",
    "outside_ids",
    "overrides",
]

if TYPE_CHECKING:
    from sparrow.embeddings import admission, combined, compiled, moved_rows, outside_ids, overrides
else:
    __getattr__ = loaded_on_use(__name__, __all__)
