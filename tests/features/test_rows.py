from __future__ import annotations

import pyarrow as pa

from sparrow.features.rows import batches
from sparrow.features.schema import Column, Encoding, Schema


def test_only_dense_or_only_ids() -> None:
    table = pa.table({"x": pa.array([1.0, 2.0], pa.float32())})
    (batch,) = batches(Schema(columns={"x": Column(kind="numeric")}), table, 9)
    assert (batch.dense_BC.tolist(), batch.ids.keys) == ([[1.0], [2.0]], ())
    schema = Schema(
        columns={"c": Column(kind="categorical", table="c")}, encodings={"c": Encoding()}
    )
    (batch,) = batches(schema, pa.table({"c": pa.array([4, 5])}), 9)
    assert (tuple(batch.dense_BC.shape), batch.ids.values_N.tolist()) == ((2, 0), [4, 5])
