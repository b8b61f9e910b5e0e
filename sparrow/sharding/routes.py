"""Who looks up what for whom, and where its vectors belong: all that a plan tells before there is a
batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sparrow.distributed import World
from sparrow.embeddings import Feature
from sparrow.kernels.embedding_bag import Lookup, Lookups, Pooling
from sparrow.sharding.layout import Layout, Shard

Way = Literal["direct", "staged", "sequence"]
"""How vectors go home: pooled, from owner to asker or through the owner's host; or unpooled, from
owner to asker.
"""


MOST = (1 << 63) - 1
_POOLING: dict[Way, Pooling] = {"direct": "sum", "staged": "sum", "sequence": "none"}


@dataclass(frozen=True, eq=False)
class Job:
    """One feature looked up in one shard.

    feature: its number. group: of features whose equal rows a batch has once, 0 for none. block:
    the shard's number among those of the same columns, in the order of rows.
    """

    feature: int
    group: int
    way: Way
    shard: Shard
    block: int

    @property
    def width(self) -> int:
        """How many columns the shard has."""
        return self.shard.columns[1] - self.shard.columns[0]


@dataclass(frozen=True)
class ColumnRun:
    """Columns [first, last) of the pooled vectors that are also neighbours in a matrix of a
    message.

    block: as a job's, or that of a whole host where its ranks have added theirs up.
    """

    block: int
    pooled: tuple[int, int]
    message: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Piece:
    """A matrix of the message from an owner: the vectors of a group's pooled jobs side by side, or
    one sequence.

    jobs: their numbers. widths: their columns; columns: all together. runs: where those belong;
    none of a sequence.
    """

    way: Way
    group: int
    jobs: tuple[int, ...]
    widths: tuple[int, ...]
    columns: int
    runs: tuple[ColumnRun, ...]


@dataclass(frozen=True)
class ColumnShard:
    """A feature's lookups of the same columns. block_rows: of all but the last; jobs: their
    numbers, in order.
    """

    feature: int
    block_rows: int
    jobs: tuple[int, ...]


class Routes:
    """The jobs of every rank, by features, and the pieces of their messages.

    Vectors go back to the rank that asked ("direct", "sequence") unless their table is
    through_host: then the ranks of the host first add up what they have for each sample, each for
    the samples of its own local rank everywhere, and send one sum to the other hosts ("staged";
    Neo's table-row-wise, arXiv 2104.05158, section 4.2). features: those of sharded tables. clocks:
    of those whose ids come and go. groups: of each feature, 0 or the number, 1 to
    count, of the dedup group whose unique rows travel instead of samples (RecD, arXiv 2211.05239,
    section 5).
    """

    def __init__(
        self,
        world: World,
        features: Sequence[Feature],
        plan: Mapping[str, Layout],
        shards: Mapping[str, Sequence[Shard]],
        clocks: Collection[str],
        groups: Sequence[int],
        count: int,
    ) -> None:
        self.world = world
        self.features = features
        self.clocks = clocks
        self.groups = groups
        dims = {name: held[-1].columns[1] for name, held in shards.items() if held}
        self.dims = [dims[feature.table] for feature in features]
        self.widths = [0] * (count + 1)  # of a group's pooled vectors side by side
        self._begins: list[int] = []
        for feature, group, dim in zip(features, groups, self.dims, strict=True):
            self._begins.append(self.widths[group])
            self.widths[group] += 0 if feature.pooling == "none" else dim
        parts = [*self._column_jobs(plan, shards)]
        jobs_of_rank: list[list[Job]] = [[] for _ in range(world.size)]
        for job in itertools.chain.from_iterable(parts):
            jobs_of_rank[job.shard.rank].append(job)
        self.jobs = list(itertools.chain.from_iterable(jobs_of_rank))
        # where each rank's jobs begin
        self.edges = [0, *itertools.accumulate(map(len, jobs_of_rank))]
        self.edges_R1 = torch.tensor(self.edges)
        self.group_J = torch.tensor([job.group for job in self.jobs], dtype=torch.int64)
        numbers = {job: number for number, job in enumerate(self.jobs)}
        column_shards = [
            ColumnShard(p[0].feature, max(p[0].shard.sent[1], 1), tuple(numbers[job] for job in p))
            for p in parts
        ]
        # so that those that are not cut are jobs in their order
        self.parts = sorted(column_shards, key=lambda part: part.jobs)
        most = max((len(part.jobs) for part in column_shards), default=1)
        self.job_PM = torch.tensor(
            [[*p.jobs, *[0] * (most - len(p.jobs))] for p in self.parts], dtype=torch.int64
        )
        self.block_rows_P = torch.tensor(
            [min(part.block_rows, MOST) for part in self.parts], dtype=torch.int64
        )
        last = []
        for part in self.parts:
            sent = [self.jobs[j].shard.sent for j in part.jobs]
            last.append(max(sum(begin < end for begin, end in sent) - 1, 0))
        self.last_P = torch.tensor(last, dtype=torch.int64)
        all_shards = itertools.chain.from_iterable(shards.values())
        rows = max((shard.sent[1] for shard in all_shards), default=0)
        self.index_dtype = torch.int32 if rows < 1 << 31 else torch.int64
        ranks = range(world.size)
        self.direct = [[*self._pooled(rank, "direct"), *self._sequences(rank)] for rank in ranks]
        self.staged = [self._pooled(rank, "staged") for rank in ranks]
        self.is_staged = any(self.staged)

    def _column_jobs(
        self, plan: Mapping[str, Layout], shards: Mapping[str, Sequence[Shard]]
    ) -> Iterator[list[Job]]:
        """Yields the jobs of each feature in each stretch of its table's columns, by blocks of
        rows.
        """
        for number, feature in enumerate(self.features):
            layout = plan[feature.table]
            way: Way = "staged" if layout.through_host else "direct"
            if feature.pooling == "none":
                way = "sequence"
            for c in range(layout.columns):
                blocks = shards[feature.table][c * layout.rows : (c + 1) * layout.rows]
                yield [
                    Job(number, self.groups[number], way, shard, block)
                    for block, shard in enumerate(blocks)
                ]

    def jobs_of(self, rank: int) -> range:
        """Returns the numbers of a rank's jobs."""
        return range(self.edges[rank], self.edges[rank + 1])

    def columns_of(self, number: int) -> slice:
        """Returns where a pooled feature's vectors are among those of its group."""
        return slice(self._begins[number], self._begins[number] + self.dims[number])

    def lookups(self, shards: Sequence[Shard]) -> tuple[Lookups, list[int], list[int]]:
        """Returns this rank's jobs as lookups in its shards, in the order of features.

        Each has a key, and each piece an output. The other two lists say which outputs its direct
        pieces are, and which its staged ones.
        """
        rank = self.world.rank
        pieces = [*self.direct[rank], *self.staged[rank]]
        piece_of: dict[int, int] = {}
        for p, piece in enumerate(pieces):
            piece_of |= dict.fromkeys(piece.jobs, p)
        number = {shard: n for n, shard in enumerate(shards)}
        outputs: dict[int, int] = {}
        columns = [0] * len(pieces)
        lookups: list[Lookup] = []
        for key, j in enumerate(self.jobs_of(rank)):
            job = self.jobs[j]
            place = piece_of[j]
            output = outputs.setdefault(place, len(outputs))
            lookups.append(
                Lookup(
                    table=number[job.shard],
                    pooling=_POOLING[job.way],
                    key=key,
                    output=output,
                    column=columns[place],
                )
            )
            columns[place] += job.width
        outputs_of_pieces = [outputs[piece] for piece in range(len(pieces))]
        direct = len(self.direct[rank])
        return Lookups(lookups), outputs_of_pieces[:direct], outputs_of_pieces[direct:]

    def _pooled(self, rank: int, way: Way) -> list[Piece]:
        chosen: list[list[int]] = [[] for _ in self.widths]  # by group
        for j in self.jobs_of(rank):
            if self.jobs[j].way == way:
                chosen[self.jobs[j].group].append(j)
        return [self._piece(jobs, self._runs(jobs)) for jobs in chosen if jobs]

    def _sequences(self, rank: int) -> list[Piece]:
        return [self._piece([j], ()) for j in self.jobs_of(rank) if self.jobs[j].way == "sequence"]

    def _piece(self, numbers: Sequence[int], runs: tuple[ColumnRun, ...]) -> Piece:
        first = self.jobs[numbers[0]]
        widths = tuple(self.jobs[j].width for j in numbers)
        return Piece(first.way, first.group, tuple(numbers), widths, sum(widths), runs)

    def _runs(self, numbers: Sequence[int]) -> tuple[ColumnRun, ...]:
        runs: list[ColumnRun] = []
        at = 0
        for job in (self.jobs[j] for j in numbers):
            begin = self._begins[job.feature] + job.shard.columns[0]
            block = job.block // self.world.local_size if job.way == "staged" else job.block
            run = ColumnRun(block, (begin, begin + job.width), (at, at + job.width))
            last = runs[-1] if runs else None
            if last is not None and (last.block, last.pooled[1]) == (run.block, run.pooled[0]):
                runs[-1] = ColumnRun(
                    run.block, (last.pooled[0], run.pooled[1]), (last.message[0], run.message[1])
                )
            else:
                runs.append(run)
            at += job.width
        return tuple(runs)
