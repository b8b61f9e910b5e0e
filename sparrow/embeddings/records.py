from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparrow.core import Chunk, UserError
from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores import At, CachedStore, RowStore, Saved, SavedStore, SsdStore, new_store, ssd_of
from sparrow.embeddings.stores.store import chosen_device
from sparrow.kernels import philox, row_index
from sparrow.kernels.block_io import BlockMap
from sparrow.kernels.embedding_bag import Table
from sparrow.numerics.rounding import noise, state_to_bf16

BLOCK = 1 << 16  # rows that are made at a time


@dataclass
class RowGradients:
    """Gradients of those rows of a component that a batch used. Rows count from the first one that is here.

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
        seed: of the first values. Each depends on the seed, the component's name, its row and its column alone.
        rows: the first row of the part and the one after its last; by default all rows.
        columns: the first dimension of the part and the one after its last; by default all dimensions.
    """

    def __init__(
        self,
        component: Component,
        seed: int,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if component.policy and chosen_device() != "cpu":
            remedy = "choose another addressing, or use --device cpu"
            raise UserError(f"table {component.name!r}: which ids have rows is kept on the CPU alone; {remedy}")
        self.component = component
        self.first_row, last_row = rows or (0, component.rows)
        self.rows = last_row - self.first_row
        self.columns = columns or (0, component.dim)
        self.dim = self.columns[1] - self.columns[0]
        self.store: RowStore = new_store(component, self.rows, self.dim)
        self.seed = seed
        self._key = philox.key_of(seed, component.name)
        self.rounded = 0  # rows of loaded caches that found no frame here
        self._seen_R: Tensor | None = None  # while parts of rows are loaded: their columns that were
        self._index: row_index.Index | None = None
        self.told = dict.fromkeys(row_index.TOLD, 0)  # see there, of all batches of training
        beneath = ssd_of(self.store) or self.store
        if isinstance(beneath, (SsdStore, SavedStore)):
            beneath.first = self._begun
        if self.store.is_allocated:
            self._fill()
            if component.policy:
                self.index.begin()
                if not self.first_row:
                    self._begin_rows(torch.tensor([1]), torch.tensor([0]))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_index": None}  # it has views of the rows

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowRecords:
        before = None if self._index is None else self._index.ids_R.data_ptr()
        super()._apply(fn, recurse)
        if before is not None and self.store.read(slice(None))["id"].data_ptr() != before:
            self._index = None
        return self

    # -- ids that come and go -----------------------------------------------------------------------------------

    @property
    def index(self) -> row_index.Index:
        """Which ids have the rows. It is of a component with a policy."""
        if self._index is None:
            assert self.component.policy is not None
            fields = self.store.read(slice(None))
            self._index = row_index.Index(
                policy=self.component.policy,
                first=self.first_row,
                key=self._key,
                ids_R=fields["id"],
                times_R=fields["time"],
                counts_R=fields["count"],
                sightings_RC=fields["sightings"].view(torch.uint8).view(-1, row_index.SKETCH),
            )
        return self._index

    def rows_of(self, keys_N: Tensor, now: int) -> Tensor:
        """Returns the rows of ids, see `row_index.find`."""
        return row_index.find(self.index, keys_N, now)

    def admit(self, keys_N: Tensor, now: int, batch: int, settled: int) -> Tensor:
        """Returns the rows of a batch's ids, some of whom get theirs now, see `row_index.admit`."""
        found = row_index.admit(self.index, keys_N, now, batch, settled)
        for name, count in found.counts.items():
            self.told[name] += count
        if found.counts["expired"]:
            self.store.write(found.freed_F, {"touched": self._alike["touched"]})
        if found.counts["admitted"]:
            self._begin_rows(found.begun_L, found.ids_L)
        return found.rows_N

    def _begin_rows(self, rows_L: Tensor, ids_L: Tensor) -> None:
        """Give rows the first values of the ids that get them. They depend on seed, table and id, not on the row."""
        values_LD = torch.empty(len(rows_L), self.dim)
        philox.uniform_(values_LD, self._key, self.component.init_scale, column=self.columns[0], rows_R=ids_L)
        made = self._encoded(values_LD, ids_L - self.first_row, self.columns)  # rounded as in the row of this number
        self.store.write(rows_L, made | self._alike)

    @cached_property
    def _alike(self) -> dict[str, Tensor]:
        """What rows that begin anew all have, as one row. What was in them before is gone: touched."""
        fields = {name: self.component.fields_of(self.dim)[name] for name in self.component.rule.fields(self.dim)}
        alike = {name: torch.full(field.shape(1), field.first, dtype=field.dtype) for name, field in fields.items()}
        return alike | {"touched": torch.ones(1, dtype=torch.uint8)}

    # -- rows -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _fill(self) -> None:
        for first in range(0, self.rows, BLOCK):  # in parts: a second copy of all need not exist
            part = slice(first, min(first + BLOCK, self.rows))
            self.store.write(part, self._begun(part))

    def _begun(self, at: At) -> dict[str, Tensor]:
        """Returns all fields with which some rows begin. Those of a slice need no index each."""
        scale, column = self.component.init_scale, self.columns[0]
        if isinstance(at, slice):
            count, row, rows_R = at.stop - at.start, self.first_row + at.start, None
        else:
            count, row, rows_R = len(at), 0, at + self.first_row
        values_UD = torch.empty(count, self.dim)
        philox.uniform_(values_UD, self._key, scale, row=row, column=column, rows_R=rows_R)
        return self._first(values_UD, at)

    def _first(self, values_UD: Tensor, at: At) -> dict[str, Tensor]:
        """Returns all fields of some rows that begin with these values, which move to the component's mean."""
        if self.component.init_mean:
            values_UD += self.component.init_mean
        made = self._encoded(values_UD, at, self.columns)
        for name, field in self.component.fields_of(self.dim).items():
            if name not in made:
                made[name] = torch.full(field.shape(len(values_UD)), field.first, dtype=field.dtype)
        return made

    def _encoded(self, values_UD: Tensor, at: At, columns: tuple[int, int], n_U: Tensor | int = 0) -> dict[str, Tensor]:
        """Returns the fields of some rows with these values. n_U: as which update stores them. columns: the values'."""
        noise_UD = None
        if self.component.format.rounding == "stochastic":
            rows_U = torch.arange(at.start, at.stop) if isinstance(at, slice) else at
            noise_UD = noise(self._key, 0, rows_U + self.first_row, columns, n_U)
        return self.component.format.encode(values_UD, noise_UD)

    def _converted(
        self,
        theirs: dict[str, Tensor],
        of: Component,
        rows_U: Tensor,
        columns: tuple[int, int],
        n_U: Tensor | int = 0,
    ) -> dict[str, Tensor]:
        """Returns the fields of some rows as this component stores them.

        Args:
            theirs: the fields as `of` stores them.
            of: a component with the same rule.
            rows_U: the rows here.
            columns: the first column and the one after the last.
            n_U: the number of the update for which they are rounded.
        """
        ours, dim = self.component, columns[1] - columns[0]
        made = dict(theirs)
        if type(of.format) is not type(ours.format):
            made = {name: tensor for name, tensor in theirs.items() if name not in of.format.fields(dim)}
            made |= self._encoded(of.format.exact(theirs, dim), rows_U, columns, n_U)
        for number, name in enumerate(ours.rule.fields(dim), 1):
            if of.state != ours.state:
                made[name] = made[name].float()
            if of.state != ours.state == "bf16":
                made[name] = state_to_bf16(made[name], self._key, number, rows_U + self.first_row, columns, n_U)
        return made

    @property
    def name(self) -> str:
        """The name of the component, with the block's place when this is a part."""
        if (self.rows, self.columns) == (self.component.rows, (0, self.component.dim)):
            return self.component.name
        last = self.first_row + self.rows
        return f"{self.component.name}[{self.first_row}:{last}, {self.columns[0]}:{self.columns[1]}]"

    @property
    def nbytes(self) -> int:
        """Bytes of all that is allocated for the rows."""
        index = 0 if self._index is None else getattr(self._index.work, "nbytes", 0)
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
        """The values of all rows as lookups read them, float32 [R, D]. They are a view where they are stored so."""
        values_RD = self.component.format.decode(self.fields, self.dim)
        if isinstance(self.store, CachedStore):
            values_RD = values_RD.clone()
            frames = self.store.saved()
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
            key=self._key,
            place=(self.first_row, self.columns[0]),
        )

    def saved(self, max_bytes: int = 64 << 20) -> Iterator[Chunk | Saved]:
        """Returns every row record as a checkpoint has it: blocks of a file that has a name, or else `chunks`."""
        if (store := ssd_of(self.store)) and store.has_name:
            yield store.save(seed=self.seed, rows=self.place[1], columns=self.columns)
            yield from self._frames(max_bytes)
        else:
            yield from self.chunks(max_bytes)

    def go_on(self, saved: Saved, kept: Callable[[Path], Mapping[int, BlockMap]], learns: bool = True) -> bool:
        """Go on with the file of a checkpoint's blocks, if it can become that of these rows. Returns whether it did.

        So it can if rows that are nowhere begin alike, and if they will not learn or it lies where their own would.

        Args:
            saved: what the checkpoint has.
            kept: the file -> all maps of it that are to stay whole, by step.
            learns: whether rows are to change. If not, the file is only read.

        Raises:
            UserError: when the file is missing, cut, another one or in use.
        """
        store, mine, its = ssd_of(self.store), self.component, saved.component
        if store is None or (learns and not (store.has_name and store.folder == saved.path.parent)):
            return False
        begins = [(of.name, of.fields, of.format, of.init_scale, of.init_mean) for of in (mine, its)]
        if begins[0] != begins[1] or (self.seed, *self.place[1:]) != (saved.seed, saved.rows, saved.columns):
            return False
        if not learns:
            return store.show(saved)
        store.go_on(saved, kept(saved.path))
        return True

    def chunks(self, max_bytes: int, wanted: Sequence[tuple[int, int]] | None = None) -> Iterator[Chunk]:
        """Returns every row record, in chunks of at most about `max_bytes`.

        The tensors are views where the store has some. wanted: only chunks that overlap one of these ranges of rows.
        """
        row_bytes = sum(field.bytes_row for field in self.component.fields_of(self.dim).values())
        for first, last in self._ranges(max_bytes // row_bytes):
            place = (self.first_row + first, self.first_row + last)
            if wanted is not None and not any(max(place[0], of[0]) < min(place[1], of[1]) for of in wanted):
                continue
            fields = self.store.read(slice(first, last))
            yield Chunk(table=self.component.name, rows=place, columns=self.columns, fields=fields)
        yield from self._frames(max_bytes)

    def _frames(self, max_bytes: int) -> Iterator[Chunk]:
        """Returns the exact rows, if there is a cache of them."""
        if not isinstance(self.store, CachedStore):
            return
        for first, last in self._ranges(max_bytes // (self.component.frame_bytes(self.dim) + 1)):
            place = (self.first_row + first, self.first_row + last)
            frames = self.store.saved(first, last)
            frames["row"] = frames["row"].long() + self.first_row
            yield Chunk(table=self.component.name, rows=place, columns=self.columns, fields=frames, is_cache=True)

    def _ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        """Cuts the rows that are here into ranges of at most so many, and at least one."""
        step = max(1, rows)
        return ((first, min(first + step, self.rows)) for first in range(0, self.rows, step))

    def load_chunk(self, chunk: Chunk) -> int:
        """Overwrite what the chunk has of these rows and columns. Returns how many values that were.

        Raises:
            UserError: when range or fields do not fit the component.
        """
        if chunk.is_cache:
            self._put_frames(chunk, chunk.fields["row"])
            if isinstance(self.store, CachedStore):
                self.store.recount(chunk.fields["counts"], chunk.rows[0] - self.first_row)
            return 0
        low, high = max(chunk.rows[0], self.first_row), min(chunk.rows[1], self.first_row + self.rows)
        here, there = (
            slice(low - self.first_row, high - self.first_row),
            slice(low - chunk.rows[0], high - chunk.rows[0]),
        )
        return self._put(chunk, here, there, max(high - low, 0))

    @torch.no_grad()
    def load_rows(self, chunk: Chunk, to_N: Tensor, of: Component) -> int:
        """Like `load_chunk`, but rows of the chunk may become other rows, and may be stored otherwise.

        Returns how many values that were.

        Args:
            chunk: the row records.
            to_N: for each row of the chunk the component's row that it becomes, or less than 0 for none: int64 [N].
            of: what the chunk was saved of, with the same rule. Other formats are rounded as this component says.

        Raises:
            UserError: when range or fields do not fit `of`, or its columns do not fit the component.
        """
        if chunk.is_cache:
            self._put_frames(chunk, to_N[chunk.fields["row"] - chunk.rows[0]])
            return 0
        self._check(chunk, of)
        here_N = (to_N >= self.first_row) & (to_N < self.first_row + self.rows)
        found = 0
        for there_U in here_N.nonzero()[:, 0].split(BLOCK):  # in parts: random numbers are wider than rows
            here_U = to_N[there_U] - self.first_row
            theirs = {name: tensor[there_U] for name, tensor in chunk.fields.items()}
            fields = self._converted(theirs, of, here_U, chunk.columns)
            part = replace(chunk, rows=(0, len(here_U)), fields=fields)
            found += self._put(part, here_U, slice(None), len(here_U))
        return found

    @torch.no_grad()
    def begin_with(self, rows_N: Tensor, values_ND: Tensor) -> None:
        """Begin rows anew, with given values in the place of random ones. Rows that are not here are left out.

        Args:
            rows_N: the component's rows, int64 [N] without repetition.
            values_ND: float32, with all its columns.
        """
        here_N = (rows_N >= self.first_row) & (rows_N < self.first_row + self.rows)
        for at_U in here_N.nonzero()[:, 0].split(BLOCK):
            rows_U = rows_N[at_U] - self.first_row
            values_UD = values_ND[at_U, self.columns[0] : self.columns[1]] - self.component.init_mean
            self.store.write(rows_U, self._first(values_UD, rows_U))

    @torch.no_grad()
    def _put_frames(self, chunk: Chunk, rows_U: Tensor) -> None:
        """Take rows out of a saved cache. Those that find no frame here are rounded, with the number of their update.

        Args:
            chunk: the cache.
            rows_U: the rows that its rows become, int64 [U], or less than 0 for none.
        """
        left, right = max(chunk.columns[0], self.columns[0]), min(chunk.columns[1], self.columns[1])
        here_U = (rows_U >= self.first_row) & (rows_U < self.first_row + self.rows)
        if left >= right:
            return
        rows_V = rows_U[here_U] - self.first_row
        fields = {name: tensor[here_U] for name, tensor in chunk.fields.items() if name not in ("batch", "counts")}
        names, of = self.component.in_frames.fields, slice(left - chunk.columns[0], right - chunk.columns[0])
        for name, field in self.component.fields.items():
            if why := field.uncut((left, right), self.component.dim):
                place = f"table {self.component.name!r}: {name} {why}, and the cache that is loaded is cut by columns"
                raise UserError(f"{place}; choose a row format that can be cut, such as fp16")
        for name, field in names.items():
            fields[name] = field.part(fields[name], of, chunk.columns[1] - chunk.columns[0])
        out_V = torch.ones(len(rows_V), dtype=torch.bool)
        if isinstance(self.store, CachedStore) and (left, right) == self.columns:
            out_V = self.store.restore(rows_V, fields, int(chunk.fields["batch"]))
        out_V &= fields["changed"] > 0  # the others are beneath as they are
        if not out_V.any():
            return
        self.rounded += int(out_V.sum())
        rows_V, fields = rows_V[out_V], {name: fields[name][out_V] for name in (*names, "changed")}
        theirs = self._converted(fields, self.component.in_frames, rows_V, (left, right), fields.pop("changed").long())
        if right - left < self.dim:
            self._merge(theirs, rows_V, right - left)
        self.store.write(rows_V, theirs, slice(left - self.columns[0], right - self.columns[0]))

    @torch.no_grad()
    def _put(self, chunk: Chunk, here: At, there: At, count: int) -> int:
        """Write rows `there` of a chunk into rows `here`. Returns how many values that were.

        Raises:
            UserError: when range or fields do not fit the component.
        """
        self._check(chunk, self.component)
        left, right = max(chunk.columns[0], self.columns[0]), min(chunk.columns[1], self.columns[1])
        if not count or left >= right:
            return 0
        theirs = {name: tensor[there] for name, tensor in chunk.fields.items()}
        columns, of = (slice(left - first, right - first) for first in (self.columns[0], chunk.columns[0]))
        for name, field in self.component.fields.items():
            theirs[name] = field.part(theirs[name], of, chunk.columns[1] - chunk.columns[0])
        if right - left < self.dim:
            self._merge(theirs, here, right - left)
        self.store.write(here, theirs, columns)
        self._index = None
        return count * (right - left)

    def _merge(self, theirs: dict[str, Tensor], here: At, width: int) -> None:
        """Make one number a row of those that the column parts of the row keep, as `Field.across` says.

        A mean weighs the parts by their columns. It does not depend on their order. It is exact where the parts are
        equal, as counts of updates are.
        """
        self._seen_R = torch.zeros(self.rows, dtype=torch.int32) if self._seen_R is None else self._seen_R
        ours = self.store.read(here)
        before = self._seen_R[here].to(ours["touched"].device)  # columns of these rows so far
        for name, field in self.component.fields.items():
            mine = theirs[name].to(before.device)
            if field.across == "max":
                theirs[name] = torch.where(before == 0, mine, torch.maximum(ours[name], mine))
            elif field.across == "mean":
                mean = torch.lerp(ours[name].float(), mine.float(), width / (before + width))
                theirs[name] = torch.where(before == 0, mine, mean.to(mine.dtype))
        self._seen_R[here] = (self._seen_R[here] + width) % self.dim
        self._seen_R = self._seen_R if self._seen_R.any() else None

    def _check(self, chunk: Chunk, component: Component) -> None:
        fields = component.fields
        place = f"table {chunk.table!r}"
        if set(chunk.fields) != set(fields):
            raise UserError(
                f"{place}: fields {sorted(chunk.fields)} where {sorted(fields)} are kept; use the rule and the format "
                "they were saved with"
            )
        rows, dim = component.rows, component.dim
        if not (0 <= chunk.rows[0] <= chunk.rows[1] <= rows and 0 <= chunk.columns[0] <= chunk.columns[1] <= dim):
            raise UserError(
                f"{place}: chunk {chunk.rows} x {chunk.columns} lies outside {rows} x {dim}; cut it to the table"
            )
        here = self.columns if component is self.component else (0, dim)
        for name, field in fields.items():
            if chunk.fields[name].dtype != field.dtype:
                kinds = f"{chunk.fields[name].dtype} where {field.dtype} is kept"
                raise UserError(f"{place}: {name} is {kinds}; use the row format it was saved with")
            if why := field.uncut(chunk.columns, dim) or field.uncut(here, dim):
                remedy = "choose a row format that can be cut, such as fp16"
                raise UserError(f"{place}: {name} {why}, and the chunk or the table is cut by columns; {remedy}")


def empty_gradients(record: RowRecords) -> RowGradients:
    """Returns gradients for none of a component's rows. They are float32, whatever the rows are stored as."""
    device = record.store.levels[0].touched_R.device
    return RowGradients(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, record.dim, device=device))
