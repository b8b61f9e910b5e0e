"""Input dist -> lookup -> output dist, and back: ids leave, vectors come, gradients leave."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from sparrow.core import KeyedJagged
from sparrow.distributed import Codec, Pending
from sparrow.distributed.codecs import cast
from sparrow.embeddings.components import ComponentTables
from sparrow.kernels.embedding_bag import Bags
from sparrow.sharding import ids as ids_out
from sparrow.sharding import messages
from sparrow.sharding.ids import SentIds
from sparrow.sharding.layout import Shard
from sparrow.sharding.messages import Form, Shape
from sparrow.sharding.routes import Piece, Routes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """The codecs of the exchange in training. Otherwise vectors travel exactly: what is judged is
    the model alone.

    Args:
        forward: of vectors.
        backward: of their gradients.
    """

    forward: Codec = field(default_factory=cast.Config)
    backward: Codec = field(default_factory=cast.Config)


@dataclass(frozen=True, eq=False)
class Hop:
    """Messages to the members along a dimension of the world. Gradients go the other way round.

    Args:
        dim: "all", "local" or "host".
        outgoing: the form of the vectors that leave this rank.
        incoming: the form of the vectors that come to it.
    """

    dim: str
    outgoing: Form
    incoming: Form


@dataclass(eq=False)
class InFlight:
    """A local batch on its way. What has a default is filled in as the batch goes on.

    Args:
        exchange: what sends it.
        device: of its ids.
        ids: the ids that were sent.
        scale_B1: number of a feature with means -> what its sums are multiplied by, [B, 1].
        bags: what the shards here look up for all ranks.
        hops: of vectors that go direct; then of sums within a host and between hosts, if there are
            any.
        vectors: see `GroupExchange.lookup`.
        grads: the gradients of the outputs of the lookup here.
    """

    exchange: GroupExchange
    device: torch.device
    ids: SentIds
    scale_B1: dict[int, Tensor]
    bags: Bags | None = None
    hops: tuple[Hop, ...] = ()
    vectors: Pending[list[Tensor]] | None = None
    grads: Pending[list[Tensor]] | None = None


class GroupExchange:
    """What a `ShardedExchange` does for batches with certain dedup groups.

    Shards sum the bags of means, and the rank that has the samples divides by the whole lengths.

    Args:
        routes: of such batches.
        local: the tables of the shards here.
        shards: which shards those are.
        codecs: of vectors and of gradients.
    """

    def __init__(
        self, routes: Routes, local: ComponentTables, shards: Sequence[Shard], codecs: Codecs
    ) -> None:
        self.world = routes.world
        self.local = local
        self.codecs = codecs
        self.routes = routes
        world = routes.world
        world.open_lanes(("all", "local", "host") if routes.is_staged else ("all",))
        self._lookups, self._direct_outputs, self._staged_outputs = routes.lookups(shards)
        self._places = range(world.size)  # of a rank's parts in messages that go direct
        self._staged_places = [
            r % world.local_size * world.hosts + r // world.local_size for r in self._places
        ]
        self._owners = world.ranks("host")  # of the sums that come from each host
        self._direct = _flat(routes.direct)
        self._arriving = [*self._direct, *_flat(routes.staged[owner] for owner in self._owners)]
        runs = []
        for at, piece in enumerate(self._arriving):
            runs += [(run, piece.group, at) for run in piece.runs]
        # parts of a sum in the order of rows
        self._runs = sorted(runs, key=lambda run: run[0].block)
        self._sequences = [
            n for n, feature in enumerate(routes.features) if feature.pooling == "none"
        ]

    # -- ids out -----------------------------------------------------------------------------------

    def send(self, ids: KeyedJagged, rows_N: Tensor) -> Pending[InFlight]:
        """Begin to send the ids of a batch, see `ids.send`."""
        assert ids.lengths is not None and ids.rows is not None
        begun = ids_out.send(self.routes, ids, rows_N)
        lengths = dict(zip(ids.keys, ids.lengths.split(list(ids.rows)), strict=True))
        means = [
            (n, feature.name)
            for n, feature in enumerate(self.routes.features)
            if feature.pooling == "mean"
        ]
        scale_B1 = {n: 1.0 / lengths[name].clamp(min=1)[:, None] for n, name in means}
        return Pending(lambda: InFlight(self, rows_N.device, begun.wait(), scale_B1))

    # -- lookup ------------------------------------------------------------------------------------

    def lookup(self, sent: InFlight) -> None:
        """Look up what all ranks asked for, and begin to send it.

        `sent.vectors` then has the vectors of this rank's samples: for each group the pooled ones
        side by side, [rows, sum of dims], then [N, D] for each sequence.

        Args:
            sent: the batch, whose ids were sent.
        """
        self._receive(sent)
        assert sent.bags is not None
        if not self._lookups and self.local.training and self.local.mode != "off":
            self.local.advance(sent.bags.moment)
        outputs = self.local.run_lookup(sent.bags) if self._lookups else []
        direct, *staged = sent.hops = self._hops(sent.ids)
        vectors = [outputs[number] for number in self._direct_outputs]
        begun = self._go(
            "vectors",
            direct,
            True,
            messages.by_rank(vectors, direct.outgoing, self._places, sent.device),
        )
        sums = Pending(lambda: list[Tensor]())
        if staged:
            sums = self._sums_home(sent, [outputs[number] for number in self._staged_outputs])
        sent.vectors = Pending(
            lambda: self._assemble(sent, [*direct.incoming.matrices(begun.wait()), *sums.wait()])
        )

    def fetch(self, sent: InFlight) -> None:
        """Receive the ids of a batch, and begin to read their rows that are on an SSD."""
        self._receive(sent)
        assert sent.bags is not None
        if self._lookups:
            self.local.fetch(sent.bags)

    def _receive(self, sent: InFlight) -> None:
        sent.bags = sent.bags or ids_out.receive(self.routes, self._lookups, sent.ids)

    def _hops(self, sent: SentIds) -> tuple[Hop, ...]:
        """Returns `InFlight.hops`."""
        world = self.world
        routes = self.routes
        rank = self.world.rank
        pairs = zip(sent.rows, sent.counts_of, strict=True)
        first = routes.jobs_of(rank).start
        outgoing = [_shapes(routes.direct[rank], rows_G, counts, first) for rows_G, counts in pairs]
        incoming = [_shapes(pieces, sent.rows[rank], sent.counts) for pieces in routes.direct]
        direct = Hop("all", Form(outgoing), Form(incoming))
        if not routes.is_staged:
            return (direct,)
        # as those of all ranks of this host
        staged = [_shapes(routes.staged[rank], rows_G) for rows_G in sent.rows]
        to_hosts = [staged[owner] for owner in self._owners]
        local = range(world.local_size)
        within = Hop(
            "local",
            Form([_flat(staged[i :: world.local_size]) for i in local]),
            Form([_flat(to_hosts)] * len(local)),
        )
        from_hosts = [_shapes(routes.staged[owner], sent.rows[rank]) for owner in self._owners]
        return direct, within, Hop("host", Form(to_hosts), Form(from_hosts))

    def _go(self, purpose: str, hop: Hop, forward: bool, flat_N: Tensor) -> Pending[Tensor]:
        """Begin to send messages along a hop. Returns what comes the same way, all messages in one
        flat tensor.
        """
        # which sends numbers as they are
        vectors = self.codecs.forward if self.local.training else cast.Config()
        codec, lane = (vectors, "vectors") if forward else (self.codecs.backward, "gradients")
        out = hop.outgoing
        back = hop.incoming
        if not forward:
            out, back = back, out
        data, counts = messages.pack(codec, flat_N, out, self.world.step, forward)
        if messages.is_fixed(codec):
            sizes = messages.sizes(codec, back)
        else:
            unit_counts = [1] * len(counts)
            begun_sizes = self.world.all_to_all_flat(
                f"{purpose}, sizes", torch.tensor(counts), unit_counts, unit_counts, hop.dim, lane
            )
            sizes = begun_sizes.wait().tolist()
        begun = self.world.all_to_all_flat(purpose, data, counts, sizes, hop.dim, lane)
        return Pending(lambda: messages.unpack(codec, begun.wait(), sizes, back))

    def _sums_home(self, sent: InFlight, partial: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """Send partial sums for the rows of every rank. Returns the sums of each host's jobs for
        the rows here.
        """
        _, within, between = sent.hops
        flat_N = messages.by_rank(partial, within.outgoing, self._staged_places, sent.device)
        begun = self._go("partial sums", within, True, flat_N)

        def finish() -> list[Tensor]:
            total, *host_sums = begun.wait().split(within.incoming.numbers)
            for host_sum in host_sums:
                total = total + host_sum
            return between.incoming.matrices(self._go("sums", between, True, total).wait())

        return Pending(finish)

    def _assemble(self, sent: InFlight, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Returns `InFlight.vectors`. matrices: what came from every rank, then from every host if
        sums are staged.
        """
        rows_G = sent.ids.rows[self.world.rank]
        widths = self.routes.widths
        pooled = [
            torch.empty(side, device=sent.device) for side in zip(rows_G, widths, strict=True)
        ]
        for run, group, at in self._runs:
            target = _columns(pooled[group], run.pooled)
            part = _columns(matrices[at], run.message)
            if run.block == 0:
                target.copy_(part)
            else:
                target.add_(part)
        self._scale(sent, pooled)
        sequences = {}
        for shard in self.routes.parts:
            if shard.feature in self._sequences:
                sides = sum(sent.ids.counts[j] for j in shard.jobs), self.routes.dims[shard.feature]
                sequences[shard.feature] = torch.empty(sides, device=sent.device)
        for piece, values in zip(self._arriving, matrices, strict=True):
            if piece.way == "sequence":
                feature, places = self._places_of(sent, piece)
                sequences[feature][places] = values
        return [*pooled, *(sequences[number] for number in self._sequences)]

    def _scale(self, sent: InFlight, pooled: Sequence[Tensor]) -> None:
        for number, scale_B1 in sent.scale_B1.items():
            pooled[self.routes.groups[number]][:, self.routes.columns_of(number)] *= scale_B1

    def _places_of(self, sent: InFlight, piece: Piece) -> tuple[int, tuple[Tensor | slice, slice]]:
        """Returns the feature whose sequence a piece is of, and its place there."""
        job = self.routes.jobs[piece.jobs[0]]
        return job.feature, (
            sent.ids.places_N.get(piece.jobs[0], slice(None)),
            slice(*job.shard.columns),
        )

    # -- gradients back ----------------------------------------------------------------------------

    def send_grads(self, sent: InFlight, grads: Sequence[Tensor]) -> None:
        """Begin to send the gradients of vectors to the shards.

        Args:
            sent: the batch, whose vectors came.
            grads: those of `sent.vectors`.
        """
        pooled = list(grads[: len(self.routes.widths)])
        sequences = dict(zip(self._sequences, grads[len(pooled) :], strict=True))
        if sent.scale_B1:
            pooled = [grad.clone() for grad in pooled]
            self._scale(sent, pooled)
        matrices = [self._gather(sent, piece, pooled, sequences) for piece in self._arriving]
        direct, *staged = sent.hops
        leaving = messages.flat(matrices[: len(self._direct)], sent.device)
        begun = self._go("gradients", direct, False, leaving)
        sums = Pending(lambda: list[Tensor]())
        if staged:
            sums = self._sums_out(sent, messages.flat(matrices[len(self._direct) :], sent.device))

        def finish() -> list[Tensor]:
            arrived = [
                *messages.by_matrix(begun.wait(), direct.outgoing, self._places),
                *sums.wait(),
            ]
            outputs = dict(
                zip([*self._direct_outputs, *self._staged_outputs], arrived, strict=True)
            )
            return [outputs[number] for number in range(len(outputs))]

        sent.grads = Pending(finish)

    def learn(self, sent: InFlight, version: int) -> None:
        """Let the shards here learn from the gradients of all ranks.

        Args:
            sent: the batch, whose gradients were sent.
            version: of the rows that were looked up.
        """
        assert sent.bags is not None and sent.grads is not None
        grads = sent.grads.wait()
        if self._lookups:
            self.local.run_backward(grads, sent.bags, version, False)

    def _gather(
        self,
        sent: InFlight,
        piece: Piece,
        pooled: Sequence[Tensor],
        sequences: Mapping[int, Tensor],
    ) -> Tensor:
        """Returns the gradients of a piece."""
        if piece.way == "sequence":
            feature, places = self._places_of(sent, piece)
            return sequences[feature][places]
        parts = [_columns(pooled[piece.group], run.pooled) for run in piece.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _sums_out(self, sent: InFlight, flat_N: Tensor) -> Pending[list[Tensor]]:
        """Send the gradients of the rows here to every rank of every host. Returns those of every
        rank's rows.
        """
        _, within, between = sent.hops
        begun = self._go("gradients of sums", between, False, flat_N)

        def finish() -> list[Tensor]:
            to_all = begun.wait().repeat(self.world.local_size)
            returned = self._go("gradients of partial sums", within, False, to_all).wait()
            return messages.by_matrix(returned, within.outgoing, self._staged_places)

        return Pending(finish)


def _shapes(
    pieces: Sequence[Piece], rows_G: Sequence[int], counts: Sequence[int] = (), first: int = 0
) -> list[Shape]:
    """Returns the shapes of a message's pieces. counts: how many ids the jobs from `first` on
    have.
    """
    return [
        (counts[p.jobs[0] - first] if p.way == "sequence" else rows_G[p.group], p.columns, p.widths)
        for p in pieces
    ]


def _columns(matrix: Tensor, columns: tuple[int, int]) -> Tensor:
    return matrix if columns == (0, matrix.shape[1]) else matrix[:, slice(*columns)]


def _flat(lists: Iterable[Iterable[T]]) -> list[T]:
    return list(itertools.chain.from_iterable(lists))
