"""Input dist -> lookup -> output dist, and back: who sends what to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparrow.core import Jagged, KeyedJagged
from sparrow.distributed import Codec, Pending, World
from sparrow.embeddings import EmbeddingTables, Feature
from sparrow.kernels.embedding_bag import Bags, Lookup, Lookups
from sparrow.sharding import messages
from sparrow.sharding.layout import Layout, Shard
from sparrow.sharding.messages import Shape


@dataclass(frozen=True, eq=False)
class Job:
    """A feature that is looked up in a shard. feature: its number. block: the shard's number among `blocks`, which
    hold the same columns, in the order of rows.
    """

    feature: int
    shard: Shard
    block: int
    blocks: tuple[Shard, ...]

    @property
    def width(self) -> int:
        """Columns."""
        return self.shard.columns[1] - self.shard.columns[0]


@dataclass(frozen=True)
class Piece:
    """What one row block gets of a feature's ids: ids per bag, rows within the block, weights."""

    lengths_B: Tensor
    rows_N: Tensor
    weights_N: Tensor


@dataclass(eq=False)
class Sent:
    """A local batch whose ids are under way. batches: samples of every rank.

    By feature: counts, ids for each row block; order_N, their places in the batch, block by block; scale_B1 of a mean.
    Once they have come: bags, what the shards here look up; outputs, the number of each road's output.
    """

    batches: list[int]
    ids: Pending[list[Tensor]]
    weights: Pending[list[Tensor]] | None
    counts: dict[int, list[int]]
    order_N: dict[int, Tensor]
    scale_B1: dict[int, Tensor]
    bags: Bags | None = None
    outputs: dict[tuple[str, int, int], int] = field(default_factory=dict)


