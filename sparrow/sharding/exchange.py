"""Input dist -> lookup -> output dist, and back: who sends what to whom."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sparrow.core import KeyedJagged
from sparrow.distributed import Codec, Pending, World
from sparrow.embeddings import EmbeddingTables, Feature
from sparrow.kernels.embedding_bag import Bags, Lookup, Lookups
from sparrow.sharding import messages
from sparrow.sharding.layout import Layout, Shard
from sparrow.sharding.messages import Shape

T = TypeVar("T")
OutputKey = tuple[str, int, int]
"""An output of the local lookup: "direct" or "staged" for a rank and group, or the "sequence" of a rank and job."""


@dataclass(frozen=True, eq=False)
class ShardLookup:
    """A job: one feature looked up in one shard. feature: its number; is_sequence: whether it is not pooled.

    group: of features whose equal rows a batch has once, 0 for none. block: the shard's number among those of the same
    columns, in the order of rows.
    """

    feature: int
    group: int
    is_sequence: bool
    shard: Shard
    block: int

    @property
    def width(self) -> int:
        """Columns."""
        return self.shard.columns[1] - self.shard.columns[0]


@dataclass(frozen=True)
class ColumnRun:
    """Columns [first, last) of the pooled vectors that are also neighbours in a message. block: as a job's."""

    block: int
    pooled: tuple[int, int]
    message: tuple[int, int]


@dataclass(frozen=True)
class ColumnShard:
    """A feature's lookups of the same columns. block_rows: of all but the last; jobs: their numbers, in order."""

    feature: int
    block_rows: int
    jobs: tuple[int, ...]


@dataclass(eq=False)
class InFlight:
    """A local batch whose ids are under way. rows: of every rank, by group: samples, then unique rows of each group.

    counts: ids for every job. places_N: of a sequence that was cut, by job, where its ids are in the feature's.
    scale_B1: of a mean, by feature. Then, one after the other: bags, what the shards here look up; vectors, see
    `Exchange.lookup`; grads, those of the outputs of the lookup here.
    """

    exchange: Exchange
    device: torch.device
    rows: list[list[int]]
    ids: Pending[list[Tensor]]
    weights: Pending[list[Tensor]] | None
    counts: list[int]
    places_N: dict[int, Tensor]
    scale_B1: dict[int, Tensor]
    bags: Bags | None = None
    vectors: Pending[list[Tensor]] | None = None
    grads: Pending[list[Tensor]] | None = None


