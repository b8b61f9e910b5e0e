"""From the ids of a batch, as rows of components, to their vectors: the exchange of tables with
their rows.

On one process the rows are here. On many ranks `sparrow.sharding` sends ids to the ranks that have
their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparrow.core import Jagged, KeyedJagged, UserError
from sparrow.core.errors import suggest
from sparrow.embeddings.components import ComponentTables
from sparrow.embeddings.spec import Feature
from sparrow.kernels.embedding_bag import Bags, Lookup, Lookups
from sparrow.kernels.embedding_bag.arguments import NEVER
from sparrow.kernels.formats import fp32


class Exchange:
    """How the vectors of features come from rows of components, and how gradients go back to these.

    features: who looks into which component: `table` is a component's name, and no other feature
    looks anything up. parts: the rows that are on this process. saved_parts: those that it has to
    save. is_sharded: whether rows of a component may be on other processes.
    """

    features: tuple[Feature, ...]
    parts: tuple[ComponentTables, ...]
    saved_parts: tuple[ComponentTables, ...]
    is_sharded = False

    def multiplies(self, ids: KeyedJagged) -> bool:
        """Whether vectors of a batch can be multiplied while they are looked up, see
        `Feature.times`.
        """
        return False

    def prepare(self, ids: KeyedJagged, rows_N: Tensor, multiply: bool = False) -> Any:
        """Returns a handle of a batch that is ready for lookup. It may run some batches ahead.

        Args:
            ids: the batch, of which keys, lengths, weights and groups count. It may have keys that
                no feature reads.
            rows_N: int32 or int64 [N], the row of each id in the component of its key's feature.
            multiply: whether vectors are multiplied as `Feature.times` says.
        """
        raise NotImplementedError

    def prefetch(self, handle: Any) -> None:
        """Begin to get the rows of a batch of training, some batches ahead.

        Raises:
            UserError: when batches under way have too many rows on an SSD, see `SsdStore.fetch`.
        """
        raise NotImplementedError

    def begin(self, handle: Any) -> None:
        """Begin the lookup before the model asks for it. Vectors travel while the model computes
        something else.
        """

    def lookup(self, handle: Any) -> dict[str, Tensor | Jagged]:
        """Returns feature -> vectors [B, D], or a Jagged of vectors [N, D] for a feature with
        pooling "none".

        Raises:
            UserError: when the handle was released.
        """
        raise NotImplementedError

    def pooled(self, handle: Any) -> Tensor:
        """Returns all features' vectors side by side, see `EmbeddingTables.pooled`.

        Raises:
            UserError: when the features differ in samples, one is not pooled, or the handle was
                released.
        """
        raise NotImplementedError

    def release(self, handle: Any) -> None:
        """Let go of the batch's rows."""
        raise NotImplementedError

    def share_gradients(self) -> None:
        """Give rows that every rank has the gradients of all ranks."""


@dataclass(eq=False)
class LocalHandle:
    """A batch made ready for lookup. Its rows stay where they are until `release`.

    Args:
        ids: the batch.
        bags: its bags of row numbers.
        features: who looks up.
        released: whether `release` was called.
    """

    ids: KeyedJagged
    bags: Bags
    features: tuple[Feature, ...]
    released: bool = False


