"""C++ follows the reference through any sequence of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.kernels import embedding_bag
from sparrow.kernels.embedding_bag import Lookup
from tests.kernels.embedding_bag.cases import (
    DIMS,
    RULES,
    Shape,
    assert_close,
    assert_same,
    build,
    built,
    look,
    looked_up,
    updated,
)


@st.composite
def shapes(draw: st.DrawFn, rows: tuple[int, ...]) -> Shape:
    """A batch for tables of these sizes."""
    lengths = st.lists(st.integers(0, 6), max_size=6)
    keys = tuple(draw(st.lists(lengths, min_size=1, max_size=4)))
    lookups: list[Lookup] = []
    inverses: list[tuple[int, int]] = []
    for k in range(len(keys)):
        pooling = draw(st.sampled_from(["sum", "mean", "none"]))
        inverse = -1
        if pooling != "none" and keys[k] and draw(st.booleans()):
            inverse = len(inverses)
            inverses.append((draw(st.integers(1, 9)), len(keys[k])))
        table = draw(st.integers(0, len(rows) - 1))
        samples = (
            inverses[inverse][0]
            if inverse >= 0
            else sum(keys[k])
            if pooling == "none"
            else len(keys[k])
        )
        f = look(
            pooling,
            table=table,
            key=k,
            inverse=inverse,
            output=lookups[-1].output if lookups else 0,
        )
        before = lookups and _samples(lookups[-1], keys, inverses)
        lookups.append(f if not lookups or before == samples else replace(f, output=f.output + 1))
    return Shape(
        keys=keys,
        lookups=tuple(lookups),
        rows=rows,
        weighted=draw(st.booleans()),
        inverses=tuple(inverses),
    )


def _samples(f: Lookup, keys: Sequence[Sequence[int]], inverses: Sequence[tuple[int, int]]) -> int:
    if f.inverse >= 0:
        return inverses[f.inverse][0]
    return sum(keys[f.key]) if f.pooling == "none" else len(keys[f.key])


@built
@settings(max_examples=40)
@given(data=st.data())
def test_programs(data: st.DataObject) -> None:
    rows = tuple(data.draw(st.lists(st.sampled_from([1, 2, 5, 40]), min_size=1, max_size=3)))
    dims = [data.draw(st.sampled_from(DIMS[:17])) for _ in rows]
    rule, levels = (
        RULES[data.draw(st.sampled_from(list(RULES)))],
        data.draw(st.integers(1, min(rows))),
    )
    tables = build(Shape(keys=([],), rows=rows), dims, rule, levels=levels).tables
    for step in range(data.draw(st.integers(1, 4))):
        shape, apart = data.draw(shapes(rows)), data.draw(st.sampled_from(["", "columns", "rows"]))
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        call = replace(build(shape, dims, rule, seed=step, dtype=dtype, apart=apart), tables=tables)
        assert_same(looked_up(call, "cpp"), looked_up(call, "reference"), "looked up")
        after = updated(call, "reference")
        assert_close(updated(call, "cpp", fused=data.draw(st.booleans())), after, "updated")
        tables = call.copied().tables
        embedding_bag.fused_update(tables, call.grads, call.bags, call.lr_T, impl="reference")
