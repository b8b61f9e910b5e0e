"""The same model on many ranks: plans, and the tables that a plan puts in the place of a model's
own.

Imports: data, embeddings, interactions, optimizers and below. Imported by: trained and above.
"""

from sparrow.sharding.exchange import Codecs
from sparrow.sharding.layout import (
    Layout,
    Shard,
    column_wise,
    data_parallel,
    grid,
    hosts_row_wise,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from sparrow.sharding.plan import plan, summary
from sparrow.sharding.tables import ShardedExchange, shard

__all__ = [
    "Codecs",
    "Layout",
    "Shard",
    "ShardedExchange",
    "column_wise",
    "data_parallel",
    "grid",
    "hosts_row_wise",
    "plan",
    "row_wise",
    "shard",
    "summary",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
]
