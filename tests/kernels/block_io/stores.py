"""Small block stores and the records in them, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.kernels.block_io import Blocks, Layout
from sparrow.kernels.formats import Field
from tests.kernels.embedding_bag.cases import built

FIELDS = {
    "values": Field(width=16, across="cut"),
    "scale": Field(dtype=torch.bfloat16),
    "state": Field(),
    "bits": Field(width=3, dtype=torch.uint8, across="cut"),
}
ROWS = 67
LAYOUT = Layout(fields=FIELDS, rows=ROWS, block=512)  # 6 records to a block, and one in the last
WAYS: list[Any] = [
    "reference",
    pytest.param("threads", marks=built),
    pytest.param("io_uring", marks=built),
]


def records(rows_U: Tensor, version: int) -> dict[str, Tensor]:
    """The records of some rows, of which every byte depends on row and version."""
    made = {}
    for number, (name, field) in enumerate(FIELDS.items()):
        width = field.width or 1
        numbers = (rows_U[:, None] * 131 + torch.arange(width) * 17 + version * 1009 + number) % 251
        made[name] = numbers.to(field.dtype).reshape(field.shape(len(rows_U)))
    return made


def empty(rows: int = ROWS) -> dict[str, Tensor]:
    """Where records of so many rows are read to."""
    return {
        name: torch.full(field.shape(rows), 77, dtype=field.dtype) for name, field in FIELDS.items()
    }


def make(path: Path, way: Any, layout: Layout = LAYOUT, **options: Any) -> Blocks:
    """A store with a name."""
    if way == "reference":
        options.setdefault("chance", Random(1))
    return Blocks(path, layout, table="ads", way=way, **options)


def read(blocks: Blocks, rows: int = ROWS) -> tuple[dict[str, Tensor], Tensor]:
    """All records, and which were never put."""
    into, all_R = empty(rows), torch.arange(rows)
    return into, blocks.wait(blocks.fetch(all_R, into, all_R))


def check(blocks: Blocks, versions: Mapping[int, int]) -> None:
    """That the store has these versions of rows, and nothing else."""
    into, never_R = read(blocks)
    assert sorted(versions) == (~never_R).nonzero()[:, 0].tolist()
    for row, version in versions.items():
        for name, expected in records(torch.tensor([row]), version).items():
            assert torch.equal(into[name][row], expected[0]), (row, name)
    assert all((tensor[never_R] == 77).all() for tensor in into.values()), (
        "rows that were never put are written"
    )