class Exchange:
    """The exchange of one `ShardedTables`.

    features: those of sharded tables. Pooled vectors and sequences go back to the rank that asked ("direct") unless
    their table is through_host: then the ranks of the host first add up what they have for each sample, each for the
    samples of its own local rank everywhere, and send one sum to the other hosts ("staged"; Neo's table-row-wise,
    arXiv 2104.05158, section 4.2). Means are sums here, divided by the global lengths at home. groups: of each feature,
    0 or the number, 1 to count, of the dedup group whose unique rows travel instead of samples (RecD, arXiv 2211.05239,
    section 5).
    """

    def __init__(
        self, world: World, local: EmbeddingTables, features: Sequence[Feature], plan: Mapping[str, Layout],
        shards: Mapping[str, Sequence[Shard]], mine: Sequence[Shard], forward: Codec, backward: Codec,
        groups: Sequence[int], count: int,
    ) -> None:  # fmt: skip
        self.world, self.local, self.features, self.groups = world, local, features, groups
        self._each = range(count + 1)
        self.codecs = {True: forward, False: backward}
        self._number = {shard: number for number, shard in enumerate(mine)}
        self._direct: list[list[ShardLookup]] = [[] for _ in range(world.size)]
        self._staged: list[list[ShardLookup]] = [[] for _ in range(world.size)]
        parts: list[list[ShardLookup]] = []
        for number, feature in enumerate(features):
            layout, of_table = plan[feature.table], shards[feature.table]
            ways = self._staged if layout.through_host and feature.pooling != "none" else self._direct
            for c in range(layout.columns):
                blocks = of_table[c * layout.rows : (c + 1) * layout.rows]
                is_sequence, group = feature.pooling == "none", groups[number]
                parts.append([ShardLookup(number, group, is_sequence, s, block) for block, s in enumerate(blocks)])
                for job in parts[-1]:
                    ways[job.shard.rank].append(job)
        self._jobs = [[*direct, *staged] for direct, staged in zip(self._direct, self._staged, strict=True)]
        self._first = [0, *itertools.accumulate(len(jobs) for jobs in self._jobs)]  # of each rank's, by number
        numbers = {job: number for number, job in enumerate(itertools.chain.from_iterable(self._jobs))}
        made = [ColumnShard(p[0].feature, max(p[0].shard.rows[1], 1), tuple(numbers[job] for job in p)) for p in parts]
        self._parts = sorted(made, key=lambda part: part.jobs)
        dims = {name: of_table[-1].columns[1] for name, of_table in shards.items() if of_table}
        self._dims = [dims[feature.table] for feature in features]
        self._widths = [0 if f.pooling == "none" else dims[f.table] for f in features]
        before = [
            [w for w, g in zip(self._widths[:n], groups, strict=False) if g == groups[n]] for n in range(len(features))
        ]
        self._begins = [sum(widths) for widths in before]
        self.widths = [sum(w for w, g in zip(self._widths, groups, strict=True) if g == group) for group in self._each]
        self._unpooled = [[(j, job) for j, job in enumerate(jobs) if job.is_sequence] for jobs in self._direct]
        self._pooled = [[tuple(job.width for job in _of(jobs, g)) for g in self._each] for jobs in self._direct]
        self._summed = [[tuple(job.width for job in _of(jobs, g)) for g in self._each] for jobs in self._staged]
        self._is_staged = any(self._staged)
        self._by_local_rank = [[h * world.local_size + i for h in range(world.hosts)] for i in range(world.local_size)]
        self._lookups, self._outputs = self._make_lookups()
        self._runs = [[self._runs_of(_of(jobs, g)) for g in self._each] for jobs in self._direct]
        of_hosts = [self._staged[h * world.local_size] for h in range(world.hosts)]
        self._host_runs = [[self._runs_of(_of(jobs, g), whole=True) for g in self._each] for jobs in of_hosts]
        rows = max((shard.rows[1] for of_table in shards.values() for shard in of_table), default=0)
        self._index_dtype = torch.int32 if rows < 1 << 31 else torch.int64

    def _runs_of(self, jobs: Sequence[ShardLookup], whole: bool = False) -> list[ColumnRun]:
        """Where the columns of a rank's pooled vectors belong at home. whole: their sums over rows are made before."""
        runs: list[ColumnRun] = []
        at = 0
        for job in jobs:
            begin = self._begins[job.feature] + job.shard.columns[0]
            run = ColumnRun(0 if whole else job.block, (begin, begin + job.width), (at, at + job.width))
            last = runs[-1] if runs else None
            if last is not None and (last.block, last.pooled[1]) == (run.block, run.pooled[0]):
                runs[-1] = ColumnRun(run.block, (last.pooled[0], run.pooled[1]), (last.message[0], run.message[1]))
            else:
                runs.append(run)
            at += job.width
        return runs

    # -- ids out ------------------------------------------------------------------------------------------------

    def send(self, ids: KeyedJagged, slots_N: Tensor) -> InFlight:
        """Begin to send every rank the bags of its jobs. slots_N: the rows of the batch's ids."""
        size, here, given = self.world.size, self.world.rank, ids.lengths
        assert given is not None and ids.rows is not None
        of_key = dict(zip(ids.keys, given.split(list(ids.rows)), strict=True))
        places = {key: k for k, key in enumerate(ids.keys)}
        keys = [places[self.features[part.feature].name] for part in self._parts]
        bounds = [(ids.bounds[k], ids.bounds[k + 1]) for k in keys]
        rows_G = [ids.batch_size, *(ids.stored(group[0]) for group in ids.inverse_B)]
        lengths_B = torch.cat([of_key[ids.keys[k]] for k in keys])
        rows_N = torch.cat([slots_N[low:high] for low, high in bounds])
        weights_N, scale_B1 = ids.weights_N, {}
        if weights_N is not None:
            weights_N = torch.cat([weights_N[low:high] for low, high in bounds])
        for number, feature in enumerate(self.features):
            if feature.pooling == "mean":
                scale_B1[number] = 1.0 / of_key[feature.name].clamp(min=1)[:, None]
        counts, places_N = [high - low for low, high in bounds], dict[int, Tensor]()
        if any(len(part.jobs) > 1 for part in self._parts):
            lengths_B, rows_N, order_N, counts, places_N = self._cut(rows_G, lengths_B, rows_N, counts)
            weights_N = None if weights_N is None else weights_N[order_N]
        lengths_B, rows_N = lengths_B.to(self._index_dtype), rows_N.to(self._index_dtype)
        to_rank = [sum(counts[first:last]) for first, last in itertools.pairwise(self._first)]
        lengths = lengths_B.split([sum(self._bags(rank, rows_G)) for rank in range(size)])
        messages_R = [torch.cat(pair) for pair in zip(lengths, rows_N.split(to_rank), strict=True)]
        heads = [torch.tensor([*rows_G, part.numel()]) for part in messages_R]
        told = self.world.all_to_all("sizes of ids", heads, [len(rows_G) + 1] * size).wait()
        found = [(head.tolist()[:-1], int(head[-1])) for head in told]
        begun = self.world.all_to_all("ids", messages_R, [count for _, count in found])
        weights = None
        if weights_N is not None:
            theirs = [count - sum(self._bags(here, rows)) for rows, count in found]
            weights = self.world.all_to_all("weights", weights_N.split(to_rank), theirs)
        return InFlight(self, slots_N.device, [rows for rows, _ in found], begun, weights, counts, places_N, scale_B1)

    def _bags(self, owner: int, rows_G: Sequence[int]) -> list[int]:
        """Bags of each of a rank's jobs, for who asks with so many rows."""
        return [rows_G[job.group] for job in self._jobs[owner]]

    def _cut(
        self, rows_G: list[int], lengths_B: Tensor, rows_N: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor, Tensor, list[int], dict[int, Tensor]]:
        """Reorder ids from column shards to jobs.

        Gives the lengths of every job's bags, rows relative to their blocks, the permutation, and `InFlight`'s counts
        and places_N.
        """
        device, parts = rows_N.device, self._parts
        sizes_P = torch.tensor(counts, device=device)
        most = max(len(part.jobs) for part in parts)
        jobs = [job for part in parts for job in (*part.jobs, *[0] * (most - len(part.jobs)))]
        block_rows_N = torch.tensor([part.block_rows for part in parts], device=device).repeat_interleave(sizes_P)
        part_N = torch.arange(len(parts), device=device).repeat_interleave(sizes_P)
        bags = [torch.arange(rows_G[self.groups[part.feature]], device=device) for part in parts]
        bag_N = torch.cat(bags).repeat_interleave(lengths_B)
        begins_J = [0, *itertools.accumulate(n for rank in range(self.world.size) for n in self._bags(rank, rows_G))]
        block_N = rows_N // block_rows_N
        job_N = torch.tensor(jobs, device=device)[part_N * most + block_N]
        narrow = torch.int16 if self._first[-1] < 1 << 15 else torch.int32  # sorted ten times as fast as int64
        order_N = job_N.to(narrow).argsort(stable=True)
        bag_N += torch.tensor(begins_J, device=device)[job_N]
        cut_B = torch.bincount(bag_N, minlength=begins_J[-1])
        begins = itertools.accumulate(counts, initial=0)
        counts = torch.bincount(job_N, minlength=self._first[-1]).tolist()
        ends = [0, *itertools.accumulate(counts)]
        places_N = {
            job: order_N[ends[job] : ends[job + 1]] - begin
            for begin, part in zip(begins, parts, strict=False)
            for job in part.jobs
            if len(part.jobs) > 1 and self.features[part.feature].pooling == "none"
        }
        return cut_B, (rows_N - block_N * block_rows_N)[order_N], order_N, counts, places_N

    # -- lookup -------------------------------------------------------------------------------------------------

    def lookup(self, sent: InFlight) -> None:
        """Look up what all ranks asked for and begin to send it: `sent.vectors`.

        Those are for each group the pooled vectors of this rank's rows side by side, [rows, sum of dims]; then each
        sequence's [N, D].
        """
        here, size = self.world.rank, self.world.size
        bags = sent.bags = self._receive(sent)
        outputs = self.local.run_lookup(bags) if bags.lookups else []
        vectors = [self._of_output(sent, outputs, rank) for rank in range(size)]
        out = [self._direct_shapes(sent, rank, here) for rank in range(size)]
        back = [self._direct_shapes(sent, here, rank) for rank in range(size)]
        last = len(self._each)
        direct = self._go("vectors", "all", True, [v[:-last] for v in vectors], out, back)
        sums = self._sums_home(sent, [v[-last:] for v in vectors]) if self._is_staged else Pending(list)
        sent.vectors = Pending(lambda: self._assemble(sent, direct.wait(), sums.wait()))

    def _receive(self, sent: InFlight) -> Bags:
        """What the shards here look up."""
        lengths, rows, bags = [], [], []
        for rows_G, data in zip(sent.rows, sent.ids.wait(), strict=True):
            mine = self._bags(self.world.rank, rows_G)
            lengths.append(data[: sum(mine)])
            rows.append(data[sum(mine) :])
            bags += mine
        lengths_B = torch.cat(lengths)
        offsets_B1 = lengths_B.new_zeros(len(lengths_B) + 1, dtype=torch.int64)
        torch.cumsum(lengths_B, 0, out=offsets_B1[1:])
        ends = torch.tensor([0, *bags]).cumsum(0).to(offsets_B1.device)
        return Bags(
            slots_N=torch.cat(rows), offsets_B1=offsets_B1, bags=bags, bounds=offsets_B1[ends].tolist(),
            lookups=self._lookups, weights_N=None if sent.weights is None else torch.cat(sent.weights.wait()),
        )  # fmt: skip

    def _make_lookups(self) -> tuple[Lookups, dict[OutputKey, int]]:
        """A key for every rank and job; for every rank and group an output of the pooled vectors that go direct and one
        of sums, and one for each sequence: the lookups, and the number of each output.
        """
        jobs, direct = self._jobs[self.world.rank], len(self._direct[self.world.rank])
        lookups: list[Lookup] = []
        outputs: dict[OutputKey, int] = {}
        columns: dict[OutputKey, int] = {}
        for j in sorted(range(len(jobs)), key=lambda j: (jobs[j].feature, j)):  # the order of gradients
            sequence = jobs[j].is_sequence
            for rank in range(self.world.size):
                way = "direct" if j < direct else "staged"
                key = ("sequence", rank, j) if sequence else (way, rank, jobs[j].group)
                output = outputs.setdefault(key, len(outputs))
                lookups.append(
                    Lookup(
                        table=self._number[jobs[j].shard], pooling="none" if sequence else "sum",
                        key=rank * len(jobs) + j, output=output, column=columns.get(key, 0),
                    )
                )  # fmt: skip
                columns[key] = columns.get(key, 0) + jobs[j].width
        return Lookups(lookups), outputs

    def _keys(self, rank: int) -> list[OutputKey]:
        """The outputs for a rank: pooled, sequences, sums."""
        sequences: list[OutputKey] = [("sequence", rank, j) for j, _ in self._unpooled[self.world.rank]]
        return [*(("direct", rank, g) for g in self._each), *sequences, *(("staged", rank, g) for g in self._each)]

    def _of_output(self, sent: InFlight, outputs: Sequence[Tensor], rank: int) -> list[Tensor]:
        def nothing(key: OutputKey) -> Tensor:
            return torch.zeros(sent.rows[rank][key[2]], 0, device=sent.device)

        return [outputs[self._outputs[key]] if key in self._outputs else nothing(key) for key in self._keys(rank)]

    def _direct_shapes(self, sent: InFlight, asker: int, owner: int) -> list[Shape]:
        """Of what an owner sends direct to who asked, one of whom is this rank: pooled vectors, then sequences."""
        shapes: list[Shape] = list(zip(sent.rows[asker], self._pooled[owner], strict=True))
        for j, job in self._unpooled[owner]:
            if asker == self.world.rank:
                count = sent.counts[self._first[owner] + j]
            else:
                assert sent.bags is not None
                key = asker * len(self._jobs[owner]) + j
                count = sent.bags.bounds[key + 1] - sent.bags.bounds[key]
            shapes.append((count, (job.width,)))
        return shapes

    def _sums_shapes(self, sent: InFlight, asker: int, owner: int) -> list[Shape]:
        return list(zip(sent.rows[asker], self._summed[owner], strict=True))

    def _go(
        self, what: str, dim: str, forward: bool, matrices: Sequence[Sequence[Tensor]],
        out: Sequence[Sequence[Shape]], back: Sequence[Sequence[Shape]],
    ) -> Pending[list[list[Tensor]]]:  # fmt: skip
        """Matrices of shapes `out` to each member along a dim; gives those of shapes `back` that they sent."""
        codec = self.codecs[forward]
        parts = [messages.pack(codec, m, s, self.world.step, forward) for m, s in zip(matrices, out, strict=True)]
        sizes = [messages.size(codec, shapes) for shapes in back] if messages.is_fixed(codec) else None
        begun = self.world.all_to_all(what, parts, sizes, dim)
        return Pending(lambda: [messages.unpack(codec, d, s) for d, s in zip(begun.wait(), back, strict=True)])

    def _sums_home(self, sent: InFlight, partial: Sequence[Sequence[Tensor]]) -> Pending[list[list[Tensor]]]:
        """Partial sums for the rows of every rank -> for each host the sums of its jobs for the rows here."""
        world, here, askers = self.world, self.world.rank, self._by_local_rank
        owners = world.ranks("host")
        shapes = [self._sums_shapes(sent, asker, here) for asker in range(world.size)]
        out = [_flat(shapes[asker] for asker in group) for group in askers]
        back = [_flat(shapes[asker] for asker in owners)] * world.local_size
        given = [_flat(partial[asker] for asker in group) for group in askers]
        begun = self._go("partial sums", "local", True, given, out, back)
        of = [self._sums_shapes(sent, here, owner) for owner in owners]

        def finish() -> list[list[Tensor]]:
            first, *others = begun.wait()
            for other in others:
                first = [one + two for one, two in zip(first, other, strict=True)]
            size = len(self._each)
            to = [first[h * size : (h + 1) * size] for h in range(world.hosts)]
            return self._go("sums", "host", True, to, [shapes[asker] for asker in owners], of).wait()

        return Pending(finish)

    def _assemble(
        self, sent: InFlight, direct: Sequence[Sequence[Tensor]], sums: Sequence[Sequence[Tensor]]
    ) -> list[Tensor]:
        """`InFlight.vectors`, of what came from every rank (direct) and from every host (sums)."""
        pooled = []
        for group, rows in enumerate(sent.rows[self.world.rank]):
            found = torch.empty(rows, self.widths[group], device=sent.device)
            runs = [(run, m[group]) for m, of_rank in zip(direct, self._runs, strict=True) for run in of_rank[group]]
            for of_host, matrices in zip(self._host_runs, sums, strict=False):  # no sums where nothing is staged
                runs += [(run, matrices[group]) for run in of_host[group]]
            for run, matrix in sorted(runs, key=lambda pair: pair[0].block):  # parts of a sum in the order of rows
                here, part = found[:, slice(*run.pooled)], matrix[:, slice(*run.message)]
                here.copy_(part) if run.block == 0 else here.add_(part)
            pooled.append(found)
        for number, scale_B1 in sent.scale_B1.items():
            pooled[self.groups[number]][:, self.columns_of(number)] *= scale_B1
        return [*pooled, *self._sequences(sent, [matrices[len(pooled) :] for matrices in direct])]

    def _sequences(self, sent: InFlight, direct: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        out = {
            part.feature: torch.empty(
                sum(sent.counts[job] for job in part.jobs), self._dims[part.feature], device=sent.device
            )
            for part in self._parts
            if self.features[part.feature].pooling == "none"
        }
        for rank, sequences in enumerate(direct):
            for (j, job), values in zip(self._unpooled[rank], sequences, strict=True):
                places = sent.places_N.get(self._first[rank] + j, slice(None))
                out[job.feature][places, slice(*job.shard.columns)] = values
        return [out[number] for number in sorted(out)]

    def columns_of(self, number: int) -> slice:
        """Where a pooled feature's vectors are among those of its group."""
        return slice(self._begins[number], self._begins[number] + self._widths[number])

    # -- gradients back -----------------------------------------------------------------------------------------

    def learn(self, sent: InFlight, version: int) -> None:
        """Learn from everyone's gradients of what the shards here looked up, as of a version of the rows."""
        assert sent.bags is not None and sent.grads is not None
        grads = sent.grads.wait()
        if sent.bags.lookups:
            self.local.run_backward(grads, sent.bags, version, False)

    def send_grads(self, sent: InFlight, grads: Sequence[Tensor]) -> None:
        """Begin to send the gradients of `sent.vectors` to the shards."""
        world, here = self.world, self.world.rank
        pooled, sequences = list(grads[: len(self._each)]), grads[len(self._each) :]
        if sent.scale_B1:
            pooled = [grad.clone() for grad in pooled]
            for number, scale_B1 in sent.scale_B1.items():
                pooled[self.groups[number]][:, self.columns_of(number)] *= scale_B1
        matrices = [
            [*_gather(pooled, self._runs[rank]), *self._cut_up(sent, sequences, rank)] for rank in range(world.size)
        ]
        out = [self._direct_shapes(sent, here, rank) for rank in range(world.size)]
        back = [self._direct_shapes(sent, rank, here) for rank in range(world.size)]
        begun = self._go("gradients", "all", False, matrices, out, back)
        sums = self._sums_out(sent, pooled) if self._is_staged else Pending(lambda: [[]] * world.size)

        def finish() -> list[Tensor]:
            outputs: dict[int, Tensor] = {}
            for rank, (direct, of_sums) in enumerate(zip(begun.wait(), sums.wait(), strict=True)):
                for key, matrix in zip(self._keys(rank), [*direct, *of_sums], strict=False):
                    if key in self._outputs:
                        outputs[self._outputs[key]] = matrix
            return [outputs[number] for number in range(len(outputs))]

        sent.grads = Pending(finish)

    def _cut_up(self, sent: InFlight, sequences: Sequence[Tensor], owner: int) -> list[Tensor]:
        """A rank's parts of the sequences' gradients."""
        numbers = [n for n, f in enumerate(self.features) if f.pooling == "none"]
        return [
            sequences[numbers.index(job.feature)][
                sent.places_N.get(self._first[owner] + j, slice(None)), slice(*job.shard.columns)
            ]
            for j, job in self._unpooled[owner]
        ]

    def _sums_out(self, sent: InFlight, pooled: Sequence[Tensor]) -> Pending[list[list[Tensor]]]:
        """Gradients of the rows here to every host, there to all its ranks; gives those of every rank's rows."""
        world, local, here = self.world, self.world.local_size, self.world.rank
        owners = world.ranks("host")
        matrices = [_gather(pooled, runs) for runs in self._host_runs]
        out = [self._sums_shapes(sent, here, owner) for owner in owners]
        back = [self._sums_shapes(sent, asker, here) for asker in owners]
        begun = self._go("gradients of sums", "host", False, matrices, out, back)
        theirs = [_flat(self._sums_shapes(sent, asker, here) for asker in askers) for askers in self._by_local_rank]

        def finish() -> list[list[Tensor]]:
            mine, size = _flat(begun.wait()), len(self._each)
            done = self._go("gradients of partial sums", "local", False, [mine] * local, [_flat(back)] * local, theirs)
            found = done.wait()
            at = [(rank % local, size * (rank // local)) for rank in range(world.size)]
            return [found[i][first : first + size] for i, first in at]

        return Pending(finish)


def _gather(pooled: Sequence[Tensor], runs: Sequence[Sequence[ColumnRun]]) -> list[Tensor]:
    """What belongs in a message of each group's vectors, in its order."""
    found = []
    for matrix, of_group in zip(pooled, runs, strict=True):
        parts = [matrix[:, slice(*run.pooled)] for run in of_group]
        found.append(parts[0] if len(parts) == 1 else torch.cat([matrix[:, :0], *parts], 1))
    return found


def _of(jobs: Sequence[ShardLookup], group: int) -> list[ShardLookup]:
    """The pooled ones of a group."""
    return [job for job in jobs if job.group == group and not job.is_sequence]


def _flat(lists: Iterable[Sequence[T]]) -> list[T]:
    return list(itertools.chain.from_iterable(lists))
