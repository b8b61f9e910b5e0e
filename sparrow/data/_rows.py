"""Transformed rows as numpy arrays, from which batches are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparrow.core import Batch, KeyedJagged
from sparrow.data.schema import Schema
from sparrow.data.transformed import weights_of

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]


class Rows:
    """Some thousand rows of tables that `transform` made, put behind one another."""

    def __init__(self, schema: Schema, tables: Iterable[pa.Table], count: int) -> None:
        self._schema = schema
        self._ids_NC: Array | None = None
        self._plain = [name for name in schema.sparse if schema.columns[name].kind != "list"]
        self._dense_NC = np.empty((count, len(schema.dense)), np.float32)
        pieces: dict[str, list[Array]] = {}
        first = 0
        for table in tables:
            last = first + table.num_rows
            for c, name in enumerate(schema.dense):
                self._dense_NC[first:last, c] = table[name].to_numpy()
            if self._plain:
                if self._ids_NC is None:
                    is_wide = any(table[name].type == pa.int64() for name in self._plain)
                    self._ids_NC = np.empty((count, len(self._plain)), np.int64 if is_wide else np.int32)
                for c, name in enumerate(self._plain):
                    self._ids_NC[first:last, c] = table[name].to_numpy()
            for name, values in _others(schema, table):
                pieces.setdefault(name, []).append(values)
            first = last
        self._others = {name: np.concatenate(parts) for name, parts in pieces.items()}
        self._starts = {
            name: np.concatenate([[0], np.cumsum(self._others[f"{name}:lengths"])])
            for name in schema.sparse
            if f"{name}:lengths" in self._others
        }

    def batch(self, at: Int64s) -> Batch:
        """The rows at these places [B], in this order."""
        values, lengths, weights = [], [], []
        ids_CB = None if self._ids_NC is None else self._ids_NC[at].T.astype(np.int64, order="C")
        ones, any_weights = np.ones(len(at), np.int64), any(c.weights for c in self._schema.columns.values())
        for name in self._schema.sparse:
            if name in self._starts:
                lengths.append(self._others[f"{name}:lengths"][at])
                places = np.repeat(self._starts[name][at] - np.cumsum(lengths[-1]) + lengths[-1], lengths[-1])
                places += np.arange(len(places))
                values.append(self._others[name][places].astype(np.int64, copy=False))
            else:
                assert ids_CB is not None
                lengths.append(ones)
                values.append(ids_CB[self._plain.index(name)])
            if any_weights:
                all_N = self._others.get(weights_of(name))
                weights.append(np.ones(len(values[-1]), np.float32) if all_N is None else all_N[places])
        if ids_CB is not None and len(ids_CB) == len(values):
            values = [ids_CB.reshape(-1)]  # as it is
        roles = {
            kind: torch.from_numpy(self._others[kind][at])
            for kind in ("label", "weight", "group")
            if kind in self._others
        }
        return Batch(
            dense_BC=torch.from_numpy(self._dense_NC[at]),
            ids=KeyedJagged(
                keys=self._schema.sparse,
                values_N=_joined(values, np.int64),
                lengths=_joined(lengths, np.int64),
                weights_N=_joined(weights, np.float32) if any_weights else None,
            ),
            labels_BT=roles.get("label"),
            weights_B=roles.get("weight"),
            session_B=roles.get("group"),
        )


def batches(schema: Schema, table: pa.Table, batch_size: int) -> Iterator[Batch]:
    """Batches of a table that `transform` made, in order; the last one may be shorter."""
    rows, count = Rows(schema, [table], table.num_rows), table.num_rows
    return (rows.batch(np.arange(low, min(low + batch_size, count))) for low in range(0, count, batch_size))


def joined(parts: Sequence[Batch]) -> Batch:
    """The samples of some batches as one."""
    if len(parts) == 1:
        return parts[0]
    first, each = parts[0], [part.ids[key] for key in parts[0].ids.keys for part in parts]
    return Batch(
        dense_BC=torch.cat([part.dense_BC for part in parts]),
        ids=KeyedJagged(
            keys=first.ids.keys,
            values_N=torch.cat([ids.values_N for ids in each] or [first.ids.values_N]),
            lengths=torch.cat([ids.lengths_B for ids in each] or [first.ids.values_N]),
            weights_N=_cat([ids.weights_N for ids in each]),
        ),
        labels_BT=_cat([part.labels_BT for part in parts]),
        weights_B=_cat([part.weights_B for part in parts]),
        session_B=_cat([part.session_B for part in parts]),
    )


def _cat(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


def _joined(parts: Sequence[Array], kind: type[np.generic]) -> torch.Tensor:
    whole = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, kind), *parts])
    return torch.from_numpy(whole)


def _others(schema: Schema, table: pa.Table) -> Iterator[tuple[str, Array]]:
    """Lists as values and lengths, their weights, and what rows are by their roles."""
    for name in schema.sparse:
        if schema.columns[name].kind == "list":
            yield name, pc.list_flatten(table[name]).to_numpy()
            yield f"{name}:lengths", pc.list_value_length(table[name]).to_numpy().astype(np.int64)
            if schema.columns[name].weights:
                yield weights_of(name), pc.list_flatten(table[weights_of(name)]).to_numpy()
    for kind in ("weight", "group"):
        role = schema.role(kind)
        if role is not None and role in table.column_names:
            yield kind, table[role].to_numpy()
    if schema.labels and all(name in table.column_names for name in schema.labels):
        yield "label", np.stack([table[name].to_numpy() for name in schema.labels], axis=1)
