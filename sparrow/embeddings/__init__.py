"""ids -> vectors: a table is addressing x row format x placement x fused rule (each chosen by itself)."""

from sparrow.embeddings.addressing import Addressing, Direct, Hashed
from sparrow.embeddings.records import RowGradients, RowRecords, unallocated
from sparrow.embeddings.spec import Feature, TableSpec
from sparrow.embeddings.tables import EmbeddingTables, Handle

__all__ = [
    "Addressing", "Direct", "EmbeddingTables", "Feature", "Handle", "Hashed", "RowGradients", "RowRecords", "TableSpec",
    "unallocated",
]  # fmt: skip
