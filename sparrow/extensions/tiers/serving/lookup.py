"""`OnSsd`: lookups of a model of which some tables are on an SSD."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow.embeddings.autograd import Door
from sparrow.embeddings.stores.store import level_of
from sparrow.extensions.tiers.serving.pooled import Key, PooledVectors
from sparrow.extensions.tiers.serving.rows import CachedRows, read
from sparrow.kernels import embedding_bag
from sparrow.kernels.embedding_bag import Bags, Lookup, Rows, Table, Tables
from sparrow.kernels.formats import fp32

# what `Tables` finds out of formats alone
_OF_FORMATS = ("dims", "formats", "is_compiled", "level_counts")
_NONE = torch.zeros(1, dtype=torch.uint8)


@dataclass(eq=False)
class _Missing:
    """A list whose vector will be kept. bag: its number among those of its feature."""

    key: Key
    lookup: Lookup
    bag: int


class OnSsd:
    """Looks up the batches of some embedding tables. Threads may share it.

    The rows of a batch are read into memory of its own, on the first level of their table. Those
    that a delta has are on the next one, as they are in memory.

    Args:
        components: the tables, which do not learn. Their lookups come here from now on.
        cached: number of a table -> its rows, for those on the SSD.
        pooled: vectors of whole lists, if they are to be kept.
        decoded: numbers of tables whose rows on the SSD are in fp32, whatever their format is.
    """

    def __init__(
        self,
        components: Any,
        cached: Mapping[int, CachedRows],
        pooled: PooledVectors | None,
        decoded: Collection[int] = (),
    ) -> None:
        self._components = components
        self.cached = dict(cached)
        self.pooled = pooled
        self._decoded = decoded
        components.door = Door(self, components.door.dims)

    @property
    def names(self) -> list[str]:
        """The components on the SSD."""
        return [rows.table for rows in self.cached.values()]

    @property
    def counted(self) -> list[CachedRows | PooledVectors]:
        """What has counters."""
        return [*self.cached.values(), *([] if self.pooled is None else [self.pooled])]

    def run_lookup(self, bags: Bags) -> list[Tensor]:
        """Returns the outputs of a batch.

        Raises:
            UnreadableError: when rows cannot be read.
        """
        bags = self._components.in_slots(bags)
        vectors_of: dict[int, list[Tensor]] = {}
        missing: list[_Missing] = []
        if self.pooled is not None:
            bags, vectors_of, missing = self._with_vectors(bags, self.pooled)
        slots_N = bags.slots_N.long()
        wanted: dict[int, tuple[list[tuple[int, int]], Tensor]] = {}
        for number in self.cached:
            if places := _pieces(bags, number):
                pieces = [slots_N[low:high] for low, high in places]
                wanted[number] = places, pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        fields = read([(self.cached[number], rows_N) for number, (_, rows_N) in wanted.items()])
        tables = list(self._components.kernel_tables)
        slots_N = slots_N.clone()
        for (number, (places, rows_N)), table_fields in zip(wanted.items(), fields, strict=True):
            vectors = vectors_of.get(number, [])
            tables[number] = self._table(number, len(rows_N), table_fields, vectors)
            if not vectors and len(tables[number].levels) == 1:
                new_N = torch.arange(len(rows_N))
            else:
                new_N = _places(rows_N, self.cached[number].rows, len(vectors))
            begin = 0
            for low, high in places:
                slots_N[low:high] = new_N[begin : begin + high - low]
                begin += high - low
        bags = replace(bags, slots_N=slots_N)
        new_tables = Tables(tables)
        # their levels have the same formats: finding that out again takes as long as the rows of a
        # list
        if not vectors_of and not self._decoded:
            known = self._components.kernel_tables
            new_tables.__dict__.update({name: getattr(known, name) for name in _OF_FORMATS})
        outputs = embedding_bag.lookup(new_tables, bags, impl=self._components.impl)
        if self.pooled is not None:
            self._keep(self.pooled, missing, bags, outputs)
        return outputs

    def run_backward(
        self, grads: Sequence[Tensor], bags: Bags, version: int, needs_weights: bool
    ) -> Tensor | None:
        """Refuse: an exported model does not learn."""
        raise RuntimeError("an exported model does not learn")

    def _table(
        self, number: int, count: int, fields: Mapping[str, Tensor], vectors: Sequence[Tensor]
    ) -> Table:
        """Returns a table with the rows of a batch in the place of all its rows below, behind
        vectors as first rows.
        """
        table = self._components.kernel_tables[number]
        record = self._components.records[number]
        touched = _NONE.expand(count)
        if number in self._decoded:
            below = Rows(format=fp32.Config(), payload=dict(fields), touched_R=touched)
        else:
            below = level_of(record.component, {**fields, "touched": touched})
        levels = [below, *table.levels[1:]]
        if vectors:
            payload = {"weight": torch.stack(list(vectors))}
            levels = [
                Rows(format=fp32.Config(), payload=payload, touched_R=_NONE.expand(len(vectors))),
                *levels,
            ]
        return replace(table, levels=tuple(levels))

    def _with_vectors(
        self, bags: Bags, pooled: PooledVectors
    ) -> tuple[Bags, dict[int, list[Tensor]], list[_Missing]]:
        """Returns bags in which a list whose vector is known has that alone: slot -1 is the first
        of its table.

        Returns the vectors of each table too, and the lists whose vector is to be kept.
        """
        vectors_of: dict[int, list[Tensor]] = {}
        missing: list[_Missing] = []
        # small steps, which numpy takes in less time than torch
        slots_N = bags.slots_N.numpy().astype(np.int64)
        weights_N = None if bags.weights_N is None else bags.weights_N.numpy().copy()
        stays_N = np.ones(len(slots_N), np.bool_)
        multiplied = {f.table for f in bags.lookups if f.by >= 0} | set(bags.lookups.second)
        for f in bags.lookups:
            if f.table not in self.cached or f.pooling == "none" or f.table in multiplied:
                continue
            first = sum(bags.bags[: f.key])
            ends = bags.offsets_B1[first : first + bags.bags[f.key] + 1].tolist()
            for bag, (low, high) in enumerate(pairwise(ends)):
                if high - low < pooled.length:
                    continue
                bag_weights_N = None if weights_N is None else weights_N[low:high]
                feature = 2 * f.table + (f.pooling == "mean")
                key = pooled.key(feature, slots_N[low:high], bag_weights_N)
                if (vector_D := pooled.find(key)) is None:
                    missing.append(_Missing(key, f, bag))
                    continue
                vectors = vectors_of.setdefault(f.table, [])
                vectors.append(vector_D)
                slots_N[low] = -len(vectors)
                stays_N[low + 1 : high] = False
                if weights_N is not None:
                    weights_N[low] = 1.0
        if not vectors_of:
            return bags, vectors_of, missing
        before_N1 = np.concatenate([np.zeros(1, np.int64), stays_N.cumsum()])
        short = replace(
            bags,
            slots_N=torch.from_numpy(slots_N[stays_N]),
            offsets_B1=torch.from_numpy(before_N1[bags.offsets_B1.numpy()]),
            bounds=before_N1[list(bags.bounds)].tolist(),
            weights_N=None if weights_N is None else torch.from_numpy(weights_N[stays_N]),
        )
        return short, vectors_of, missing

    def _keep(
        self,
        pooled: PooledVectors,
        missing: Sequence[_Missing],
        bags: Bags,
        outputs: Sequence[Tensor],
    ) -> None:
        for entry in missing:
            f = entry.lookup
            sample = entry.bag
            if f.inverse >= 0:
                samples = (bags.inverses[f.inverse] == entry.bag).nonzero()[:, 0]
                if not len(samples):  # nobody has the list
                    continue
                sample = int(samples[0])
            dim = self._components.door.dims[f.table]
            pooled.put(entry.key, outputs[f.output][sample, f.column : f.column + dim].clone())


def _pieces(bags: Bags, table: int) -> list[tuple[int, int]]:
    """Returns where the slots begin and end that look into a table, those of neighbouring keys
    together.
    """
    pieces: list[tuple[int, int]] = []
    for key in sorted(
        {f.key for f in bags.lookups if f.table == table}
        | {f.by_key for f in bags.lookups if f.by == table}
    ):
        low = bags.bounds[key]
        high = bags.bounds[key + 1]
        if pieces and pieces[-1][1] == low:
            low = pieces.pop()[0]
        pieces.append((low, high))
    return pieces


def _places(slots_N: Tensor, rows: int, vectors: int) -> Tensor:
    """Returns the slots of lookups in the table of their batch.

    There, vectors of lists come first, then a row for each lookup, then those of a delta.

    Args:
        slots_N: of the table with all its rows below. -1 is the first vector, -2 the next.
        rows: how many rows are below.
        vectors: how many there are.
    """
    places_N = torch.arange(vectors, vectors + len(slots_N))
    if vectors:
        places_N = torch.where(slots_N < 0, -1 - slots_N, places_N)
    return torch.where(slots_N < rows, places_N, slots_N + (vectors + len(slots_N) - rows))
