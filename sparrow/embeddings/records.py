from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparrow.core import Chunk, UserError
from sparrow.embeddings.memory import empty_rows
from sparrow.embeddings.spec import TableSpec
from sparrow.kernels.embedding_bag import Rows, Table


@dataclass
class RowGradients:
    """Gradients of a table's touched rows: rows_U int64 [U], ascending and unique; grad_UD float32 [U, D]."""

    rows_U: Tensor
    grad_UD: Tensor


class RowRecords(nn.Module):
    """The rows of one table: weight [R, D], the rule's state fields, and a touched byte [R]."""

    weight: Tensor
    touched: Tensor

    def __init__(self, spec: TableSpec, seed: int) -> None:
        super().__init__()
        self.spec = spec
        rows = spec.addressing.rows
        scale = rows**-0.5 if spec.init_scale is None else spec.init_scale
        random = torch.Generator().manual_seed(seed + zlib.crc32(spec.name.encode()))
        # not persistent: a state_dict holds the dense weights, tables travel as chunks
        self.register_buffer("weight", empty_rows(rows, spec.dim).uniform_(-scale, scale, generator=random), False)
        self.register_buffer("touched", empty_rows(rows, dtype=torch.uint8).zero_(), False)
        self.state_names = tuple(spec.rule.init_state(0, spec.dim))
        for name, none in spec.rule.init_state(0, spec.dim).items():
            self.register_buffer(name, empty_rows(rows, *none.shape[1:]), False)
        for first in range(0, rows, 1 << 16):  # in parts: a second copy of the state need not exist
            last = min(first + (1 << 16), rows)
            for name, part in spec.rule.init_state(last - first, spec.dim).items():
                self.get_buffer(name)[first:last] = part
        self.pending: list[RowGradients] = []

    @property
    def rows(self) -> int:
        """R, the rows of the table."""
        return self.spec.addressing.rows

    @property
    def state(self) -> dict[str, Tensor]:
        """The rule's fields, by name."""
        return {name: self.get_buffer(name) for name in self.state_names}

    @property
    def fields(self) -> dict[str, Tensor]:
        """Every field of the row record, by name."""
        return {"weight": self.weight, **self.state, "touched": self.touched}

    @property
    def kernel_table(self) -> Table:
        """The rows as the operators take them: one level."""
        return Table(
            levels=(Rows(weight_RD=self.weight, touched_R=self.touched, state=self.state),), rule=self.spec.rule
        )

    def chunks(self, max_bytes: int) -> Iterator[Chunk]:
        """Every row record, in blocks of at most about `max_bytes`; the tensors are views."""
        rows, dim = self.weight.shape
        row_bytes = sum(t[:1].numel() * t.element_size() for t in self.fields.values())
        step = max(1, max_bytes // row_bytes)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            fields = {name: tensor[first:last] for name, tensor in self.fields.items()}
            yield Chunk(table=self.spec.name, rows=(first, last), columns=(0, dim), fields=fields)

    @torch.no_grad()
    def load_chunk(self, chunk: Chunk) -> None:
        """Overwrite the chunk's rows and columns; UserError when range or fields do not fit."""
        rows, dim = self.weight.shape
        if set(chunk.fields) != set(self.fields):
            raise UserError(
                f"table {chunk.table!r}: fields {sorted(chunk.fields)} where {sorted(self.fields)} are kept; "
                "use the rule they were saved with"
            )
        if not (0 <= chunk.rows[0] <= chunk.rows[1] <= rows and 0 <= chunk.columns[0] <= chunk.columns[1] <= dim):
            place = f"table {chunk.table!r}: chunk {chunk.rows} x {chunk.columns}"
            raise UserError(f"{place} lies outside {rows} x {dim}; cut it to the table")
        for name, tensor in self.fields.items():
            part = tensor[slice(*chunk.rows)]
            (part[:, slice(*chunk.columns)] if part.dim() > 1 else part).copy_(chunk.fields[name])
