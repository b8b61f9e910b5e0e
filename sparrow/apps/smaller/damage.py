"""What other choices for a table cost in normalised entropy, when rows that are made of the trained
ones are put in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from sparrow.apps.smaller.alternatives import Alternative
from sparrow.core import Chunk
from sparrow.embeddings import Component, EmbeddingTables, RowRecords, TableChoices
from sparrow.embeddings.spec import Cache
from sparrow.kernels import philox
from sparrow.kernels.formats import fp32
from sparrow.kernels.rules import sgd
from sparrow.numerics.rounding import noise
from sparrow.trained.build import build, tables_of
from sparrow.trained.scorer import Restored

BLOCK = 1 << 16  # rows that are rounded at a time


def in_floats(restored: Restored) -> Restored:
    """Returns the same model with the rows of all tables in fp32 and without a cache: any values
    can be put there.

    Ids that have rows keep them.
    """
    before = restored.run.tables
    overrides = tuple(
        replace(o, format=None, rule=None, state=None, cache=None) for o in before.overrides
    )
    plain: TableChoices = replace(
        before,
        format=fp32.Config(),
        rule=sgd.Config(),
        state="fp32",
        cache=Cache(),
        overrides=overrides,
    )
    run = replace(restored.run, tables=plain)
    model = build(run, restored.schema)
    model.load_state_dict(restored.model.state_dict())  # with the clock of ids that come and go
    records = {
        record.name: record
        for tables in tables_of(restored.model)
        for record in tables.all_records()
    }
    for tables in tables_of(model):
        for record in tables.all_records():
            held = records[record.name].fields | {"weight": records[record.name].weight}
            fields = {name: held[name] for name in record.fields}
            record.load_chunk(
                Chunk(
                    table=record.name, rows=(0, record.rows), columns=record.columns, fields=fields
                )
            )
        tables.changed()
    return replace(restored, model=model.eval(), run=run)


class Rebuilt:
    """A model into which compressed rows are put, for as long as it is judged.

    Args:
        restored: the model, see `in_floats`.
        hits: component -> how often the training part looks up each row, int64 [R].
    """

    def __init__(self, restored: Restored, hits: Mapping[str, Tensor]) -> None:
        self.restored = restored
        self._hits = hits
        self._tables: dict[str, tuple[EmbeddingTables, RowRecords]] = {
            record.name: (tables, record)
            for tables in tables_of(restored.model)
            for record in tables.all_records()
        }

    @contextmanager
    def holding(self, chosen: Sequence[Alternative]) -> Iterator[Restored]:
        """Gives the model with the rows of these alternatives, each of another table. Then all rows
        are as before.
        """
        before = []
        try:
            for alternative in chosen:
                tables, record = self._tables[alternative.table]
                weight_RD = record.weight.clone()
                before.append((tables, record, weight_RD))
                _put(
                    tables,
                    record,
                    rebuild_rows(alternative, weight_RD.cpu(), self._hits[alternative.table].cpu()),
                )
            yield self.restored
        finally:
            for tables, record, weight_RD in before:
                _put(tables, record, weight_RD)


def _put(tables: EmbeddingTables, record: RowRecords, weight_RD: Tensor) -> None:
    record.store.write(slice(None), {"weight": weight_RD})
    tables.changed()


def rebuild_rows(alternative: Alternative, weight_RD: Tensor, hits_R: Tensor) -> Tensor:
    """Returns the rows [R, D] as an alternative would give them, made of the trained ones.

    Rows that ids have to share become their mean, by lookups. Fewer columns keep the directions
    with the largest squares, by lookups. Then rows are rounded as the format says. If the table is
    hashed already, its rows take the place of ids: which ids share a row is not known.

    Args:
        alternative: what becomes of the table. Its `how` is "rebuilt".
        weight_RD: the rows of the table, float32.
        hits_R: how often each is looked up.
    """
    assert alternative.how == "rebuilt"
    (part,) = alternative.spec.components
    if part.dim < alternative.spec.dim:
        basis_DK = directions(weight_RD, hits_R, part.dim)
        return round_rows(weight_RD @ basis_DK, part) @ basis_DK.T
    if "addressing" not in alternative.change:
        return round_rows(weight_RD, part)
    (row_R,) = alternative.spec.addressing.rows_of(torch.arange(len(weight_RD)))
    return round_rows(means(weight_RD, hits_R, row_R, part.rows), part)[row_R]


def means(weight_RD: Tensor, hits_R: Tensor, row_R: Tensor, rows: int) -> Tensor:
    """Returns the mean of those that share each row, float32 [rows, D], weighted by lookups where
    there are any.
    """
    hits_R = hits_R.double()
    total_S = torch.zeros(rows, dtype=torch.float64).index_add_(0, row_R, hits_R)
    hits_R = torch.where(total_S[row_R] > 0, hits_R, 1.0)
    total_S = torch.zeros(rows, dtype=torch.float64).index_add_(0, row_R, hits_R)
    share_R1 = (hits_R / total_S[row_R]).float()[:, None]
    return torch.zeros(rows, weight_RD.shape[1]).index_add_(0, row_R, weight_RD * share_R1)


def directions(weight_RD: Tensor, hits_R: Tensor, count: int) -> Tensor:
    """Returns the first right singular vectors [D, count] of rows that are weighted by the roots of
    their lookups.
    """
    if not bool(hits_R.any()):
        hits_R = torch.ones_like(hits_R)
    square_DD = weight_RD.double().T @ (weight_RD.double() * hits_R.double()[:, None])
    return torch.linalg.eigh(square_DD).eigenvectors[:, -count:].float()


def round_rows(values_RD: Tensor, part: Component) -> Tensor:
    """Returns values as lookups read them from rows of a component, float32 [R, D]."""
    key = philox.key_of(0, part.name)
    blocks = []
    for first, values_UD in enumerate(values_RD.split(BLOCK)):
        rows_U = torch.arange(len(values_UD)) + first * BLOCK
        by_chance = part.format.rounding == "stochastic"
        noise_UD = noise(key, 0, rows_U, (0, part.dim), 0) if by_chance else None
        blocks.append(part.format.decode(part.format.encode(values_UD, noise_UD), part.dim))
    return torch.cat(blocks)
