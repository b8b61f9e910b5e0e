"""What FBGEMM makes of rows (record_fbgemm.py), and what Sparrow's kernels make of them."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from sparrow.kernels import Impl
from sparrow.kernels.embedding_bag import Rows, Table, Tables, update_rows
from sparrow.kernels.formats import RowFormat
from sparrow.kernels.rules import sgd


@functools.cache
def record() -> dict[str, Tensor]:
    """See record_fbgemm.py for the names."""
    return load_file(Path(__file__).with_name("fbgemm.safetensors"))


def dims(name: str) -> list[int]:
    """The dims that FBGEMM has a format for."""
    return sorted(int(key.split()[0]) for key in record() if key.endswith(f" {name}"))


def written(format: RowFormat, values_RD: Tensor, impl: Impl) -> Tensor:
    """The bytes of the rows after an update of rows of zeros to these values."""
    rows, dim = values_RD.shape
    payload = format.encode(torch.zeros(rows, dim), None)
    level = Rows(format=format, payload=payload, touched_R=torch.zeros(rows, dtype=torch.uint8))
    table = Table(levels=(level,), rule=sgd.Config(), rows=rows, dim=dim)
    update_rows(Tables([table]), [(torch.arange(rows), -values_RD)], torch.ones(1), impl=impl)
    return payload["weight"]