class Exchange:
    """The roads of one `ShardedTables`.

    features: those of sharded tables. Pooled vectors and sequences go straight back to the rank that asked ("straight")
    unless their table is through_host: then the ranks of the host first add up what they have for each sample, each
    for the samples of its own local rank everywhere, and send one sum to the other hosts ("sums"; Neo's
    table-row-wise, arXiv 2104.05158, section 4.2). Means are sums here, divided by the global lengths at home.
    """

    def __init__(
        self, world: World, local: EmbeddingTables, features: Sequence[Feature], plan: Mapping[str, Layout],
        shards: Mapping[str, Sequence[Shard]], mine: Sequence[Shard], forward: Codec, backward: Codec,
    ) -> None:  # fmt: skip
        self.world, self.local, self.features = world, local, features
        self.codecs, self.step = {True: forward, False: backward}, 0
        self._number = {shard: number for number, shard in enumerate(mine)}
        self._straight: list[list[Job]] = [[] for _ in range(world.size)]
        self._sums: list[list[Job]] = [[] for _ in range(world.size)]
        for number, feature in enumerate(features):
            layout, of_table = plan[feature.table], shards[feature.table]
            roads = self._sums if layout.through_host and feature.pooling != "none" else self._straight
            for c in range(layout.columns):
                blocks = tuple(of_table[c * layout.rows : (c + 1) * layout.rows])
                for block, shard in enumerate(blocks):
                    roads[shard.rank].append(Job(number, shard, block, blocks))
        rows = max((shard.rows[1] for of_table in shards.values() for shard in of_table), default=0)
        self._integers = torch.int32 if rows < 1 << 31 else torch.int64

    # -- ids out ------------------------------------------------------------------------------------------------

    def send(self, ids: KeyedJagged, slots_N: Tensor) -> Sent:
        """Begin to send every rank the bags of its jobs. slots_N: the rows of the batch's ids."""
        size, places = self.world.size, {key: i for i, key in enumerate(ids.keys)}
        sent = Sent([], Pending(list), None, {}, {}, {})
        pieces = []
        for number, feature in enumerate(self.features):
            k = places[feature.name]
            whole = ids[feature.name]
            pieces.append(self._cut(number, whole, slots_N[ids.bounds[k] : ids.bounds[k + 1]], sent))
        messages_R, weights_R = [], []
        for rank in range(size):
            mine = [pieces[job.feature][job.block] for job in self._jobs(rank)]
            parts = [slots_N[:0], *(p.lengths_B for p in mine), *(p.rows_N for p in mine)]
            messages_R.append(torch.cat([part.to(self._integers) for part in parts]))
            weights_R.append(torch.cat([slots_N.new_empty(0, dtype=torch.float32), *(p.weights_N for p in mine)]))
        heads = [torch.tensor([ids.batch_size, part.numel()]) for part in messages_R]
        found = [head.tolist() for head in self.world.all_to_all("sizes of ids", heads, [2] * size).wait()]
        sent.batches = [batch for batch, _ in found]
        sent.ids = self.world.all_to_all("ids", messages_R, [count for _, count in found])
        if ids.weights_N is not None:
            counts = [count - sum(self._bags(self.world.rank, batch)) for batch, count in found]
            sent.weights = self.world.all_to_all("weights", weights_R, counts)
        return sent

    def _jobs(self, rank: int) -> list[Job]:
        return [*self._straight[rank], *self._sums[rank]]

    def _is_sequence(self, job: Job) -> bool:
        return self.features[job.feature].pooling == "none"

    def _bags(self, rank: int, batch: int) -> list[int]:
        """Bags of each of a rank's jobs for a batch; a sequence is one bag."""
        return [1 if self._is_sequence(job) else batch for job in self._jobs(rank)]

    def _cut(self, number: int, ids: Jagged, rows_N: Tensor, sent: Sent) -> list[Piece]:
        """A feature's ids for each row block of its table."""
        feature, lengths_B = self.features[number], ids.lengths_B
        job = next(job for rank in range(self.world.size) for job in self._jobs(rank) if job.feature == number)
        weights_N = rows_N.new_empty(0, dtype=torch.float32) if ids.weights_N is None else ids.weights_N
        if feature.pooling == "mean":
            sent.scale_B1[number] = 1.0 / lengths_B.clamp(min=1)[:, None]
        if feature.pooling == "none":
            lengths_B = lengths_B.sum()[None]
        blocks = len(job.blocks)
        if blocks == 1:
            sent.counts[number] = [rows_N.numel()]
            return [Piece(lengths_B, rows_N, weights_N)]
        block_N = rows_N // max(job.blocks[0].rows[1], 1)
        order_N = block_N.to(torch.int16).argsort(stable=True)  # radix-sorted: ten times as fast as of int64
        bag_N = torch.arange(len(lengths_B), device=rows_N.device).repeat_interleave(lengths_B)
        lengths = torch.bincount(block_N * len(lengths_B) + bag_N, minlength=blocks * len(lengths_B)).view(blocks, -1)
        counts = lengths.sum(1).tolist()
        sent.order_N[number], sent.counts[number] = order_N, counts
        rows = rows_N[order_N].split(counts)
        weights = weights_N[order_N].split(counts) if ids.weights_N is not None else [weights_N] * blocks
        return [Piece(lengths[b], rows[b] - job.blocks[b].rows[0], weights[b]) for b in range(blocks)]

    # -- lookup -------------------------------------------------------------------------------------------------

    def lookup(self, sent: Sent) -> list[Tensor]:
        """Every feature's vectors: [B, D], or [N, D] of a sequence."""
        here, size = self.world.rank, self.world.size
        bags = sent.bags = self._receive(sent)
        outputs = self.local.run_lookup(bags) if bags.lookups else []
        vectors = [self._of_output(sent, outputs, rank) for rank in range(size)]
        out = [self._straight_shapes(sent, rank, here) for rank in range(size)]
        back = [self._straight_shapes(sent, here, rank) for rank in range(size)]
        straight = self._go("vectors", "all", True, [v[:-1] for v in vectors], out, back)
        sums = self._sums_home(sent, [v[-1] for v in vectors]) if any(self._sums) else [torch.empty(0)] * size
        return self._assemble(sent, straight.wait(), sums)

    def _receive(self, sent: Sent) -> Bags:
        """What the shards here look up: a key for every rank and job; for every rank an output of the pooled vectors
        that go straight, one of sums, and one for each sequence.
        """
        jobs, lengths, rows, bags = self._jobs(self.world.rank), [], [], []
        for batch, data in zip(sent.batches, sent.ids.wait(), strict=True):
            mine = self._bags(self.world.rank, batch)
            lengths.append(data[: sum(mine)])
            rows.append(data[sum(mine) :])
            bags += mine
        lengths_B = torch.cat(lengths)
        offsets_B1 = lengths_B.new_zeros(len(lengths_B) + 1, dtype=torch.int64)
        torch.cumsum(lengths_B, 0, out=offsets_B1[1:])
        ends = torch.tensor([0, *bags]).cumsum(0).to(offsets_B1.device)
        lookups: list[Lookup] = []
        columns: dict[tuple[str, int, int], int] = {}
        straight = len(self._straight[self.world.rank])
        for j in sorted(range(len(jobs)), key=lambda j: (jobs[j].feature, j)):  # the order of gradients
            sequence = self._is_sequence(jobs[j])
            for rank in range(self.world.size):
                road = ("sequence", rank, j) if sequence else ("straight" if j < straight else "sums", rank, 0)
                output = sent.outputs.setdefault(road, len(sent.outputs))
                lookups.append(
                    Lookup(
                        table=self._number[jobs[j].shard], pooling="none" if sequence else "sum",
                        key=rank * len(jobs) + j, output=output, column=columns.get(road, 0),
                    )
                )  # fmt: skip
                columns[road] = columns.get(road, 0) + jobs[j].width
        return Bags(
            slots_N=torch.cat(rows), offsets_B1=offsets_B1, bags=bags, bounds=offsets_B1[ends].tolist(),
            lookups=Lookups(lookups), weights_N=None if sent.weights is None else torch.cat(sent.weights.wait()),
        )  # fmt: skip

    def _roads(self, rank: int) -> list[tuple[str, int, int]]:
        """The outputs for a rank: pooled, sequences, sums."""
        jobs = self._straight[self.world.rank]
        sequences = [("sequence", rank, j) for j, job in enumerate(jobs) if self._is_sequence(job)]
        return [("straight", rank, 0), *sequences, ("sums", rank, 0)]

    def _of_output(self, sent: Sent, outputs: Sequence[Tensor], rank: int) -> list[Tensor]:
        nothing = torch.zeros(sent.batches[rank], 0)
        return [outputs[sent.outputs[road]] if road in sent.outputs else nothing for road in self._roads(rank)]

    def _straight_shapes(self, sent: Sent, asker: int, owner: int) -> list[Shape]:
        """Of what an owner sends straight to who asked, one of whom is this rank: pooled vectors, then sequences."""
        jobs = self._straight[owner]
        pooled = tuple(job.width for job in jobs if not self._is_sequence(job))
        shapes: list[Shape] = [(sent.batches[asker], pooled)]
        for j, job in enumerate(jobs):
            if self._is_sequence(job):
                if asker == self.world.rank:
                    count = sent.counts[job.feature][job.block]
                else:
                    assert sent.bags is not None
                    key = asker * len(self._jobs(owner)) + j
                    count = sent.bags.bounds[key + 1] - sent.bags.bounds[key]
                shapes.append((count, (job.width,)))
        return shapes

    def _sums_shape(self, sent: Sent, asker: int, owner: int) -> Shape:
        return sent.batches[asker], tuple(job.width for job in self._sums[owner])

    def _go(
        self, what: str, dim: str, forward: bool, matrices: Sequence[Sequence[Tensor]],
        out: Sequence[Sequence[Shape]], back: Sequence[Sequence[Shape]],
    ) -> Pending[list[list[Tensor]]]:  # fmt: skip
        """Matrices of shapes `out` to each member along a dim; gives those of shapes `back` that they sent."""
        codec = self.codecs[forward]
        parts = [messages.pack(codec, m, s, self.step, forward) for m, s in zip(matrices, out, strict=True)]
        sizes = [messages.size(codec, shapes) for shapes in back] if messages.is_fixed(codec) else None
        begun = self.world.all_to_all(what, parts, sizes, dim)
        return Pending(lambda: [messages.unpack(codec, d, s) for d, s in zip(begun.wait(), back, strict=True)])

    def _sums_home(self, sent: Sent, partial: Sequence[Tensor]) -> list[Tensor]:
        """Partial sums for the samples of every rank -> for each host the sums of its jobs for the samples here."""
        world, local = self.world, self.world.local_size
        askers = [[h * local + i for h in range(world.hosts)] for i in range(local)]  # by local rank
        here = world.rank
        out = [[self._sums_shape(sent, asker, here) for asker in group] for group in askers]
        back = [[self._sums_shape(sent, asker, here) for asker in askers[world.local_rank]]] * local
        begun = self._go("partial sums", "local", True, [[partial[a] for a in group] for group in askers], out, back)
        first, *others = begun.wait()
        for other in others:
            first = [one + two for one, two in zip(first, other, strict=True)]
        owners = world.ranks("host")
        to = [[self._sums_shape(sent, asker, here)] for asker in owners]
        of = [[self._sums_shape(sent, here, owner)] for owner in owners]
        done = self._go("sums", "host", True, [[matrix] for matrix in first], to, of)
        return [matrix for (matrix,) in done.wait()]

    def _assemble(self, sent: Sent, straight: Sequence[Sequence[Tensor]], sums: Sequence[Tensor]) -> list[Tensor]:
        """Features' vectors of what came from every rank (straight) and from every host (sums)."""
        blocks: list[dict[tuple[int, int], list[Tensor]]] = [{} for _ in self.features]  # by columns, in row order
        found: list[tuple[Job, Tensor]] = []
        for rank in range(self.world.size):
            pooled, *sequences = straight[rank]
            jobs = self._straight[rank]
            whole = [job for job in jobs if not self._is_sequence(job)]
            found += zip(whole, pooled.split([job.width for job in whole], 1), strict=True)
            found += zip([job for job in jobs if self._is_sequence(job)], sequences, strict=True)
        for host in range(self.world.hosts if any(self._sums) else 0):
            jobs = self._sums[host * self.world.local_size]  # the same columns on each of its ranks
            found += zip(jobs, sums[host].split([job.width for job in jobs], 1), strict=True)
        for job, values in sorted(found, key=lambda pair: (pair[0].feature, pair[0].shard.columns, pair[0].block)):
            blocks[job.feature].setdefault(job.shard.columns, []).append(values)
        out = []
        for number, feature in enumerate(self.features):
            columns = []
            for parts in blocks[number].values():
                if feature.pooling == "none" and len(parts) > 1:
                    together = torch.cat(parts)
                    columns.append(torch.empty_like(together).index_copy_(0, sent.order_N[number], together))
                else:
                    total = parts[0]
                    for part in parts[1:]:
                        total = total + part
                    columns.append(total)
            vectors = torch.cat(columns, 1) if len(columns) > 1 else columns[0]
            out.append(vectors * sent.scale_B1[number] if number in sent.scale_B1 else vectors.contiguous())
        return out

    # -- gradients back -----------------------------------------------------------------------------------------

    def learn(self, sent: Sent, grads: Sequence[Tensor], version: int) -> None:
        """Send the features' gradients to the shards, which learn."""
        world, here = self.world, self.world.rank
        assert sent.bags is not None
        scaled = [g * sent.scale_B1[number] if number in sent.scale_B1 else g for number, g in enumerate(grads)]
        matrices = [self._gradients(sent, scaled, rank) for rank in range(world.size)]
        out = [self._straight_shapes(sent, here, rank) for rank in range(world.size)]
        back = [self._straight_shapes(sent, rank, here) for rank in range(world.size)]
        begun = self._go("gradients", "all", False, matrices, out, back)
        sums = self._sums_out(sent, scaled) if any(self._sums) else [torch.empty(0)] * world.size
        outputs: dict[int, Tensor] = {}
        for rank, straight in enumerate(begun.wait()):
            for road, matrix in zip(self._roads(rank), [*straight, sums[rank]], strict=True):
                if road in sent.outputs:
                    outputs[sent.outputs[road]] = matrix
        if sent.bags.lookups:
            ordered = [outputs[number] for number in range(len(outputs))]
            self.local.run_backward(ordered, sent.bags, version, False)

    def _columns(self, grads: Sequence[Tensor], jobs: Sequence[Job], rows: int) -> Tensor:
        parts = [grads[job.feature][:, slice(*job.shard.columns)] for job in jobs]
        return torch.cat(parts, 1) if parts else torch.zeros(rows, 0)

    def _gradients(self, sent: Sent, grads: Sequence[Tensor], owner: int) -> list[Tensor]:
        jobs = self._straight[owner]
        pooled = [job for job in jobs if not self._is_sequence(job)]
        matrices = [self._columns(grads, pooled, sent.batches[self.world.rank])]
        for job in jobs:
            if self._is_sequence(job):
                grad_ND = grads[job.feature][:, slice(*job.shard.columns)]
                if job.feature in sent.order_N:
                    counts = sent.counts[job.feature]
                    begin = sum(counts[: job.block])
                    grad_ND = grad_ND[sent.order_N[job.feature][begin : begin + counts[job.block]]]
                matrices.append(grad_ND)
        return matrices

    def _sums_out(self, sent: Sent, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the samples here to every host, there to all its ranks; gives those of every rank's samples."""
        world, local, here = self.world, self.world.local_size, self.world.rank
        owners = world.ranks("host")
        batch = sent.batches[here]
        matrices = [[self._columns(grads, self._sums[owner], batch)] for owner in owners]
        out = [[self._sums_shape(sent, here, owner)] for owner in owners]
        back = [[self._sums_shape(sent, asker, here)] for asker in owners]
        mine = [matrix for (matrix,) in self._go("gradients of sums", "host", False, matrices, out, back).wait()]
        shapes = [self._sums_shape(sent, asker, here) for asker in owners]
        theirs = [[self._sums_shape(sent, h * local + i, here) for h in range(world.hosts)] for i in range(local)]
        found = self._go("gradients of partial sums", "local", False, [mine] * local, [shapes] * local, theirs).wait()
        return [found[rank % local][rank // local] for rank in range(world.size)]
