from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from sparrow.core import Jagged, KeyedJagged, UserError
from sparrow.core.errors import suggest
from sparrow.distributed import Pending, World
from sparrow.embeddings import ON_CPU, Component, EmbeddingTables, Feature, Placement, RowRecords
from sparrow.embeddings.components import ComponentTables
from sparrow.embeddings.exchange import Exchange, LocalExchange, LocalHandle
from sparrow.kernels.expand import expand
from sparrow.sharding import copies
from sparrow.sharding.exchange import Codecs, GroupExchange, InFlight
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
    copied: LocalHandle | None
    sent: Pending[InFlight] | None
    begun: tuple[Tensor, InFlight] | None = None


class ShardedExchange(Exchange):
    """The exchange of many ranks: rows go to the shards, pooled vectors come back, gradients go
    there again.

    The gradients of all ranks are summed, so each rank's loss must be its share of the global one.
    A shard sums a row's gradients over features, ranks and samples in that order. One process does
    the same with the ranks' batches one after the other. Every call is one of all ranks together.

    shards: the rows that are on this rank alone. copies: tables that every rank has.

    Args:
        components: all of them.
        features: who looks into which component.
        seed: of the first values of the rows.
        plan: component -> layout.
        world: the ranks.
        codecs: of vectors and of their gradients.
        placement: where the rows here are kept.

    Raises:
        UserError: for a plan that does not fit the tables.
    """

    is_sharded = True

    def __init__(
        self,
        components: Sequence[Component],
        features: Sequence[Feature],
        seed: int,
        plan: Mapping[str, Layout],
        world: World,
        codecs: Codecs,
        placement: Placement,
    ) -> None:
        by_name = {component.name: component for component in components}
        check_plan(plan, by_name, world)
        self.world = world
        self.features = tuple(features)
        shards = {
            name: plan[name].shards(name, c.rows, c.dim, c.policy) for name, c in by_name.items()
        }
        all_shards = list(chain.from_iterable(shards.values()))
        for table, columns in dict.fromkeys((shard.table, shard.columns) for shard in all_shards):
            by_name[table].check_columns(columns)
        own_shards = [shard for shard in all_shards if shard.rank == world.rank]
        own_records = [
            RowRecords(by_name[s.table], seed, s.rows, s.columns, placement) for s in own_shards
        ]
        self.shards = ComponentTables(own_records)
        copied = [
            RowRecords(c, seed, placement=placement)
            for c in components
            if plan[c.name].is_replicated
        ]
        self.copies = ComponentTables(copied, is_copied=True)
        self.parts = (self.shards, self.copies)
        self.saved_parts = self.parts if world.rank == 0 else (self.shards,)
        self.copied = LocalExchange(
            self.copies, [f for f in self.features if plan[f.table].is_replicated]
        )
        self.sharded = tuple(f for f in self.features if not plan[f.table].is_replicated)
        clocks = {component.policy.clock for component in components if component.policy}
        self._routes = partial(Routes, world, self.sharded, plan, shards, clocks)
        self._own_shards = own_shards
        self._has_ssd = any(component.tier.is_on for component in components)
        self._codecs = codecs
        self._groups: dict[tuple[tuple[str, ...], ...], GroupExchange] = {}
        self.group = self._group(())
        # in their order
        self._upcoming: weakref.WeakValueDictionary[int, Travelling] = weakref.WeakValueDictionary()
        self._prepared = 0

    # -- the lifecycle -----------------------------------------------------------------------------

    @override
    def prepare(self, ids: KeyedJagged, rows_N: Tensor, multiply: bool = False) -> Travelling:
        # sizes leave at once, and the rows with the next lookup: a rank that sent vectors had sent
        # its sizes before, so nobody waits for sizes
        copied = self.copied.prepare(ids, rows_N) if self.copied.features else None
        handle = Travelling(ids, copied, self._send(ids, rows_N) if self.sharded else None)
        self._prepared += 1
        self._upcoming[self._prepared] = handle
        return handle

    @override
    def prefetch(self, handle: Travelling) -> None:
        if handle.copied is not None:
            self.copied.prefetch(handle.copied)

    def fetch(self) -> None:
        """Begin to read rows on an SSD for the batches that all ranks have prepared."""
        if self._has_ssd:  # of any rank: each lets its ids leave now
            for following in list(self._upcoming.values()):  # in their order
                if following.sent is not None and following.begun is None:
                    following.sent.wait().exchange.fetch(following.sent.wait())

    @override
    def begin(self, handle: Travelling) -> None:
        if handle.sent is not None and handle.begun is None:
            sent = handle.sent.wait()
            # on the device: else the host's thread of backward would launch collectives beside that
            # of the device
            anchor = torch.zeros((), device=sent.device, requires_grad=True)
            handle.begun = _Begin.apply(anchor, self, sent), sent

    @override
    def pooled(self, handle: Travelling) -> Tensor:
        if any(feature.pooling == "none" for feature in self.features):
            raise UserError(
                "pooled: the features differ in samples, or one is not pooled; look them up by name"
            )
        if handle.copied is None and not handle.ids.inverse_B:
            return self._exchanged(handle)[0]
        vectors = self.lookup(handle)
        return torch.cat([vectors[feature.name] for feature in self.features], 1)  # type: ignore[misc]

    @override
    def lookup(self, handle: Travelling) -> dict[str, Tensor | Jagged]:
        outputs = {} if handle.copied is None else self.copied.lookup(handle.copied)
        if self.sharded:
            ids = handle.ids
            routes = self._group(tuple(ids.inverse_B)).routes
            vectors = self._exchanged(handle)
            pooled = vectors[: len(routes.widths)]
            sequences = vectors[len(routes.widths) :]
            for group, inverse_B in enumerate(ids.inverse_B.values(), 1):
                pooled[group] = expand(pooled[group], inverse_B)
            for number, feature in enumerate(self.sharded):
                if feature.pooling == "none":
                    at = ids[feature.name]
                    outputs[feature.name] = Jagged(
                        values_N=sequences.pop(0),
                        offsets_B1=at.offsets_B1,
                        inverse_B=at.inverse_B,
                        host=at.host,
                    )
                else:
                    group_vectors = pooled[routes.groups[number]]
                    outputs[feature.name] = group_vectors[:, routes.columns_of(number)]
        return {feature.name: outputs[feature.name] for feature in self.features}

    @override
    def release(self, handle: Travelling) -> None:
        if handle.copied is not None:
            self.copied.release(handle.copied)

    def _exchanged(self, handle: Travelling) -> list[Tensor]:
        """See `InFlight.vectors`."""
        self.begin(handle)
        assert handle.begun is not None
        token, sent = handle.begun
        vectors = list(_End.apply(token, self, sent))
        for following in list(self._upcoming.values()):  # every rank's ids leave in the same order
            if following.sent is not None and following.begun is None:
                following.sent.wait()
        return vectors

    def _group(self, groups: tuple[tuple[str, ...], ...]) -> GroupExchange:
        """Returns the exchange for batches with these dedup groups. Every rank's batches have the
        same.
        """
        if groups not in self._groups:
            group_of: dict[str, int] = {}
            for number, names in enumerate(groups, 1):
                group_of |= dict.fromkeys(names, number)
            routes = self._routes(
                [group_of.get(feature.name, 0) for feature in self.sharded], len(groups)
            )
            self._groups[groups] = GroupExchange(
                routes, self.shards, self._own_shards, self._codecs
            )
        return self._groups[groups]

    @override
    def share_gradients(self) -> None:
        copies.share(self.world, self.copies)

    def _send(self, ids: KeyedJagged, rows_N: Tensor) -> Pending[InFlight]:
        if ids.weights_N is not None and ids.weights_N.requires_grad:
            raise UserError(
                "tables: weights that learn cannot be sharded; keep them out of the graph"
            )
        return self._group(tuple(ids.inverse_B)).send(ids, rows_N)


