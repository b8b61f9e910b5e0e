from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparrow.core import Chunk, UserError
from sparrow.embeddings.memory import empty_rows
from sparrow.embeddings.spec import TableSpec
from sparrow.kernels import philox
from sparrow.kernels.embedding_bag import Rows, Table

BLOCK = 1 << 16  # rows that are made at a time


@dataclass
class RowGradients:
    """Gradients of a table's touched rows: rows_U int64 [U], ascending and unique; grad_UD float32 [U, D]."""

    rows_U: Tensor
    grad_UD: Tensor


_nowhere = ContextVar("_nowhere", default=False)


@contextmanager
def unallocated() -> Iterator[None]:
    """Tables made in here have no memory: whoever shards a model puts others, which hold a part, in their place."""
    token = _nowhere.set(True)
    try:
        yield
    finally:
        _nowhere.reset(token)


class RowRecords(nn.Module):
    """The rows of one table, or a part of it: weight [R, D], the rule's state fields, and a touched byte [R].

    seed: of the first values, each of which depends on the seed, the table's name, its row and its column alone.
    first_row, columns: the part, all of it unless told; it begins with the values that it has in the whole table.
    """

    weight: Tensor
    touched: Tensor

    def __init__(
        self, spec: TableSpec, seed: int, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.first_row, last_row = rows or (0, spec.addressing.rows)
        self.columns = columns or (0, spec.dim)
        count, dim = last_row - self.first_row, self.columns[1] - self.columns[0]
        # not persistent: a state_dict holds the dense weights, tables travel as chunks
        self.register_buffer("weight", _memory(count, dim), False)
        self.register_buffer("touched", _memory(count, dtype=torch.uint8), False)
        self._seen_R: Tensor | None = None  # while parts of rows are loaded: their columns that were
        self.state_names = tuple(spec.rule.init_state(0, dim))
        for name, none in spec.rule.init_state(0, dim).items():
            self.register_buffer(name, _memory(count, *none.shape[1:]), False)
        self.pending: list[RowGradients] = []
        if not self.weight.is_meta:
            self._fill(seed)

    def _fill(self, seed: int) -> None:
        spec, rows, dim = self.spec, self.rows, self.weight.shape[1]
        scale = spec.addressing.rows**-0.5 if spec.init_scale is None else spec.init_scale
        key = philox.key_of(seed, spec.name)
        philox.uniform_(self.weight, key, scale, row=self.first_row, column=self.columns[0])
        self.touched.zero_()
        for first in range(0, rows, BLOCK):  # in parts: a second copy of the state need not exist
            last = min(first + BLOCK, rows)
            for name, part in spec.rule.init_state(last - first, dim).items():
                self.get_buffer(name)[first:last] = part

    @property
    def rows(self) -> int:
        """R, the rows here."""
        return self.weight.shape[0]

    @property
    def name(self) -> str:
        """The table's, with the block's place when it is a part."""
        if (self.rows, self.columns) == (self.spec.addressing.rows, (0, self.spec.dim)):
            return self.spec.name
        last = self.first_row + self.rows
        return f"{self.spec.name}[{self.first_row}:{last}, {self.columns[0]}:{self.columns[1]}]"

    @property
    def place(self) -> tuple[str, tuple[int, int], tuple[int, int]]:
        """Table, rows and columns that are here."""
        return self.spec.name, (self.first_row, self.first_row + self.rows), self.columns

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
        rows, _ = self.weight.shape
        row_bytes = sum(t[0:0].new_empty(1, *t.shape[1:]).nbytes for t in self.fields.values())
        step = max(1, max_bytes // row_bytes)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            fields = {name: tensor[first:last] for name, tensor in self.fields.items()}
            place = (self.first_row + first, self.first_row + last)
            yield Chunk(table=self.spec.name, rows=place, columns=self.columns, fields=fields)

    def load_chunk(self, chunk: Chunk) -> int:
        """Overwrite what the chunk has of these rows and columns; gives how many numbers of `weight` that were."""
        low, high = max(chunk.rows[0], self.first_row), min(chunk.rows[1], self.first_row + self.rows)
        here, there = (
            slice(low - self.first_row, high - self.first_row),
            slice(low - chunk.rows[0], high - chunk.rows[0]),
        )
        return self._put(chunk, here, there, max(high - low, 0))

    def load_rows(self, chunk: Chunk, to_N: Tensor) -> int:
        """The same, where row i of the chunk becomes row to_N[i] of the table, or none if that is below 0."""
        here_N = (to_N >= self.first_row) & (to_N < self.first_row + self.rows)
        return self._put(chunk, to_N[here_N] - self.first_row, here_N, int(here_N.sum()))

    @torch.no_grad()
    def _put(self, chunk: Chunk, here: slice | Tensor, there: slice | Tensor, count: int) -> int:
        """Rows `there` of a chunk into rows `here`.

        What a rule keeps once a row, a chunk of other columns had on its own (column-wise layouts): the mean of such
        parts by their columns is taken, whatever their order, exactly where they are equal (counts of updates).
        UserError when range or fields do not fit the table.
        """
        rows, dim = self.spec.addressing.rows, self.spec.dim
        if set(chunk.fields) != set(self.fields):
            raise UserError(
                f"table {chunk.table!r}: fields {sorted(chunk.fields)} where {sorted(self.fields)} are kept; "
                "use the rule they were saved with"
            )
        if not (0 <= chunk.rows[0] <= chunk.rows[1] <= rows and 0 <= chunk.columns[0] <= chunk.columns[1] <= dim):
            place = f"table {chunk.table!r}: chunk {chunk.rows} x {chunk.columns}"
            raise UserError(f"{place} lies outside {rows} x {dim}; cut it to the table")
        left, right = max(chunk.columns[0], self.columns[0]), min(chunk.columns[1], self.columns[1])
        if not count or left >= right:
            return 0
        width, whole = right - left, self.columns[1] - self.columns[0]
        before = torch.zeros((), dtype=torch.int32)  # columns of these rows so far
        if width < whole:
            self._seen_R = torch.zeros(self.rows, dtype=torch.int32) if self._seen_R is None else self._seen_R
            before = self._seen_R[here].to(self.weight.device)
        for name, tensor in self.fields.items():
            theirs = chunk.fields[name][there].to(tensor.device)
            if tensor.dim() > 1:
                from_left, from_right = left - chunk.columns[0], right - chunk.columns[0]
                tensor[here, left - self.columns[0] : right - self.columns[0]] = theirs[:, from_left:from_right]
            elif width == whole:
                tensor[here] = theirs
            elif name == "touched":
                tensor[here] = torch.where(before == 0, theirs, torch.maximum(tensor[here], theirs))
            else:
                mean = tensor[here] + (theirs - tensor[here]) * (width / (before + width))
                tensor[here] = torch.where(before == 0, theirs, mean)
        if self._seen_R is not None:
            self._seen_R[here] = (self._seen_R[here] + width) % whole
            self._seen_R = self._seen_R if self._seen_R.any() else None
        return count * width


def _memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta") if _nowhere.get() else empty_rows(*shape, dtype=dtype)
