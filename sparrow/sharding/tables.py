from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.core.errors import suggest
from sparrow.distributed import Pending, World
from sparrow.embeddings import EmbeddingTables, RowGradients, RowRecords
from sparrow.embeddings.components import ComponentHandle, ComponentTables, Mode
from sparrow.sharding import copies
from sparrow.sharding.exchange import Codecs, Exchange, InFlight
from sparrow.sharding.layout import Layout
from sparrow.sharding.routes import Routes


@dataclass(eq=False)
class Travelling:
    """A batch whose ids are on their way to the shards.

    copied: its rows in tables that are copied to every rank. sent, then begun: its ids, which leave with a later
    lookup, and its vectors.
    """

    ids: KeyedJagged
    copied: ComponentHandle | None
    sent: Pending[InFlight] | None
    begun: tuple[Tensor, InFlight] | None = None


class ShardedTables(nn.Module):
    """`ComponentTables` over many ranks: rows go to the shards, pooled vectors come back, gradients go there again.

    whole: the tables they stand for, whose rows may be unallocated. seed: of the first rows. plan: component -> layout.
    codecs: of vectors and of their gradients. The gradients of all ranks are summed: each rank's loss
    must be its share of the global one. A shard sums a row's gradients over features, ranks and samples in that order,
    as one process does with the ranks' batches one after the other. Every call is one of all ranks together. Raises
    UserError for a plan that does not fit the tables.
    """

    def __init__(
        self, whole: ComponentTables, seed: int, plan: Mapping[str, Layout], world: World, codecs: Codecs
    ) -> None:
        super().__init__()
        components = {record.component.name: record.component for record in whole.all_records()}
        for name, layout in plan.items():
            if name not in components:
                raise UserError(f"plan: no table {name!r}{suggest(name, list(components))}")
            layout.check(name, world.size, world.local_size)
            components[name].check_columns(layout.columns)
        if missing := [name for name in components if name not in plan]:
            raise UserError(f"plan: nothing for table {missing[0]!r}; give it a layout")
        self.world = world
        self.features = whole.features
        self.impl = whole.impl
        shards = {name: plan[name].shards(name, c.rows, c.dim) for name, c in components.items()}
        mine = [shard for of_table in shards.values() for shard in of_table if shard.rank == world.rank]
        here = [RowRecords(components[s.table], seed, s.rows, s.columns) for s in mine]
        self.local = ComponentTables(here, [], impl=whole.impl)
        everywhere = [RowRecords(c, seed) for name, c in components.items() if plan[name].is_replicated]
        copied = [f for f in self.features if plan[f.table].is_replicated]
        self.copies = ComponentTables(everywhere, copied, impl=whole.impl)
        self.sharded = tuple(f for f in self.features if not plan[f.table].is_replicated)
        self._routes = partial(Routes, world, self.sharded, plan, shards)
        self._mine = mine
        self._codecs = codecs
        self._exchanges: dict[tuple[tuple[str, ...], ...], Exchange] = {}
        self.exchange = self._exchange(())
        self.mode = whole.mode
        self.anchor = torch.zeros((), requires_grad=True)
        self._ahead: weakref.WeakValueDictionary[int, Travelling] = weakref.WeakValueDictionary()  # in their order
        self._prepared = 0

    # -- the lifecycle ------------------------------------------------------------------------------------------

    def prepare(self, ids: KeyedJagged, rows_N: Tensor) -> Travelling:
        """Send a batch's rows on their way.

        Their sizes leave at once, the rows with the next lookup: whoever sent vectors sent sizes before, so nobody
        waits for those.
        """
        copied = self.copies.prepare(ids, rows_N) if self.copies.features else None
        handle = Travelling(ids, copied, self._send(ids, rows_N) if self.sharded else None)
        self._prepared += 1
        self._ahead[self._prepared] = handle
        return handle

    def begin(self, handle: Travelling) -> None:
        """Look a batch up before the model asks for it: vectors travel while it computes something else."""
        if handle.sent is not None and handle.begun is None:
            sent = handle.sent.wait()
            handle.begun = _Begin.apply(self.anchor, self, sent), sent

    def pooled(self, handle: Travelling) -> Tensor:
        """See `EmbeddingTables.pooled`."""
        if any(feature.pooling == "none" for feature in self.features):
            raise UserError("pooled: the features differ in samples, or one is not pooled; look them up by name")
        if handle.copied is None and not handle.ids.inverse_B:
            return self._exchanged(handle)[0]
        found = self.lookup(handle)
        return torch.cat([found[feature.name] for feature in self.features], 1)  # type: ignore[misc]

    def lookup(self, handle: Travelling) -> dict[str, Tensor | Jagged]:
        """Feature -> vectors, see `ComponentTables.lookup`."""
        found = {} if handle.copied is None else self.copies.lookup(handle.copied)
        if self.sharded:
            ids = handle.ids
            routes = self._exchange(tuple(ids.inverse_B)).routes
            vectors = self._exchanged(handle)
            pooled, sequences = vectors[: len(routes.widths)], vectors[len(routes.widths) :]
            for group, inverse_B in enumerate(ids.inverse_B.values(), 1):
                pooled[group] = pooled[group].index_select(0, inverse_B)
            for number, feature in enumerate(self.sharded):
                if feature.pooling == "none":
                    at = ids[feature.name]
                    found[feature.name] = Jagged(
                        values_N=sequences.pop(0), offsets_B1=at.offsets_B1, inverse_B=at.inverse_B
                    )
                else:
                    found[feature.name] = pooled[routes.groups[number]][:, routes.columns_of(number)]
        return {feature.name: found[feature.name] for feature in self.features}

    def release(self, handle: Travelling) -> None:
        """Let go of the batch's rows."""
        if handle.copied is not None:
            self.copies.release(handle.copied)

    def _exchanged(self, handle: Travelling) -> list[Tensor]:
        """See `InFlight.vectors`."""
        self.begin(handle)
        assert handle.begun is not None
        token, sent = handle.begun
        vectors = list(_End.apply(token, self, sent))
        for following in list(self._ahead.values()):  # every rank's ids leave in the same order
            if following.sent is not None and following.begun is None:
                following.sent.wait()
        return vectors

    def _exchange(self, groups: tuple[tuple[str, ...], ...]) -> Exchange:
        """That for batches with these dedup groups; every rank's have the same."""
        if groups not in self._exchanges:
            of = {name: number for number, names in enumerate(groups, 1) for name in names}
            routes = self._routes([of.get(feature.name, 0) for feature in self.sharded], len(groups))
            self._exchanges[groups] = Exchange(routes, self.local, self._mine, self._codecs)
        return self._exchanges[groups]

    @torch.no_grad()
    def update(self) -> None:
        """Apply what was collected: in "deferred" mode everything, in "fused" mode that of copied tables."""
        self._share()
        self.local.update()
        self.copies.update()
        self.discard()

    def gradients(self) -> dict[str, RowGradients]:
        """Exact unique-row gradients of the rows that are here; those of copied tables are the same on every rank."""
        self._share()
        return {**self.local.gradients(), **self.copies.gradients()}

    def discard(self) -> None:
        """Forget the collected gradients."""
        self.local.discard()
        self.copies.discard()
        self._shared = False

    def scale_lr(self, factor: float) -> None:
        """See `ComponentTables.scale_lr`."""
        self.local.scale_lr(factor)
        self.copies.scale_lr(factor)

    @property
    def mode(self) -> Mode:
        """How gradients reach the rows; copied tables learn in `update` in any case."""
        return self.local.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self.local.mode = mode
        self.copies.mode = "off" if mode == "off" else "deferred"
        self._shared = False

    def _share(self) -> None:
        """Give copied tables everyone's gradients, once."""
        if not self._shared and self.mode != "off":
            self._shared = True
            copies.share(self.world, self.copies)

    def _send(self, ids: KeyedJagged, rows_N: Tensor) -> Pending[InFlight]:
        if ids.weights_N is not None and ids.weights_N.requires_grad:
            raise UserError("tables: weights that learn cannot be sharded; keep them out of the graph")
        return self._exchange(tuple(ids.inverse_B)).send(ids, rows_N)

    # -- rows in and out, and the rest --------------------------------------------------------------------------

    def all_records(self) -> Iterator[RowRecords]:
        """The rows that are here."""
        yield from self.local.all_records()
        yield from self.copies.all_records()

    def record(self, name: str) -> RowRecords:
        """UserError: a component's rows may be on many ranks."""
        raise UserError(f"table {name!r} is sharded; its rows here are among `all_records`")

    def chunks(self, max_bytes: int = 64 << 20) -> Iterator[Chunk]:
        """The rows that are this rank's to save; copied tables are rank 0's."""
        yield from self.local.chunks(max_bytes)
        if self.world.rank == 0:
            yield from self.copies.chunks(max_bytes)

    def changed(self) -> None:
        """See `ComponentTables.changed`."""
        self.local.changed()
        self.copies.changed()


