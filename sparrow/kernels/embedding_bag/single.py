"""One table of float32, and the bags of one feature that looks into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.kernels.embedding_bag.arguments import (
    Bags,
    Lookup,
    Lookups,
    Pooling,
    Rows,
    Table,
    Tables,
)
from sparrow.kernels.formats import fp32
from sparrow.kernels.rules import RowRule, init_state


def bags_of(
    slots_N: Tensor, offsets_B1: Tensor, pooling: Pooling = "sum", weights_N: Tensor | None = None
) -> Bags:
    """Returns the bags of one feature in one table."""
    return Bags(
        slots_N=slots_N,
        offsets_B1=offsets_B1,
        weights_N=weights_N,
        bags=[offsets_B1.numel() - 1],
        bounds=[0, slots_N.numel()],
        lookups=Lookups([Lookup(table=0, key=0, pooling=pooling)]),
    )


def fp32_table(levels: Sequence[Rows], rule: RowRule) -> Table:
    """Returns a table of float32 rows that has as many rows as slots."""
    rows, dim = sum(level.count for level in levels), levels[0].payload["weight"].shape[1]
    return Table(levels=tuple(levels), rule=rule, rows=rows, dim=dim)


def tables_of(weight_RD: Tensor, rule: RowRule) -> Tables:
    """Returns one float32 table, of one level, with the state of rows that were never updated."""
    rows, dim = weight_RD.shape
    touched_R = torch.zeros(rows, dtype=torch.uint8)
    level = Rows(
        format=fp32.Config(),
        payload={"weight": weight_RD},
        touched_R=touched_R,
        state=init_state(rule, rows, dim),
    )
    return Tables([fp32_table([level], rule)])
