"""Transformed rows as numpy arrays, from which batches are gathered."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparrow import features
from sparrow.core import Batch, KeyedJagged
from sparrow.core.arrays import Array, Int64s
from sparrow.features.schema import ROLES, RUN, Schema, weights_of
from sparrow.features.skew import Skew
from sparrow.features.transforms import Transforms

# rows that are turned from columns to rows at a time: as many as a processor's cache holds
CACHED = 1 << 12


class _Store:
    """Some columns of some thousand rows (or runs), one after the other."""

    def __init__(self, schema: Schema, tables: Sequence[pa.Table], columns: Sequence[str]) -> None:
        self.count = sum(table.num_rows for table in tables)
        self.places = schema.side_by_side([name for name in schema.dense if name in columns])
        self.vectors = [name for name in self.places if schema.columns[name].kind == "vector"]
        self.plain = [n for n in schema.sparse if n in columns and schema.columns[n].kind != "list"]
        self.lists = [n for n in schema.sparse if n in columns and schema.columns[n].kind == "list"]
        self.dense_NC = np.empty((self.count, _width(self.places)), np.float32)
        is_wide = any(table[name].type == pa.int64() for name in self.plain for table in tables)
        self.ids_NC = np.empty((self.count, len(self.plain)), np.int64 if is_wide else np.int32)
        pieces: dict[str, list[Array]] = {}
        first = 0
        for table in tables:
            for piece in table.to_batches(max_chunksize=CACHED):
                last = first + piece.num_rows
                for name, at in self.places.items():
                    column = piece[name]
                    is_vector = name in self.vectors
                    if is_vector:
                        x_NC = features.vectors.unpacked(column)
                    else:
                        x_NC = column.to_numpy(zero_copy_only=False)[:, None]
                    self.dense_NC[first:last, at] = x_NC
                for c, name in enumerate(self.plain):
                    self.ids_NC[first:last, c] = piece[name].to_numpy(zero_copy_only=False)
                first = last
            for name, values in _list_arrays(schema, table, self.lists):
                pieces.setdefault(name, []).append(values)
        self.list_arrays = {name: np.concatenate(parts) for name, parts in pieces.items()}
        self.starts = {
            n: np.concatenate([[0], np.cumsum(self.list_arrays[f"{n}:lengths"])])
            for n in self.lists
            if pieces
        }

    @property
    def nbytes(self) -> int:
        """Of memory."""
        arrays = [self.dense_NC, self.ids_NC, *self.list_arrays.values(), *self.starts.values()]
        return sum(array.nbytes for array in arrays)

    def contents(self) -> list[features.runs.Column]:
        """Every column, as `first_equal` takes them."""
        plain = [self.ids_NC[:, c] for c in range(len(self.plain))]
        bits = {name: self.dense_NC[:, at].view(np.int32) for name, at in self.places.items()}
        numbers = [bits_NC[:, 0] for name, bits_NC in bits.items() if name not in self.vectors]
        columns: list[features.runs.Column] = [(values, None) for values in (*plain, *numbers)]
        for name in self.vectors:  # as lists of one length
            starts = np.arange(self.count + 1) * bits[name].shape[1]
            columns.append((bits[name].reshape(-1), starts))
        for name in self.lists:
            columns.append((self.list_arrays[name], self.starts[name]))
            if weights_of(name) in self.list_arrays:
                weights = self.list_arrays[weights_of(name)]
                columns.append((weights.view(np.int32), self.starts[name]))
        return columns


class Rows:
    """Some thousand rows of a prepared log, from which batches are gathered.

    Args:
        schema: the prepared log's.
        pieces: for each row group, feature group -> table. The columns of no group have the key
            None. The tables of feature groups have one row for each run.
        unique: feature groups whose equal rows a batch has once, with the inverse index (an IKJT,
            arXiv 2211.05239). The rows of the other groups are repeated.
    """

    def __init__(
        self,
        schema: Schema,
        pieces: Iterable[Mapping[str | None, pa.Table]],
        unique: Collection[str] = (),
    ) -> None:
        self._schema = schema
        self._places = schema.places
        tables = list(pieces)
        self._rows = _Store(schema, [piece[None] for piece in tables], _names(tables, None))
        self._roles = _roles(schema, [piece[None] for piece in tables])
        self._groups: dict[str, _Store] = {}
        self._run_N: dict[str, Int64s] = {}  # of each row
        self._first_R: dict[str, Int64s] = {}  # the first run that equals each
        for group in schema.groups if tables else ():
            if group in tables[0]:
                runs = [piece[group] for piece in tables]
                store = self._groups[group] = _Store(schema, runs, _names(tables, group))
                lengths = np.concatenate([run[RUN].to_numpy() for run in runs])
                self._run_N[group] = np.repeat(np.arange(store.count), lengths)
                if group in unique:
                    self._first_R[group] = features.runs.first_equal(store.contents(), store.count)

    def __len__(self) -> int:
        return self._rows.count

    @property
    def nbytes(self) -> int:
        """Of memory."""
        arrays = [*self._roles.values(), *self._run_N.values(), *self._first_R.values()]
        stores = [self._rows, *self._groups.values()]
        return sum(array.nbytes for array in arrays) + sum(store.nbytes for store in stores)

    def column(self, name: str) -> Array:
        """Returns the numbers [N] of a role: label, weight, group, session or time."""
        return self._roles[name]

    def batch(self, at: Int64s) -> Batch:
        """Returns the rows at these places [B], in this order."""
        sources = [(self._rows, at)]
        inverse: dict[tuple[str, ...], torch.Tensor] = {}
        dense_BC = self._rows.dense_NC[at]
        if len(self._groups):
            dense_BC = np.empty((len(at), _width(self._places)), np.float32)
            self._fill(dense_BC, self._rows, at)
        for group, store in self._groups.items():
            run_B = self._run_N[group][at]
            self._fill(dense_BC, store, run_B)
            keys = tuple(
                name for name in self._schema.sparse if name in (*store.plain, *store.lists)
            )
            if group in self._first_R and keys:
                first_U, inverse_B = _unique(self._first_R[group][run_B], store.count)
                sources.append((store, first_U))
                inverse[keys] = torch.from_numpy(inverse_B)
            else:
                sources.append((store, run_B))
        roles = {
            kind: torch.from_numpy(self._roles[kind][at])
            for kind in ("label", "weight", "group")
            if kind in self._roles
        }
        latest = int(self._roles["time"][at].max()) if "time" in self._roles and len(at) else None
        return Batch(
            dense_BC=torch.from_numpy(dense_BC),
            ids=self._ids(sources, inverse, latest),
            labels_BT=roles.get("label"),
            weights_B=roles.get("weight"),
            session_B=roles.get("group"),
        )

    def _fill(self, dense_BC: Array, store: _Store, at: Int64s) -> None:
        for name, place in store.places.items():
            dense_BC[:, self._places[name]] = store.dense_NC[at, place]

    def _ids(
        self,
        sources: Sequence[tuple[_Store, Int64s]],
        inverse: Mapping[tuple[str, ...], torch.Tensor],
        time: int | None,
    ) -> KeyedJagged:
        """The id features of rows of stores, the last of which was at a time."""
        has_weights = any(c.weights for c in self._schema.columns.values())
        jagged: dict[str, tuple[Array, Array, Array | None]] = {}
        ids_CB: Array | None = None
        for store, at in sources:
            ids_CB = store.ids_NC[at].T.astype(np.int64, order="C")
            single_B = np.ones(len(at), np.int64)  # as many ids as a row has
            jagged |= {name: (ids_CB[c], single_B, None) for c, name in enumerate(store.plain)}
            for name in store.lists:
                lengths = store.list_arrays[f"{name}:lengths"][at]
                places = np.repeat(store.starts[name][at] - np.cumsum(lengths) + lengths, lengths)
                places += np.arange(len(places))
                weights = store.list_arrays.get(weights_of(name))
                values = store.list_arrays[name][places].astype(np.int64, copy=False)
                jagged[name] = (values, lengths, None if weights is None else weights[places])
        features_in_order = [jagged[name] for name in self._schema.sparse]
        values = [v for v, _, _ in features_in_order]
        if ids_CB is not None and len(sources) == 1 and len(ids_CB) == len(values):
            values = [ids_CB.reshape(-1)]  # as it is
        weights_M: list[Array] = []
        for v, _, w in features_in_order if has_weights else ():
            weights_M.append(np.ones(len(v), np.float32) if w is None else w)
        return KeyedJagged(
            keys=self._schema.sparse,
            values_N=_joined(values, np.int64),
            lengths=_joined([lengths for _, lengths, _ in features_in_order], np.int64),
            weights_N=_joined(weights_M, np.float32) if has_weights else None,
            inverse_B=inverse,
            rows=tuple(len(lengths) for _, lengths, _ in features_in_order) if inverse else None,
            time=time,
        )


def _width(places: Mapping[str, slice]) -> int:
    return sum(place.stop - place.start for place in places.values())


def _unique(first_B: Int64s, count: int) -> tuple[Int64s, Int64s]:
    """Distinct numbers below `count` in the order in which they first occur [U], and which of them
    each one is [B].
    """
    earliest_B = features.runs.first_of(first_B, count)
    new_B = earliest_B == np.arange(len(first_B))
    return first_B[new_B], (np.cumsum(new_B) - 1)[earliest_B]


def batches(schema: Schema, table: pa.Table, batch_size: int) -> Iterator[Batch]:
    """Yields batches of a table that `transform` made, in order. The last one may be shorter."""
    rows = Rows(schema, [{None: table}])
    count = table.num_rows
    return (
        rows.batch(np.arange(low, min(low + batch_size, count)))
        for low in range(0, count, batch_size)
    )


def raw_batches(
    transforms: Transforms,
    rows: pa.RecordBatch | pa.Table,
    batch_size: int,
    row0: int = 0,
    skew: Skew | None = None,
) -> Iterator[Batch]:
    """Yields batches of raw rows, in order, to be scored: columns that no model reads may hold
    anything.

    Args:
        transforms: what the rows pass through.
        rows: of a log.
        batch_size: the last one may be shorter.
        row0, skew: see `Transforms.transform`.

    Raises:
        UserError: for rows that cannot be transformed.
    """
    schema = transforms.schema
    read = {source for name in (*schema.dense, *schema.sparse) for source in schema.sources(name)}
    roles = {schema.columns[name].source or name for name in schema.of_kind(*ROLES)}
    rows = rows.select([name for name in rows.schema.names if name in read or name not in roles])
    return batches(
        schema, transforms.transform(rows, training=False, row0=row0, skew=skew), batch_size
    )


def joined(parts: Sequence[Batch]) -> Batch:
    """Returns the samples of some batches as one batch. What is unique in each stays in the order
    of the batches.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    jagged = [part.ids[key] for key in first.ids.keys for part in parts]
    times = [part.ids.time for part in parts if part.ids.time is not None]
    inverse: dict[tuple[str, ...], torch.Tensor] = {}
    for group in first.ids.inverse_B:
        before = itertools.accumulate((part.ids.stored(group[0]) for part in parts), initial=0)
        inverse[group] = torch.cat(
            [p.ids.inverse_B[group] + n for p, n in zip(parts, before, strict=False)]
        )
    rows: list[int] = []
    for key in first.ids.keys if inverse else ():
        rows.append(sum(part.ids.stored(key) for part in parts))
    return Batch(
        dense_BC=torch.cat([part.dense_BC for part in parts]),
        ids=KeyedJagged(
            keys=first.ids.keys,
            values_N=torch.cat([ids.values_N for ids in jagged] or [first.ids.values_N]),
            lengths=torch.cat([ids.lengths_B for ids in jagged] or [first.ids.values_N]),
            weights_N=_cat([ids.weights_N for ids in jagged]),
            inverse_B=inverse,
            rows=tuple(rows) if inverse else None,
            time=max(times, default=None),
        ),
        labels_BT=_cat([part.labels_BT for part in parts]),
        weights_B=_cat([part.weights_B for part in parts]),
        session_B=_cat([part.session_B for part in parts]),
        row_B=_cat([part.row_B for part in parts]),
    )