class _Begin(torch.autograd.Function):
    """The local lookup of all sharded features, whose vectors leave; backward awaits gradients, and learns."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tables: ShardedTables, sent: InFlight) -> Tensor:
        ctx.tables = tables
        ctx.sent = sent
        ctx.version = tables.local.door.version
        sent.exchange.lookup(sent)
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        if ctx.tables.mode != "off":
            ctx.sent.exchange.learn(ctx.sent, ctx.version)
        return None, None, None


class _End(torch.autograd.Function):
    """Awaits the vectors; backward sends gradients, which travel while what the model did before has its backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, tables: ShardedTables, sent: InFlight) -> tuple[Tensor, ...]:
        ctx.tables = tables
        ctx.sent = sent
        assert sent.vectors is not None
        return tuple(sent.vectors.wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.tables.mode != "off":
            ctx.sent.exchange.send_grads(ctx.sent, grads)
        return torch.zeros(()), None, None


def shard(model: nn.Module, plan: Mapping[str, Layout], world: World, codecs: Codecs) -> None:
    """Put sharded components in the place of those of every `EmbeddingTables` of a model; UserError as theirs.

    plan: component -> layout.
    """
    for tables in [module for module in model.modules() if isinstance(module, EmbeddingTables)]:
        names = [component.name for spec in tables.specs for component in spec.components]
        mine = {name: plan[name] for name in names if name in plan}
        tables.components = ShardedTables(tables.components, tables.seed, mine, world, codecs)