class LocalExchange(Exchange):
    """The exchange of one process, which has all rows.

    Args:
        rows: all of them.
        features: who looks into which component.
    """

    def __init__(self, rows: ComponentTables, features: Sequence[Feature]) -> None:
        self.rows = rows
        self.parts = self.saved_parts = (rows,)
        self.features = tuple(features)
        factors = [f.times[0] for f in self.features if f.times is not None]
        self._plain = tuple(replace(f, times=None) for f in self.features)
        self._multiplied = tuple(
            f if f.times is None else replace(f, pooling=f.times[1])
            for f in self.features
            if f.name not in factors
        )
        used = {f.table for f in self.features if f.times is not None or f.name in factors}
        formats = [
            record.component.format
            for record in rows.all_records()
            if record.component.name in used
        ]
        exact = all(isinstance(format, fp32.Config) for format in formats)
        self._can_multiply = bool(factors) and exact and rows.slots_are_rows
        self._layouts: dict[object, Lookups] = {}

    @override
    def multiplies(self, ids: KeyedJagged) -> bool:
        wants = ids.weights_N is not None and ids.weights_N.requires_grad
        is_here = (
            not ids.values_N.is_cuda
            and self.rows.impl != "triton"
            and not torch.compiler.is_compiling()
        )
        return self._can_multiply and is_here and not wants

    @override
    def prepare(self, ids: KeyedJagged, rows_N: Tensor, multiply: bool = False) -> LocalHandle:
        assert ids.offsets is not None and ids.rows is not None
        features = self._multiplied if multiply else self._plain
        bags = Bags(
            slots_N=rows_N,
            offsets_B1=ids.offsets,
            weights_N=ids.weights_N,
            inverses=tuple(ids.inverse_B.values()),
            bags=ids.rows,
            bounds=ids.bounds,
            lookups=self._lookups(ids, features),
            moment=self._moment(ids),
        )
        return LocalHandle(ids, bags, features)

    @override
    def prefetch(self, handle: LocalHandle) -> None:
        self.rows.fetch(handle.bags)

    @override
    def lookup(self, handle: LocalHandle) -> dict[str, Tensor | Jagged]:
        dims = self.rows.door.dims
        vectors: dict[str, Tensor] = {}
        for number, output in enumerate(self._outputs(handle)):
            names = [
                f.name
                for f, at in zip(handle.features, handle.bags.lookups, strict=True)
                if at.output == number
            ]
            widths = [dims[at.table] for at in handle.bags.lookups if at.output == number]
            # a split costs backward a copy
            parts = output.split(widths, 1) if len(names) > 1 else (output,)
            vectors |= dict(zip(names, parts, strict=True))
        out: dict[str, Tensor | Jagged] = {}
        for feature in handle.features:
            out[feature.name] = vectors[feature.name]
            if feature.pooling == "none":
                ids = handle.ids[feature.name]
                out[feature.name] = Jagged(
                    values_N=vectors[feature.name],
                    offsets_B1=ids.offsets_B1,
                    inverse_B=ids.inverse_B,
                    host=ids.host,
                )
        return out

    @override
    def pooled(self, handle: LocalHandle) -> Tensor:
        outputs = self._outputs(handle)
        if len(outputs) != 1:
            raise UserError(
                "pooled: the features differ in samples, or one is not pooled; look them up by name"
            )
        return outputs[0]

    @override
    def release(self, handle: LocalHandle) -> None:
        handle.released = True
        self.rows.give_up(handle.bags)

    # -- inside ------------------------------------------------------------------------------------

    def _moment(self, ids: KeyedJagged) -> tuple[int, int]:
        if not self.rows.policies:
            return 0, NEVER
        return ids.batch_size, ids.time if self.rows.asks_time and ids.time is not None else NEVER

    def _outputs(self, handle: LocalHandle) -> list[Tensor]:
        if handle.released:
            raise UserError("lookup: this handle was released; prepare the batch again")
        return self.rows.door(handle.bags)

    def _lookups(self, ids: KeyedJagged, features: tuple[Feature, ...]) -> Lookups:
        uniform = not ids.inverse_B and len(set(ids.rows or ())) <= 1
        if not uniform:
            uniform = len({ids.samples(f.name) for f in features if f.pooling != "none"}) <= 1
        shape = (ids.keys, tuple(ids.inverse_B), uniform)
        if torch.compiler.is_compiling():
            return self._make_lookups(*shape, features)
        kind = (*shape, features is self._multiplied)
        if kind not in self._layouts:
            self._layouts[kind] = self._make_lookups(*shape, features)
        return self._layouts[kind]

    def _make_lookups(
        self,
        keys: tuple[str, ...],
        groups: tuple[tuple[str, ...], ...],
        uniform: bool,
        features: tuple[Feature, ...],
    ) -> Lookups:
        """Pooled features stand side by side in one output if they have as many samples; others
        have their own.
        """
        for f in features:
            if f.name not in keys:
                raise UserError(f"KeyedJagged: no feature {f.name!r}{suggest(f.name, keys)}")
        tables = [record.component.name for record in self.rows.all_records()]
        table_of = {f.name: tables.index(f.table) for f in self.features}
        lookups: list[Lookup] = []
        outputs = 0
        together = -1
        width = 0
        for f in features:
            apart = f.pooling == "none" or not uniform
            if apart or together < 0:
                output = outputs
                outputs = outputs + 1
            if not apart and together < 0:
                together = output
            shared = [
                g for g, group in enumerate(groups) if f.name in group and f.pooling != "none"
            ]
            times = None if f.times is None else f.times[0]
            lookups.append(
                Lookup(
                    table=table_of[f.name],
                    pooling=f.pooling,
                    key=keys.index(f.name),
                    inverse=shared[0] if shared else -1,
                    output=output if apart else together,
                    column=0 if apart else width,
                    by=-1 if times is None else table_of[times],
                    by_key=-1 if times is None else keys.index(times),
                )
            )
            width += 0 if apart else self.rows.door.dims[table_of[f.name]]
        return Lookups(lookups)
