"""Input dist -> lookup -> output dist, and back: who sends what to whom."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.core import KeyedJagged
from sparrow.distributed import Codec, Pending, World
from sparrow.embeddings import EmbeddingTables, Feature
from sparrow.kernels.embedding_bag import Bags, Lookup, Lookups
from sparrow.sharding import messages
from sparrow.sharding.layout import Layout, Shard
from sparrow.sharding.messages import Shape

Road = tuple[str, int, int]
"""An output: "straight" or "sums" for a rank, or the "sequence" of a rank and job."""


@dataclass(frozen=True, eq=False)
class Job:
    """A feature that is looked up in a shard. feature: its number; is_sequence: whether it is not pooled.

    block: the shard's number among those of the same columns, in the order of rows.
    """

    feature: int
    is_sequence: bool
    shard: Shard
    block: int

    @property
    def width(self) -> int:
        """Columns."""
        return self.shard.columns[1] - self.shard.columns[0]


@dataclass(frozen=True)
class Run:
    """Columns [first, last) of pooled vectors that lie together at home and there. block: as a job's."""

    block: int
    home: tuple[int, int]
    there: tuple[int, int]


@dataclass(frozen=True)
class Part:
    """The same columns of a feature's table. height: rows of each block but the last; jobs: their numbers, in order."""

    feature: int
    height: int
    jobs: tuple[int, ...]