def check_plan(
    plan: Mapping[str, Layout], components: Mapping[str, Component], world: World
) -> None:
    """Check that a plan is for these components and ranks.

    Raises:
        UserError: when it is not.
    """
    for name, layout in plan.items():
        if name not in components:
            raise UserError(f"plan: no table {name!r}{suggest(name, list(components))}")
        layout.check(name, world.size, world.local_size)
        if layout.is_replicated and not components[name].has_equal_copies:
            obstacle = "rows that come and go, and copies of them would differ"
            if components[name].cache.is_on:
                obstacle = "a cache, and copies of caches would differ"
            elif components[name].tier.is_on:
                obstacle = (
                    f"the tier {components[name].tier.name!r}, and a copy would need rows of all"
                    " ranks' batches"
                )
            raise UserError(f"plan: table {name!r} has {obstacle}; put it on one rank or cut it")
    if missing := [name for name in components if name not in plan]:
        raise UserError(f"plan: nothing for table {missing[0]!r}; give it a layout")


class _Begin(torch.autograd.Function):
    """Forward looks all sharded features up here, and sends their vectors. Backward awaits
    gradients, and learns.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, exchange: ShardedExchange, sent: InFlight) -> Tensor:
        ctx.exchange = exchange
        ctx.sent = sent
        ctx.version = exchange.shards.door.version
        sent.exchange.lookup(sent)
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        if ctx.exchange.shards.mode != "off":
            ctx.sent.exchange.learn(ctx.sent, ctx.version)
        return None, None, None


class _End(torch.autograd.Function):
    """Forward awaits the vectors. Backward sends gradients, which travel during the backward of
    earlier operations.
    """

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, exchange: ShardedExchange, sent: InFlight
    ) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.sent = sent
        assert sent.vectors is not None
        # autograd hangs this node on what is returned: `sent`, which the node holds, must not hold
        # the same objects, or no step is ever freed
        return tuple(vectors.detach() for vectors in sent.vectors.wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.exchange.shards.mode != "off":
            ctx.sent.exchange.send_grads(ctx.sent, grads)
            ctx.exchange.fetch()  # the ids that they wait for left before forward ended
        return torch.zeros((), device=ctx.sent.device), None, None


def shard(
    model: nn.Module,
    plan: Mapping[str, Layout],
    world: World,
    codecs: Codecs,
    placement: Placement = ON_CPU,
) -> None:
    """Have every `EmbeddingTables` of a model use a `ShardedExchange`.

    Args:
        model: is changed.
        plan: component -> layout.
        world: the ranks.
        codecs: of vectors and of their gradients.
        placement: where each rank keeps its rows.

    Raises:
        UserError: for a plan that does not fit the tables.
    """
    for tables in [module for module in model.modules() if isinstance(module, EmbeddingTables)]:
        components = tables.components
        own = {
            component.name: plan[component.name]
            for component in components
            if component.name in plan
        }
        features = tables.exchange.features
        tables.use(
            ShardedExchange(components, features, tables.seed, own, world, codecs, placement)
        )
