from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.core import KeyedJagged, UserError
from sparrow.embeddings import Direct, EmbeddingTables, Feature, Placement, TableSpec
from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores.mapped import LeveledRows, MappedStore
from sparrow.kernels.formats import fp32, int8
from sparrow.kernels.rules import sgd

ROWS, BELOW, NONE = 12, 9, torch.zeros(0, dtype=torch.int64)
ABOVE = {"a": torch.tensor([0, 4, 9, 10, 11]), "b": torch.tensor([9, 10, 11]), "c": NONE}


def tables(format: Any, levels: Mapping[str, LeveledRows]) -> EmbeddingTables:
    """Three tables, of which two have rows on a second level; levels: table -> its rows."""

    def stored(component: Component, rows: int, dim: int) -> MappedStore:
        return MappedStore(component, levels[component.name])

    specs = [
        TableSpec(name=n, dim=8, addressing=Direct(ROWS), format=format, rule=sgd.Config())
        for n in ABOVE
    ]
    features = [Feature(name=f"{n}{i}", table=n, pooling="sum") for n in ABOVE for i in range(2)]
    return EmbeddingTables(specs, features, mode="off", placement=Placement(store=stored)).eval()


def levels(format: Any) -> tuple[dict[str, dict[str, Tensor]], dict[str, LeveledRows]]:
    """All rows as they are to be read; and on two levels, the first with other records of those
    above.
    """
    random = torch.Generator().manual_seed(0)
    whole = {n: format.encode(torch.randn(ROWS, 8, generator=random), None) for n in ABOVE}
    below = {}
    for name, rows_U in ABOVE.items():
        old = {n: of.clone()[: BELOW if len(rows_U) else ROWS] for n, of in whole[name].items()}
        for of in old.values():
            of[rows_U[rows_U < len(of)]] = 77
        below[name] = LeveledRows(
            fields=old, rows_U=rows_U, above={n: of[rows_U] for n, of in whole[name].items()}
        )
    return whole, below


def batch(rows: int) -> KeyedJagged:
    keys = tuple(f"{n}{i}" for n in ABOVE for i in range(2))
    lengths = torch.tensor([1, 2, 0, 3] * len(keys))
    values = torch.randint(
        0, rows, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1)
    )
    return KeyedJagged(keys=keys, values_N=values, lengths=lengths)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize(
    "format", [fp32.Config(), int8.Config(rounding="nearest")], ids=["fp32", "int8"]
)
def test_two_levels_are_one_table(format: Any, impl: Any) -> None:
    whole, below = levels(format)
    plain = tables(format, {name: LeveledRows(fields=fields) for name, fields in whole.items()})
    leveled = tables(format, below)
    plain.impl = leveled.impl = impl
    for _ in range(2):
        ids = batch(ROWS)
        for name, vectors in plain(ids).items():
            assert torch.equal(leveled(ids)[name], vectors), name
    for one, other in zip(plain.all_records(), leveled.all_records(), strict=True):
        for at in (slice(None), slice(3, 10), torch.tensor([11, 0, 4, 3])):
            mine, its = one.store.read(at), other.store.read(at)
            assert mine.keys() == its.keys() and all(torch.equal(mine[n], its[n]) for n in mine)


def test_rows_do_not_learn() -> None:
    leveled = tables(fp32.Config(), levels(fp32.Config())[1])
    leveled.train().mode = "fused"
    with pytest.raises(UserError, match="'a': a model that was exported does not learn"):
        leveled(batch(ROWS))