@dataclass(eq=False)
class Sent:
    """A local batch whose ids are under way. batches: samples of every rank.

    counts: ids for every job. order_N: of a sequence that was cut, by feature, the places of its ids block by block.
    scale_B1: of a mean, by feature. bags: what the shards here look up, once ids have come.
    """

    batches: list[int]
    ids: Pending[list[Tensor]]
    weights: Pending[list[Tensor]] | None
    counts: list[int]
    order_N: dict[int, Tensor]
    scale_B1: dict[int, Tensor]
    bags: Bags | None = None


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
        parts: list[list[Job]] = []
        for number, feature in enumerate(features):
            layout, of_table = plan[feature.table], shards[feature.table]
            roads = self._sums if layout.through_host and feature.pooling != "none" else self._straight
            for c in range(layout.columns):
                blocks = of_table[c * layout.rows : (c + 1) * layout.rows]
                parts.append([Job(number, feature.pooling == "none", s, block) for block, s in enumerate(blocks)])
                for job in parts[-1]:
                    roads[job.shard.rank].append(job)
        self._jobs = [[*straight, *sums] for straight, sums in zip(self._straight, self._sums, strict=True)]
        self._first = [0, *itertools.accumulate(len(jobs) for jobs in self._jobs)]  # of each rank's, by number
        numbers = {job: number for number, job in enumerate(itertools.chain.from_iterable(self._jobs))}
        made = [Part(p[0].feature, max(p[0].shard.rows[1], 1), tuple(numbers[job] for job in p)) for p in parts]
        self._parts = sorted(made, key=lambda part: part.jobs)
        dims = {name: of_table[-1].columns[1] for name, of_table in shards.items() if of_table}
        self._widths = [0 if f.pooling == "none" else dims[f.table] for f in features]
        self._begins = [sum(self._widths[:number]) for number in range(len(features))]
        self.width = sum(self._widths)
        self._unpooled = [[(j, job) for j, job in enumerate(jobs) if job.is_sequence] for jobs in self._straight]
        self._pooled = [tuple(job.width for job in jobs if not job.is_sequence) for jobs in self._straight]
        self._summed = [tuple(job.width for job in jobs) for jobs in self._sums]
        self._lookups, self._outputs = self._make_lookups()
        self._runs = [self._runs_of(jobs) for jobs in self._straight]
        self._sum_runs = [self._runs_of(self._sums[h * world.local_size], whole=True) for h in range(world.hosts)]
        rows = max((shard.rows[1] for of_table in shards.values() for shard in of_table), default=0)
        self._integers = torch.int32 if rows < 1 << 31 else torch.int64

    def _runs_of(self, jobs: Sequence[Job], whole: bool = False) -> list[Run]:
        """Where the columns of a rank's pooled vectors belong at home. whole: their sums over rows are made before."""
        runs: list[Run] = []
        at = 0
        for job in jobs:
            if job.is_sequence:
                continue
            begin = self._begins[job.feature] + job.shard.columns[0]
            run = Run(0 if whole else job.block, (begin, begin + job.width), (at, at + job.width))
            last = runs[-1] if runs else None
            if last is not None and (last.block, last.home[1]) == (run.block, run.home[0]):
                runs[-1] = Run(run.block, (last.home[0], run.home[1]), (last.there[0], run.there[1]))
            else:
                runs.append(run)
            at += job.width
        return runs

    # -- ids out ------------------------------------------------------------------------------------------------

    def send(self, ids: KeyedJagged, slots_N: Tensor) -> Sent:
        """Begin to send every rank the bags of its jobs. slots_N: the rows of the batch's ids."""
        size, batch, given = self.world.size, ids.batch_size, ids.lengths
        assert given is not None
        places = {key: k for k, key in enumerate(ids.keys)}
        keys = [places[self.features[part.feature].name] for part in self._parts]
        bounds = [(ids.bounds[k], ids.bounds[k + 1]) for k in keys]
        lengths_B = torch.cat([given[:0], *(given[k * batch : (k + 1) * batch] for k in keys)])
        rows_N = torch.cat([slots_N[:0], *(slots_N[low:high] for low, high in bounds)])
        weights_N = ids.weights_N
        if weights_N is not None:
            weights_N = torch.cat([weights_N[:0], *(weights_N[low:high] for low, high in bounds)])
        sent = Sent([], Pending(list), None, [high - low for low, high in bounds], {}, {})
        for number, feature in enumerate(self.features):
            if feature.pooling == "mean":
                k = places[feature.name]
                sent.scale_B1[number] = 1.0 / given[k * batch : (k + 1) * batch].clamp(min=1)[:, None]
        if any(len(part.jobs) > 1 for part in self._parts):
            lengths_B, rows_N, order_N = self._cut(sent, batch, lengths_B, rows_N)
            weights_N = None if weights_N is None else weights_N[order_N]
        lengths_B, rows_N = lengths_B.to(self._integers), rows_N.to(self._integers)
        ends = [sum(sent.counts[:job]) for job in self._first]
        lengths = lengths_B.split([batch * len(jobs) for jobs in self._jobs])
        counts = [last - first for first, last in itertools.pairwise(ends)]
        messages_R = [torch.cat(pair) for pair in zip(lengths, rows_N.split(counts), strict=True)]
        heads = [torch.tensor([batch, part.numel()]) for part in messages_R]
        found = [head.tolist() for head in self.world.all_to_all("sizes of ids", heads, [2] * size).wait()]
        sent.batches = [batch for batch, _ in found]
        sent.ids = self.world.all_to_all("ids", messages_R, [count for _, count in found])
        if weights_N is not None:
            theirs = [count - batch * len(self._jobs[self.world.rank]) for batch, count in found]
            sent.weights = self.world.all_to_all("weights", weights_N.split(counts), theirs)
        return sent

    def _cut(self, sent: Sent, batch: int, lengths_B: Tensor, rows_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids in the order of jobs instead of parts: lengths of all jobs' bags, rows within blocks, and where the ids
        were.
        """
        device, parts = rows_N.device, self._parts
        sizes_P = torch.tensor(sent.counts, device=device)
        most = max(len(part.jobs) for part in parts)
        jobs = [job for part in parts for job in (*part.jobs, *[0] * (most - len(part.jobs)))]
        height_N = torch.tensor([part.height for part in parts], device=device).repeat_interleave(sizes_P)
        part_N = torch.arange(len(parts), device=device).repeat_interleave(sizes_P)
        bag_N = torch.arange(batch, device=device).repeat(len(parts)).repeat_interleave(lengths_B)
        block_N = rows_N // height_N
        job_N = torch.tensor(jobs, device=device)[part_N * most + block_N]
        narrow = torch.int16 if self._first[-1] < 1 << 15 else torch.int32  # sorted ten times as fast as int64
        order_N = job_N.to(narrow).argsort(stable=True)
        cut_B = torch.bincount(job_N * batch + bag_N, minlength=batch * self._first[-1])
        begins = [0, *itertools.accumulate(sent.counts)]
        sent.counts = cut_B.view(self._first[-1], batch).sum(1).tolist()
        ends = [0, *itertools.accumulate(sent.counts)]
        for begin, part in zip(begins, parts, strict=False):
            if len(part.jobs) > 1 and self.features[part.feature].pooling == "none":
                places = torch.cat([order_N[ends[job] : ends[job + 1]] for job in part.jobs])
                sent.order_N[part.feature] = places - begin  # the same for every part of the feature
        return cut_B, (rows_N - block_N * height_N)[order_N], order_N

    # -- lookup -------------------------------------------------------------------------------------------------

    def lookup(self, sent: Sent) -> list[Tensor]:
        """See `_assemble`."""
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
        """What the shards here look up."""
        lengths, rows, bags = [], [], []
        for batch, data in zip(sent.batches, sent.ids.wait(), strict=True):
            jobs = len(self._jobs[self.world.rank])
            lengths.append(data[: jobs * batch])
            rows.append(data[jobs * batch :])
            bags += [batch] * jobs
        lengths_B = torch.cat(lengths)
        offsets_B1 = lengths_B.new_zeros(len(lengths_B) + 1, dtype=torch.int64)
        torch.cumsum(lengths_B, 0, out=offsets_B1[1:])
        ends = torch.tensor([0, *bags]).cumsum(0).to(offsets_B1.device)
        return Bags(
            slots_N=torch.cat(rows), offsets_B1=offsets_B1, bags=bags, bounds=offsets_B1[ends].tolist(),
            lookups=self._lookups, weights_N=None if sent.weights is None else torch.cat(sent.weights.wait()),
        )  # fmt: skip

    def _make_lookups(self) -> tuple[Lookups, dict[Road, int]]:
        """A key for every rank and job; for every rank an output of the pooled vectors that go straight, one of sums,
        and one for each sequence: the lookups, and the number of each output.
        """
        jobs, straight = self._jobs[self.world.rank], len(self._straight[self.world.rank])
        lookups: list[Lookup] = []
        outputs: dict[Road, int] = {}
        columns: dict[Road, int] = {}
        for j in sorted(range(len(jobs)), key=lambda j: (jobs[j].feature, j)):  # the order of gradients
            sequence = jobs[j].is_sequence
            for rank in range(self.world.size):
                road = ("sequence", rank, j) if sequence else ("straight" if j < straight else "sums", rank, 0)
                output = outputs.setdefault(road, len(outputs))
                lookups.append(
                    Lookup(
                        table=self._number[jobs[j].shard], pooling="none" if sequence else "sum",
                        key=rank * len(jobs) + j, output=output, column=columns.get(road, 0),
                    )
                )  # fmt: skip
                columns[road] = columns.get(road, 0) + jobs[j].width
        return Lookups(lookups), outputs

    def _roads(self, rank: int) -> list[Road]:
        """The outputs for a rank: pooled, sequences, sums."""
        sequences: list[Road] = [("sequence", rank, j) for j, _ in self._unpooled[self.world.rank]]
        return [("straight", rank, 0), *sequences, ("sums", rank, 0)]

    def _of_output(self, sent: Sent, outputs: Sequence[Tensor], rank: int) -> list[Tensor]:
        nothing = torch.zeros(sent.batches[rank], 0)
        return [outputs[self._outputs[road]] if road in self._outputs else nothing for road in self._roads(rank)]

    def _straight_shapes(self, sent: Sent, asker: int, owner: int) -> list[Shape]:
        """Of what an owner sends straight to who asked, one of whom is this rank: pooled vectors, then sequences."""
        shapes: list[Shape] = [(sent.batches[asker], self._pooled[owner])]
        for j, job in self._unpooled[owner]:
            if asker == self.world.rank:
                count = sent.counts[self._first[owner] + j]
            else:
                assert sent.bags is not None
                key = asker * len(self._jobs[owner]) + j
                count = sent.bags.bounds[key + 1] - sent.bags.bounds[key]
            shapes.append((count, (job.width,)))
        return shapes

    def _sums_shape(self, sent: Sent, asker: int, owner: int) -> Shape:
        return sent.batches[asker], self._summed[owner]

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
        """Pooled vectors side by side, [B, sum of dims], of what came from every rank (straight) and from every host
        (sums); then each sequence.
        """
        pooled = torch.empty(sent.batches[self.world.rank], self.width)
        sources = [matrices[0] for matrices in straight]
        runs = [(run, sources[rank]) for rank in range(self.world.size) for run in self._runs[rank]]
        for host in range(self.world.hosts if any(self._sums) else 0):
            runs += [(run, sums[host]) for run in self._sum_runs[host]]
        for run, matrix in sorted(runs, key=lambda pair: pair[0].block):  # parts of a sum in the order of rows
            here, part = pooled[:, slice(*run.home)], matrix[:, slice(*run.there)]
            here.copy_(part) if run.block == 0 else here.add_(part)
        for number, scale_B1 in sent.scale_B1.items():
            pooled[:, self._columns_of(number)] *= scale_B1
        return [pooled, *self._sequences(sent, straight)]

    def _sequences(self, sent: Sent, straight: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        parts: dict[int, list[tuple[Job, Tensor]]] = {n: [] for n, f in enumerate(self.features) if f.pooling == "none"}
        for rank, (_, *sequences) in enumerate(straight):
            for (_, job), values in zip(self._unpooled[rank], sequences, strict=True):
                parts[job.feature].append((job, values))
        out = []
        for number, found in parts.items():
            found.sort(key=lambda pair: (pair[0].shard.columns, pair[0].block))
            count = 1 + max(job.block for job, _ in found)
            columns = [torch.cat([v for _, v in found[i : i + count]]) for i in range(0, len(found), count)]
            vectors = torch.cat(columns, 1)
            order_N = sent.order_N.get(number)
            out.append(vectors if order_N is None else torch.empty_like(vectors).index_copy_(0, order_N, vectors))
        return out

    def _columns_of(self, number: int) -> slice:
        """Where a pooled feature's vectors are among all."""
        return slice(self._begins[number], self._begins[number] + self._widths[number])

    # -- gradients back -----------------------------------------------------------------------------------------

    def learn(self, sent: Sent, grads: Sequence[Tensor], version: int) -> None:
        """Send the gradients of what `lookup` gave to the shards, which learn."""
        world, here = self.world, self.world.rank
        assert sent.bags is not None
        pooled, *sequences = grads
        if sent.scale_B1:
            pooled = pooled.clone()
            for number, scale_B1 in sent.scale_B1.items():
                pooled[:, self._columns_of(number)] *= scale_B1
        matrices = [
            [_gather(pooled, self._runs[rank]), *self._cut_up(sent, sequences, rank)] for rank in range(world.size)
        ]
        out = [self._straight_shapes(sent, here, rank) for rank in range(world.size)]
        back = [self._straight_shapes(sent, rank, here) for rank in range(world.size)]
        begun = self._go("gradients", "all", False, matrices, out, back)
        sums = self._sums_out(sent, pooled) if any(self._sums) else [torch.empty(0)] * world.size
        outputs: dict[int, Tensor] = {}
        for rank, straight in enumerate(begun.wait()):
            for road, matrix in zip(self._roads(rank), [*straight, sums[rank]], strict=True):
                if road in self._outputs:
                    outputs[self._outputs[road]] = matrix
        if sent.bags.lookups:
            ordered = [outputs[number] for number in range(len(outputs))]
            self.local.run_backward(ordered, sent.bags, version, False)

    def _cut_up(self, sent: Sent, sequences: Sequence[Tensor], owner: int) -> list[Tensor]:
        """A rank's parts of the sequences' gradients."""
        numbers = [n for n, f in enumerate(self.features) if f.pooling == "none"]
        parts = []
        for j, job in self._unpooled[owner]:
            grad_ND, number = sequences[numbers.index(job.feature)][:, slice(*job.shard.columns)], self._first[owner] + j
            if job.feature in sent.order_N:
                blocks = next(part.jobs for part in self._parts if number in part.jobs)[: job.block]
                begin = sum(sent.counts[block] for block in blocks)
                grad_ND = grad_ND[sent.order_N[job.feature][begin : begin + sent.counts[number]]]
            parts.append(grad_ND)
        return parts

    def _sums_out(self, sent: Sent, pooled: Tensor) -> list[Tensor]:
        """Gradients of the samples here to every host, there to all its ranks; gives those of every rank's samples."""
        world, local, here = self.world, self.world.local_size, self.world.rank
        owners = world.ranks("host")
        matrices = [[_gather(pooled, self._sum_runs[host])] for host in range(world.hosts)]
        out = [[self._sums_shape(sent, here, owner)] for owner in owners]
        back = [[self._sums_shape(sent, asker, here)] for asker in owners]
        mine = [matrix for (matrix,) in self._go("gradients of sums", "host", False, matrices, out, back).wait()]
        shapes = [self._sums_shape(sent, asker, here) for asker in owners]
        theirs = [[self._sums_shape(sent, h * local + i, here) for h in range(world.hosts)] for i in range(local)]
        found = self._go("gradients of partial sums", "local", False, [mine] * local, [shapes] * local, theirs).wait()
        return [found[rank % local][rank // local] for rank in range(world.size)]


def _gather(pooled: Tensor, runs: Sequence[Run]) -> Tensor:
    """What belongs there of the vectors at home, in its order."""
    parts = [pooled[:, slice(*run.home)] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat([pooled[:, :0], *parts], 1)