def _cat(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def _joined(parts: Sequence[Array], kind: type[np.generic]) -> torch.Tensor:
    array = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, kind), *parts])
    return torch.from_numpy(array)


def _names(pieces: Sequence[Mapping[str | None, pa.Table]], group: str | None) -> Sequence[str]:
    return pieces[0][group].column_names if pieces else ()


def _list_arrays(
    schema: Schema, table: pa.Table, lists: Sequence[str]
) -> Iterator[tuple[str, Array]]:
    """Lists as values and lengths, and their weights."""
    for name in lists:
        yield name, pc.list_flatten(table[name]).to_numpy()
        yield f"{name}:lengths", pc.list_value_length(table[name]).to_numpy().astype(np.int64)
        if schema.columns[name].weights:
            yield weights_of(name), pc.list_flatten(table[weights_of(name)]).to_numpy()


def _roles(schema: Schema, tables: Sequence[pa.Table]) -> dict[str, Array]:
    """What rows are by their roles, where the tables have it."""
    names = tables[0].column_names if tables else ()
    roles = {}
    weights = [name for name in schema.weights if name in names]
    if weights:
        columns = [np.concatenate([table[name].to_numpy() for table in tables]) for name in weights]
        roles["weight"] = columns[0] if len(columns) == 1 else columns[0] * columns[1]
    for kind in ("group", "session", "time"):
        role = schema.role(kind)
        if role is not None and role in names:
            roles[kind] = np.concatenate([table[role].to_numpy() for table in tables])
    if schema.labels and all(name in names for name in schema.labels):
        labels = [[table[name].to_numpy() for name in schema.labels] for table in tables]
        roles["label"] = np.concatenate([np.stack(columns, axis=1) for columns in labels])
    return roles
