from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparrow import embeddings
from sparrow.core import Chunk, UserError
from sparrow.embeddings.spec import ON_CPU, Component, Placement
from sparrow.embeddings.stores import At, External, RowStore, new_store
from sparrow.kernels import philox
from sparrow.kernels.embedding_bag import Table

if TYPE_CHECKING:
    from sparrow.kernels.row_index import Index

BLOCK = 1 << 16  # rows that are made at a time


@dataclass
class RowGradients:
    """Gradients of those rows of a component that a batch used. Rows count from the first one that
    is here.

    Args:
        rows_U: int64 [U], ascending and unique.
        grad_UD: float32 [U, D].
    """

    rows_U: Tensor
    grad_UD: Tensor


class RowRecords(nn.Module):
    """The row records of a component, or of a part of it, in a store.

    A part begins with the values that it has in the whole.

    Args:
        component: whose rows these are.
        seed: of the first values. Each depends on the seed, the component's name, its row and its
            column alone.
        rows: the first row of the part and the one after its last; by default all rows.
        columns: the first dimension of the part and the one after its last; by default all
            dimensions.
        placement: where they are kept.

    Raises:
        UserError: when they cannot be kept there.
    """

    def __init__(
        self,
        component: Component,
        seed: int,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        placement: Placement = ON_CPU,
    ) -> None:
        super().__init__()
        if component.policy and placement.device != "cpu":
            remedy = "choose another addressing, or use --device cpu"
            raise UserError(
                f"table {component.name!r}: which ids have rows is kept on the CPU alone; {remedy}"
            )
        self.component = component
        self.first_row, last_row = rows or (0, component.rows)
        self.rows = last_row - self.first_row
        self.columns = columns or (0, component.dim)
        self.dim = self.columns[1] - self.columns[0]
        self.store: RowStore = new_store(component, self.rows, self.dim, placement)
        self.seed = seed
        self.key = philox.key_of(seed, component.name)
        self.rounded = 0  # rows of loaded caches that found no frame here
        # while parts of rows are loaded: their columns that were
        self.merged_R: Tensor | None = None
        self._index: Index | None = None
        self.id_counts: Counter[str] = Counter()  # what happened to ids in all batches of training
        self.store.begin_with(self._begin_fields)
        if self.store.is_allocated:
            self._fill()
            if component.policy:
                self.index.begin()
                if not self.first_row:
                    embeddings.admission.begin_rows(self, torch.tensor([1]), torch.tensor([0]))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_index": None}  # it has views of the rows

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowRecords:
        before = None if self._index is None else self._index.ids_R.data_ptr()
        super()._apply(fn, recurse)
        if before is not None and self.store.read(slice(None))["id"].data_ptr() != before:
            self._index = None
        return self

    # -- ids that come and go ----------------------------------------------------------------------

    @property
    def index(self) -> Index:
        """Which ids have the rows. It is of a component with a policy."""
        if self._index is None:
            assert self.component.policy is not None
            self._index = self.component.policy.index(self.first_row, self.key, self.fields)
        return self._index

    def rows_of(self, keys_N: Tensor, now: int) -> Tensor:
        """Returns the rows of ids, see `row_index.find`."""
        return self.index.find(keys_N, now)

    def admit(self, keys_N: Tensor, now: int, batch: int, settled: int) -> Tensor:
        """Returns the rows of a batch's ids, some of whom get theirs now, see `row_index.admit`."""
        return embeddings.admission.admit(self, keys_N, now, batch, settled)

    # -- rows --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _fill(self) -> None:
        for first in range(0, self.rows, BLOCK):  # in parts: a second copy of all need not exist
            part = slice(first, min(first + BLOCK, self.rows))
            self.store.write(part, self._begin_fields(part))

    def _begin_fields(self, at: At) -> dict[str, Tensor]:
        """Returns all fields with which some rows begin. Those of a slice need no index each."""
        scale = self.component.init_scale
        column = self.columns[0]
        if isinstance(at, slice):
            count = at.stop - at.start
            row = self.first_row + at.start
            rows_R = None
        else:
            count = len(at)
            row = 0
            rows_R = at + self.first_row
        values_UD = torch.empty(count, self.dim)
        philox.uniform_(values_UD, self.key, scale, row=row, column=column, rows_R=rows_R)
        return self._with_first_state(values_UD, at)

    def _with_first_state(self, values_UD: Tensor, at: At) -> dict[str, Tensor]:
        """Returns all fields of some rows that begin with these values, which move to the
        component's mean.
        """
        if self.component.init_mean:
            values_UD += self.component.init_mean
        fields = self.encode(values_UD, at, self.columns)
        for name, field in self.component.fields_of(self.dim).items():
            if name not in fields:
                fields[name] = torch.full(
                    field.shape(len(values_UD)), field.first, dtype=field.dtype
                )
        return fields

    def encode(
        self, values_UD: Tensor, at: At, columns: tuple[int, int], n_U: Tensor | int = 0
    ) -> dict[str, Tensor]:
        """Returns the fields of some rows with these values. n_U: as which update stores them.
        columns: the values'.
        """
        noise_UD = None
        if self.component.format.rounding == "stochastic":
            rows_U = torch.arange(at.start, at.stop) if isinstance(at, slice) else at
            from sparrow.numerics.rounding import noise  # few formats round at random

            noise_UD = noise(self.key, 0, rows_U + self.first_row, columns, n_U)
        return self.component.format.encode(values_UD, noise_UD)

    @property
    def name(self) -> str:
        """The name of the component, with the block's place when this is a part."""
        if (self.rows, self.columns) == (self.component.rows, (0, self.component.dim)):
            return self.component.name
        last = self.first_row + self.rows
        return (
            f"{self.component.name}[{self.first_row}:{last}, {self.columns[0]}:{self.columns[1]}]"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all that is allocated for the rows."""
        index = 0 if self._index is None else self._index.nbytes
        return sum(tensor.nbytes for tensor in self.buffers()) + index

    @property
    def place(self) -> tuple[str, tuple[int, int], tuple[int, int]]:
        """The component's name, and the rows and columns that are here."""
        return self.component.name, (self.first_row, self.first_row + self.rows), self.columns

    @property
    def fields(self) -> dict[str, Tensor]:
        """Every field of all rows, by name."""
        return self.store.read(slice(None))

    @property
    def weight(self) -> Tensor:
        """The values of all rows as lookups read them, float32 [R, D]. They are a view where they
        are stored so.
        """
        values_RD = self.component.format.decode(self.fields, self.dim)
        if (frames := self.store.exact_rows()) is not None:
            values_RD = values_RD.clone()
            values_RD[frames["row"].long()] = frames["weight"]
        return values_RD

    @property
    def kernel_table(self) -> Table:
        """The rows as the operators take them."""
        component = self.component
        return Table(
            levels=self.store.levels,
            rule=component.rule,
            rows=self.rows,
            dim=self.dim,
            key=self.key,
            place=(self.first_row, self.columns[0]),
        )

    def saved(self, max_bytes: int = 64 << 20) -> Iterator[Chunk | External]:
        """Returns every row record as a checkpoint has it: where it lies, if the store can say
        that, or `chunks`.
        """
        if (part := self.store.external(self.seed, self.place[1], self.columns)) is not None:
            yield part
            yield from self._frames(max_bytes)
        else:
            yield from self.chunks(max_bytes)

    def go_on(self, part: External, learns: bool = True) -> bool:
        """Go on with rows of a checkpoint where they lie, if they can become these rows. Returns
        whether they did.

        So they can if rows that are nowhere begin alike, and if the store can have them there.

        Args:
            part: what the checkpoint has.
            learns: whether rows are to change. If not, they are only read.

        Raises:
            UserError: when a file is missing, cut, another one or in use.
        """
        own_place = (self.seed, *self.place[1:])
        if own_place != (part.seed, part.rows, part.columns):
            return False
        if _first_values(self.component) != _first_values(part.component):
            return False
        return self.store.adopt(part, learns)

    def chunks(
        self, max_bytes: int, wanted: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[Chunk]:
        """Returns every row record, in chunks of at most about `max_bytes`.

        The tensors are views where the store has some. wanted: only chunks that overlap one of
        these ranges of rows.
        """
        row_bytes = sum(field.bytes_row for field in self.component.fields_of(self.dim).values())
        for first, last in self._ranges(max_bytes // row_bytes):
            place = (self.first_row + first, self.first_row + last)
            if wanted is not None and not any(
                max(place[0], bounds[0]) < min(place[1], bounds[1]) for bounds in wanted
            ):
                continue
            fields = self.store.read(slice(first, last))
            yield Chunk(table=self.component.name, rows=place, columns=self.columns, fields=fields)
        yield from self._frames(max_bytes)

    def _frames(self, max_bytes: int) -> Iterator[Chunk]:
        """Returns the exact rows, if there is a cache of them."""
        if not self.store.exact_bytes:
            return
        for first, last in self._ranges(max_bytes // (self.store.exact_bytes + 1)):
            place = (self.first_row + first, self.first_row + last)
            frames = self.store.exact_rows(first, last)
            assert frames is not None
            frames["row"] = frames["row"].long() + self.first_row
            yield Chunk(
                table=self.component.name,
                rows=place,
                columns=self.columns,
                fields=frames,
                is_cache=True,
            )

    def _ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        """Cuts the rows that are here into ranges of at most so many, and at least one."""
        step = max(1, rows)
        return ((first, min(first + step, self.rows)) for first in range(0, self.rows, step))

    def load_chunk(self, chunk: Chunk) -> int:
        """Overwrite what the chunk has of these rows and columns. Returns how many values that
        were.

        Raises:
            UserError: when range or fields do not fit the component.
        """
        if chunk.is_cache:
            embeddings.moved_rows.load_frames(self, chunk, chunk.fields["row"])
            self.store.recount(chunk.fields, chunk.rows[0] - self.first_row)
            return 0
        low = max(chunk.rows[0], self.first_row)
        high = min(chunk.rows[1], self.first_row + self.rows)
        target = slice(low - self.first_row, high - self.first_row)
        source = slice(low - chunk.rows[0], high - chunk.rows[0])
        return self.put(chunk, target, source, max(high - low, 0))

    def load_rows(self, chunk: Chunk, to_N: Tensor, saved: Component) -> int:
        """Like `load_chunk`, but rows may become others and be stored otherwise, see
        `moved_rows.load_rows`.
        """
        return embeddings.moved_rows.load_rows(self, chunk, to_N, saved)

    @torch.no_grad()
    def begin_with(self, rows_N: Tensor, values_ND: Tensor) -> None:
        """Begin rows anew, with given values in the place of random ones. Rows that are not here
        are left out.

        Args:
            rows_N: the component's rows, int64 [N] without repetition.
            values_ND: float32, with all its columns.
        """
        is_local_N = (rows_N >= self.first_row) & (rows_N < self.first_row + self.rows)
        for at_U in is_local_N.nonzero()[:, 0].split(BLOCK):
            rows_U = rows_N[at_U] - self.first_row
            values_UD = values_ND[at_U, slice(*self.columns)] - self.component.init_mean
            self.store.write(rows_U, self._with_first_state(values_UD, rows_U))

    @torch.no_grad()
    def put(self, chunk: Chunk, target: At, source: At, count: int) -> int:
        """Write rows `source` of a chunk into rows `target`. Returns how many values that were.

        Raises:
            UserError: when range or fields do not fit the component.
        """
        self.check(chunk, self.component)
        left = max(chunk.columns[0], self.columns[0])
        right = min(chunk.columns[1], self.columns[1])
        if not count or left >= right:
            return 0
        fields = {name: tensor[source] for name, tensor in chunk.fields.items()}
        columns = slice(left - self.columns[0], right - self.columns[0])
        columns_there = slice(left - chunk.columns[0], right - chunk.columns[0])
        for name, field in self.component.fields.items():
            fields[name] = field.part(
                fields[name], columns_there, chunk.columns[1] - chunk.columns[0]
            )
        if right - left < self.dim:
            embeddings.moved_rows.merge_parts(self, fields, target, right - left)
        self.store.write(target, fields, columns)
        self._index = None
        return count * (right - left)

    def check(self, chunk: Chunk, component: Component) -> None:
        """Check that a chunk is one of a component.

        Raises:
            UserError: when range or fields do not fit it.
        """
        fields = component.fields
        place = f"table {chunk.table!r}"
        if set(chunk.fields) != set(fields):
            raise UserError(
                f"{place}: fields {sorted(chunk.fields)} where {sorted(fields)} are kept; use the"
                " rule and the format they were saved with"
            )
        rows = component.rows
        dim = component.dim
        if not (
            0 <= chunk.rows[0] <= chunk.rows[1] <= rows
            and 0 <= chunk.columns[0] <= chunk.columns[1] <= dim
        ):
            raise UserError(
                f"{place}: chunk {chunk.rows} x {chunk.columns} lies outside {rows} x {dim}; cut it"
                " to the table"
            )
        own_columns = self.columns if component is self.component else (0, dim)
        for name, field in fields.items():
            if chunk.fields[name].dtype != field.dtype:
                kinds = f"{chunk.fields[name].dtype} where {field.dtype} is kept"
                raise UserError(f"{place}: {name} is {kinds}; use the row format it was saved with")
            if why := field.uncut(chunk.columns, dim) or field.uncut(own_columns, dim):
                remedy = "choose a row format that can be cut, such as fp16"
                raise UserError(
                    f"{place}: {name} {why}, and the chunk or the table is cut by columns; {remedy}"
                )


def _first_values(component: Component) -> tuple[Any, ...]:
    """Returns on what the first values of a component's rows depend, besides the seed."""
    return (
        component.name,
        component.fields,
        component.format,
        component.init_scale,
        component.init_mean,
    )


def empty_gradients(record: RowRecords) -> RowGradients:
    """Returns gradients for none of a component's rows. They are float32, whatever the rows are
    stored as.
    """
    device = record.store.levels[0].touched_R.device
    return RowGradients(
        torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, record.dim, device=device)
    )
