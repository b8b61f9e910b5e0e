"""ids -> vectors: a table is addressing x row format x placement x fused rule (each chosen by itself)."""

from sparrow.embeddings.addressing import Addressing, Direct, Hashed, LogTable, Numbering
from sparrow.embeddings.choices import TableChoices
from sparrow.embeddings.records import RowGradients, RowRecords
from sparrow.embeddings.spec import Component, Feature, TableSpec
from sparrow.embeddings.stores import Folder, on_ssd, rows_on, stored_in, unallocated
from sparrow.embeddings.tables import EmbeddingTables, Handle

__all__ = [
    "Addressing",
    "Component",
    "Direct",
    "EmbeddingTables",
    "Feature",
    "Folder",
    "Handle",
    "Hashed",
    "LogTable",
    "Numbering",
    "RowGradients",
    "RowRecords",
    "TableChoices",
    "TableSpec",
    "on_ssd",
    "rows_on",
    "stored_in",
    "unallocated",
]
