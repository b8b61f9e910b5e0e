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
from sparrow.embeddings.components import ComponentHandle, ComponentTables, Mode, Passed
from sparrow.embeddings.stores import Saved
from sparrow.kernels import Impl
from sparrow.kernels.expand import expand
from sparrow.sharding import copies
from sparrow.sharding.exchange import Codecs, Exchange, InFlight
from sparrow.sharding.layout import Layout
from sparrow.sharding.routes import Routes


@dataclass(eq=False)
class Travelling:
    """A batch whose ids are on their way to the shards.

    Args:
        ids: the batch.
        copied: its rows in tables that are copied to every rank.
        sent: its ids, which leave with a later lookup.
        begun: its vectors, once their lookup has begun.
    """

    ids: KeyedJagged
    copied: ComponentHandle | None
    sent: Pending[InFlight] | None
    begun: tuple[Tensor, InFlight] | None = None


class ShardedTables(nn.Module):
    """`ComponentTables` over many ranks: rows go to the shards, pooled vectors come back, gradients go there again.

    The gradients of all ranks are summed, so each rank's loss must be its share of the global one. A shard sums a row's
    gradients over features, ranks and samples in that order. One process does the same with the ranks' batches one
    after the other. Every call is one of all ranks together.

    Args:
        whole: the tables that these stand for. Their rows may be unallocated.
        seed: of the first values of the rows.
        plan: component -> layout.
        world: the ranks.
        codecs: of vectors and of their gradients.

    Raises:
        UserError: for a plan that does not fit the tables.
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
            if layout.is_replicated and not components[name].has_equal_copies:
                what = "rows that come and go, and copies of them would differ"
                if components[name].cache.is_on:
                    what = "a cache, and copies of caches would differ"
                elif components[name].tier.is_on:
                    what = f"the tier {components[name].tier.name!r}, and a copy would need rows of all ranks' batches"
                raise UserError(f"plan: table {name!r} has {what}; put it on one rank or cut it")
        if missing := [name for name in components if name not in plan]:
            raise UserError(f"plan: nothing for table {missing[0]!r}; give it a layout")
        self.world = world
        self.features = whole.features
        shards = {name: plan[name].shards(name, c.rows, c.dim, c.policy) for name, c in components.items()}
        for table, columns in dict.fromkeys((s.table, s.columns) for of_table in shards.values() for s in of_table):
            components[table].check_columns(columns)
        mine = [shard for of_table in shards.values() for shard in of_table if shard.rank == world.rank]
        here = [RowRecords(components[s.table], seed, s.rows, s.columns) for s in mine]
        self.local = ComponentTables(here, [], impl=whole.impl)
        everywhere = [RowRecords(c, seed) for name, c in components.items() if plan[name].is_replicated]
        copied = [f for f in self.features if plan[f.table].is_replicated]
        self.copies = ComponentTables(everywhere, copied, impl=whole.impl)
        self.sharded = tuple(f for f in self.features if not plan[f.table].is_replicated)
        clocks = {c.policy.clock for c in components.values() if c.policy}
        self._routes = partial(Routes, world, self.sharded, plan, shards, clocks)
        self._mine = mine
        self._has_ssd = any(component.tier.is_on for component in components.values())
        self._codecs = codecs
        self._exchanges: dict[tuple[tuple[str, ...], ...], Exchange] = {}
        self.exchange = self._exchange(())
        self.mode = whole.mode
        self._ahead: weakref.WeakValueDictionary[int, Travelling] = weakref.WeakValueDictionary()  # in their order
        self._prepared = 0

    # -- the lifecycle ------------------------------------------------------------------------------------------

    def multiplies(self, ids: KeyedJagged) -> bool:
        """Whether vectors can be multiplied while they are looked up: no, since rows of both may be on other ranks."""
        return False

    def prepare(self, ids: KeyedJagged, rows_N: Tensor, multiply: bool = False) -> Travelling:
        """Returns a handle of a batch whose rows are sent on their way.

        Their sizes leave at once, and the rows with the next lookup. A rank that sent vectors had sent its sizes
        before, so nobody waits for sizes.

        Args:
            ids: the batch.
            rows_N: int32 or int64 [N], the row of each id in the component of its key's feature.
            multiply: False, see `multiplies`.
        """
        copied = self.copies.prepare(ids, rows_N) if self.copies.features else None
        handle = Travelling(ids, copied, self._send(ids, rows_N) if self.sharded else None)
        self._prepared += 1
        self._ahead[self._prepared] = handle
        return handle

    def prefetch(self, handle: Travelling) -> None:
        """Do what `ComponentTables.prefetch` does. Rows of other ranks' ids are read as soon as these came."""
        if handle.copied is not None:
            self.copies.prefetch(handle.copied)

    def fetch(self) -> None:
        """Begin to read rows on an SSD for the batches that all ranks have prepared."""
        if self._has_ssd:  # of any rank: each lets its ids leave now
            for following in list(self._ahead.values()):  # in their order
                if following.sent is not None and following.begun is None:
                    following.sent.wait().exchange.fetch(following.sent.wait())

    def begin(self, handle: Travelling) -> None:
        """Begin to look a batch up before the model asks for it.

        Vectors travel while the model computes something else.
        """
        if handle.sent is not None and handle.begun is None:
            sent = handle.sent.wait()
            # on the device: else the host's thread of backward would launch collectives beside that of the device
            anchor = torch.zeros((), device=sent.device, requires_grad=True)
            handle.begun = _Begin.apply(anchor, self, sent), sent

    def pooled(self, handle: Travelling) -> Tensor:
        """Returns what `EmbeddingTables.pooled` does.

        Raises:
            UserError: when the features differ in samples, or one is not pooled.
        """
        if any(feature.pooling == "none" for feature in self.features):
            raise UserError("pooled: the features differ in samples, or one is not pooled; look them up by name")
        if handle.copied is None and not handle.ids.inverse_B:
            return self._exchanged(handle)[0]
        found = self.lookup(handle)
        return torch.cat([found[feature.name] for feature in self.features], 1)  # type: ignore[misc]

    def lookup(self, handle: Travelling) -> dict[str, Tensor | Jagged]:
        """Returns feature -> vectors, see `ComponentTables.lookup`."""
        found = {} if handle.copied is None else self.copies.lookup(handle.copied)
        if self.sharded:
            ids = handle.ids
            routes = self._exchange(tuple(ids.inverse_B)).routes
            vectors = self._exchanged(handle)
            pooled, sequences = vectors[: len(routes.widths)], vectors[len(routes.widths) :]
            for group, inverse_B in enumerate(ids.inverse_B.values(), 1):
                pooled[group] = expand(pooled[group], inverse_B)
            for number, feature in enumerate(self.sharded):
                if feature.pooling == "none":
                    at = ids[feature.name]
                    found[feature.name] = Jagged(
                        values_N=sequences.pop(0), offsets_B1=at.offsets_B1, inverse_B=at.inverse_B, host=at.host
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
        """Returns the exchange for batches with these dedup groups. Every rank's batches have the same."""
        if groups not in self._exchanges:
            of = {name: number for number, names in enumerate(groups, 1) for name in names}
            routes = self._routes([of.get(feature.name, 0) for feature in self.sharded], len(groups))
            self._exchanges[groups] = Exchange(routes, self.local, self._mine, self._codecs)
        return self._exchanges[groups]

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gradients that were collected: all in "deferred" mode, those of copied tables in "fused" mode."""
        self._share()
        self.local.update()
        self.copies.update()
        self.discard()

    def gradients(self) -> dict[str, RowGradients]:
        """Returns exact unique-row gradients of the rows that are here. Those of copied tables agree on all ranks."""
        self._share()
        return {**self.local.gradients(), **self.copies.gradients()}

    def discard(self) -> None:
        """Forget the collected gradients."""
        self.local.discard()
        self.copies.discard()
        self._shared = False

    @property
    def updates(self) -> int:
        """How many updates there were; copied tables count all of them, on every rank."""
        return self.copies.updates

    @updates.setter
    def updates(self, updates: int) -> None:
        self.local.updates = updates
        self.copies.updates = updates

    @property
    def passed(self) -> Passed:
        """What training has seen so far, the same on all ranks."""
        return self.local.passed

    @passed.setter
    def passed(self, passed: Passed) -> None:
        self.local.passed = passed

    def scale_lr(self, factor: float) -> None:
        """Do what `ComponentTables.scale_lr` does."""
        self.local.scale_lr(factor)
        self.copies.scale_lr(factor)

    @property
    def impl(self) -> Impl:
        """Which implementation computes, see `sparrow.kernels`."""
        return self.local.impl

    @impl.setter
    def impl(self, impl: Impl) -> None:
        self.local.impl = impl
        self.copies.impl = impl

    @property
    def mode(self) -> Mode:
        """How gradients reach the table rows. Copied tables learn in `update` in any case."""
        return self.local.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self.local.mode = mode
        self.copies.mode = "off" if mode == "off" else "deferred"
        self._shared = False

    def _share(self) -> None:
        """Give copied tables the gradients of all ranks, once."""
        if not self._shared and self.mode != "off":
            self._shared = True
            copies.share(self.world, self.copies)

    def _send(self, ids: KeyedJagged, rows_N: Tensor) -> Pending[InFlight]:
        if ids.weights_N is not None and ids.weights_N.requires_grad:
            raise UserError("tables: weights that learn cannot be sharded; keep them out of the graph")
        return self._exchange(tuple(ids.inverse_B)).send(ids, rows_N)

    # -- rows in and out, and the rest --------------------------------------------------------------------------

    def all_records(self) -> Iterator[RowRecords]:
        """Returns the rows that are here."""
        yield from self.local.all_records()
        yield from self.copies.all_records()

    def record(self, name: str) -> RowRecords:
        """Returns nothing, because a component's rows may be on many ranks.

        Raises:
            UserError: always.
        """
        raise UserError(f"table {name!r} is sharded; its rows here are among `all_records`")

    def chunks(self, max_bytes: int = 64 << 20) -> Iterator[Chunk]:
        """Returns the row records that this rank has to save. Rank 0 saves the copied tables."""
        yield from self.local.chunks(max_bytes)
        if self.world.rank == 0:
            yield from self.copies.chunks(max_bytes)

    def saved(self) -> Iterator[Chunk | Saved]:
        """Returns what `chunks` does, as a checkpoint has it, see `RowRecords.saved`."""
        yield from self.local.saved()
        if self.world.rank == 0:
            yield from self.copies.saved()

    def changed(self) -> None:
        """Do what `ComponentTables.changed` does."""
        self.local.changed()
        self.copies.changed()


class _Begin(torch.autograd.Function):
    """Forward looks all sharded features up here, and sends their vectors. Backward awaits gradients, and learns."""

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
    """Forward awaits the vectors. Backward sends gradients, which travel during the backward of earlier operations."""

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
            ctx.tables.fetch()  # the ids that they wait for left before forward ended
        return torch.zeros((), device=ctx.sent.device), None, None


def shard(model: nn.Module, plan: Mapping[str, Layout], world: World, codecs: Codecs) -> None:
    """Put sharded components in the place of those of every `EmbeddingTables` of a model.

    Args:
        model: is changed.
        plan: component -> layout.
        world: the ranks.
        codecs: of vectors and of their gradients.

    Raises:
        UserError: for a plan that does not fit the tables.
    """
    for tables in [module for module in model.modules() if isinstance(module, EmbeddingTables)]:
        names = [component.name for spec in tables.specs for component in spec.components]
        mine = {name: plan[name] for name in names if name in plan}
        tables.components = ShardedTables(tables.components, tables.seed, mine, world, codecs)
