from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from sparrow.data.logs.read import open_log
from sparrow.features.schema import Source
from tests.data.logs.reading import write


def test_repair_leaves_out_and_counts(tmp_path: Path) -> None:
    text = 'a,b,c\n1,x,2\n\n"3","y\nz",4\n5,short\n6,w,seven\n8,v,9,10\n11,u,inf\n'
    log = open_log([write(tmp_path / "x.csv", text)], Source(bad_rows="repair"))
    types = {"a": pa.int64(), "b": pa.string(), "c": pa.float64()}
    want = [(1, "x", 2.0), (3, "y\nz", 4.0), (6, "w", None), (11, "u", None)]
    for _ in range(2):  # each pass counts anew
        assert [
            tuple(r.values()) for r in pa.Table.from_batches(log.batches(types)).to_pylist()
        ] == want
        assert (log.repairs.rows, log.repairs.left_out) == (4, 2)
    x = tmp_path / "x.csv"
    assert log.notes() == [
        f"{x}: 2 lines left out (wrong number of cells), first at line 6: '5,short'",
        f"{x}: 2 cells of 'c' taken for missing, first at line 7: 'seven'",
        f"{x}: 2 lines are blank or lie within a quoted cell; they are no rows",
    ]
