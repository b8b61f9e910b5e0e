from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.core.errors import suggest
from sparrow.distributed import Codec, Pending, World
from sparrow.embeddings import EmbeddingTables, RowGradients, RowRecords
from sparrow.embeddings.tables import Mode
from sparrow.sharding import copies
from sparrow.sharding.exchange import Exchange, InFlight
from sparrow.sharding.layout import Layout


class ShardedTables(nn.Module):
    """`EmbeddingTables` over many ranks: ids go to the shards, pooled vectors come back, gradients go there again.

    whole: the tables they stand for, whose rows may be unallocated. plan: table -> layout. forward, backward: codecs of
    vectors and of their gradients. The gradients of all ranks are summed: each rank's loss must be its share of the
    global one. A shard sums a row's gradients over features, ranks and samples in that order, as one process does with
    the ranks' batches one behind the other. Every call is one of all ranks together. Raises UserError for a plan that
    does not fit the tables.
    """

    def __init__(
        self, whole: EmbeddingTables, plan: Mapping[str, Layout], world: World, forward: Codec, backward: Codec
    ) -> None:
        super().__init__()
        specs = {record.spec.name: record.spec for record in whole.all_records()}
        for name, layout in plan.items():
            if name not in specs:
                raise UserError(f"plan: no table {name!r}{suggest(name, list(specs))}")
            layout.check(name, world.size, world.local_size)
            extra = specs[name].rule.regularization
            if layout.columns > 1 and (extra.clip_norm or extra.max_norm):
                raise UserError(f"plan: table {name!r} is cut by columns, and its rule bounds norms of whole rows")
        if missing := [name for name in specs if name not in plan]:
            raise UserError(f"plan: nothing for table {missing[0]!r}; give it a layout")
        self.world, self.features = world, whole.features
        self._whole = (whole,)  # in a tuple: not a module of this one
        shards = {name: plan[name].shards(name, s.addressing.rows, s.dim) for name, s in specs.items()}
        mine = [shard for of_table in shards.values() for shard in of_table if shard.rank == world.rank]
        records = [RowRecords(specs[s.table], whole.seed, s.rows, s.columns) for s in mine]
        self.local = EmbeddingTables([], [], impl=whole.impl, seed=whole.seed, records=records)
        copied = [spec for name, spec in specs.items() if plan[name].is_replicated]
        everywhere = [f for f in self.features if plan[f.table].is_replicated]
        self.copies = EmbeddingTables(copied, everywhere, impl=whole.impl, seed=whole.seed)
        self.sharded = tuple(f for f in self.features if not plan[f.table].is_replicated)
        self._make = partial(Exchange, world, self.local, self.sharded, plan, shards, mine, forward, backward)
        self._exchanges: dict[tuple[tuple[str, ...], ...], Exchange] = {}
        self.exchange = self._exchange(())
        self.mode = whole.mode
        self.anchor = torch.zeros((), requires_grad=True)
        self._ahead: weakref.WeakKeyDictionary[KeyedJagged, Pending[InFlight]] = weakref.WeakKeyDictionary()
        self._begun: weakref.WeakKeyDictionary[KeyedJagged, tuple[Tensor, InFlight]] = weakref.WeakKeyDictionary()

    # -- the lifecycle ------------------------------------------------------------------------------------------

    def prefetch(self, ids: KeyedJagged) -> None:
        """Send a batch's ids on their way before anyone looks them up.

        Their sizes leave at once, the ids behind the next lookup: whoever sent vectors sent sizes before, so nobody
        waits for those.
        """
        if self.sharded:
            self._ahead[ids] = self._send(ids)

    def begin(self, ids: KeyedJagged) -> None:
        """Look a batch up before the model asks for it: vectors travel while it computes something else."""
        if self.sharded:
            sent = (self._ahead.pop(ids, None) or self._send(ids)).wait()
            self._begun[ids] = _Begin.apply(self.anchor, self, sent), sent

    def pooled(self, ids: KeyedJagged) -> Tensor:
        """As `EmbeddingTables.pooled`."""
        if any(feature.pooling == "none" for feature in self.features):
            raise UserError("pooled: the features differ in samples, or one is not pooled; look them up by name")
        if not self.copies.features and not ids.inverse_B:
            return self._exchanged(ids)[0]
        found = self(ids)
        return torch.cat([found[feature.name] for feature in self.features], 1)

    def forward(self, ids: KeyedJagged) -> dict[str, Tensor | Jagged]:
        """Feature -> vectors, as `EmbeddingTables.lookup`."""
        found = self.copies(ids) if self.copies.features else {}
        if self.sharded:
            routes = self._exchange(tuple(ids.inverse_B)).routes
            vectors = self._exchanged(ids)
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

    def _exchanged(self, ids: KeyedJagged) -> list[Tensor]:
        """As `InFlight.vectors`."""
        if ids not in self._begun:
            self.begin(ids)
        token, sent = self._begun.pop(ids)
        vectors = list(_End.apply(token, self, sent))
        for following in self._ahead.values():
            following.wait()
        return vectors

    def _exchange(self, groups: tuple[tuple[str, ...], ...]) -> Exchange:
        """That for batches with these dedup groups; every rank's have the same."""
        if groups not in self._exchanges:
            of = {name: number for number, names in enumerate(groups, 1) for name in names}
            self._exchanges[groups] = self._make([of.get(feature.name, 0) for feature in self.sharded], len(groups))
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
        """As `EmbeddingTables.scale_lr`."""
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
            copies.share(self.world, list(self.copies.all_records()), self.copies.gradients())

    def _send(self, ids: KeyedJagged) -> Pending[InFlight]:
        if ids.weights_N is not None and ids.weights_N.requires_grad:
            raise UserError("tables: weights that learn cannot be sharded; keep them out of the graph")
        numbers = {feature.name: number for number, feature in enumerate(self.features)}
        named = [numbers.get(key, -1) for key in ids.keys]
        return self._exchange(tuple(ids.inverse_B)).send(ids, self._whole[0].slots(ids.values_N, ids.bounds, named))

    # -- rows in and out, and the rest --------------------------------------------------------------------------

    def all_records(self) -> Iterator[RowRecords]:
        """The rows that are here."""
        yield from self.local.all_records()
        yield from self.copies.all_records()

    def chunks(self, max_bytes: int = 64 << 20) -> Iterator[Chunk]:
        """The rows that are this rank's to save; copied tables are rank 0's."""
        yield from self.local.chunks(max_bytes)
        if self.world.rank == 0:
            yield from self.copies.chunks(max_bytes)

    def changed(self) -> None:
        """As `EmbeddingTables.changed`."""
        self.local.changed()
        self.copies.changed()

    def oov_counts(self) -> dict[str, int]:
        """As `EmbeddingTables.oov_counts`, of this rank's samples."""
        return {**self._whole[0].oov_counts(), **self.copies.oov_counts()}

    def raise_bad_ids(self) -> None:
        """As `EmbeddingTables.raise_bad_ids`."""
        self._whole[0].raise_bad_ids()
        self.copies.raise_bad_ids()


class _Begin(torch.autograd.Function):
    """The local lookup of all sharded features, whose vectors leave; backward awaits gradients, and learns."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tables: ShardedTables, sent: InFlight) -> Tensor:
        ctx.tables, ctx.sent, ctx.version = tables, sent, tables.local.version
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
        ctx.tables, ctx.sent = tables, sent
        assert sent.vectors is not None
        return tuple(sent.vectors.wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.tables.mode != "off":
            ctx.sent.exchange.send_grads(ctx.sent, grads)
        return torch.zeros(()), None, None


def shard(model: nn.Module, plan: Mapping[str, Layout], world: World, forward: Codec, backward: Codec) -> None:
    """Put sharded tables in the place of every `EmbeddingTables` of a model, in place; UserError as theirs."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, EmbeddingTables) and not isinstance(parent, ShardedTables):
                names = [record.spec.name for record in child.all_records()]
                mine = {table: plan[table] for table in names if table in plan}
                setattr(parent, name, ShardedTables(child, mine, world, forward, backward))
