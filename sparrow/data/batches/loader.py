"""Prepared log -> batches, in a seeded order that can be taken up again at any batch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from sparrow import features
from sparrow.core import Batch, UserError
from sparrow.core.arrays import Bools
from sparrow.core.prefetch import prefetch
from sparrow.data.batches.parts import File, open_files, read_groups, request
from sparrow.features.rows import Int64s, Rows, joined
from sparrow.features.schema import Schema, weights_of

# row groups of a window, of which two are in memory at a time
SHUFFLED_GROUPS = 64
PLAIN_GROUPS = 16
STRATA = 64
# so that a thread which the system keeps waiting for some milliseconds keeps nobody else waiting
BATCHES_AHEAD = 2


@dataclass(frozen=True, eq=False)
class Share:
    """One reader's rows of a batch.

    samples, mass: rows and sum of the sample weights of the whole batch.
    """

    batch: Batch
    samples: int
    mass: float


@dataclass(frozen=True, eq=False)
class _Piece:
    """What a window has of a batch: whether the batch begins here, and this reader's rows of it.

    places: of the rows in the window. numbers: of the rows in the training, where they are asked
    for.
    """

    begins: bool
    places: Int64s
    numbers: Int64s | None
    samples: int
    mass: float


class Loader:
    """The batches of one part. An iteration gives the rest of the current epoch, and the next one
    the next epoch.

    Batch k holds rows [k * batch_size, (k + 1) * batch_size) of the epoch's order. Without
    `shuffle` that is the file's order. With it the order is drawn from (seed, epoch): row groups
    are in random order, and rows are at random within windows of row groups. About as many rows of
    every batch are from each of STRATA parts of the window.

    In a clustered log it is sessions that are put in random order. Each end of a batch moves to the
    beginning of its request, so a batch may have fewer rows, or up to twice as many. A request of
    more than batch_size rows is cut.

    Several ranks can divide the rows of each batch among them. Then the batches are one rank's.
    Within a window every rank has a stretch of a batch, of nearly as many rows as any other's, in
    the order of the file. A stretch holds whole requests. Only row groups in which a rank has rows
    are read.

    One thread reads a window ahead, and another cuts batches. They end with the iteration, also
    with an abandoned one.

    Args:
        schema: the prepared log's.
        folder: the part's.
        batch_size: rows of a batch, of all ranks together.
        shuffle: whether rows come in a random order.
        seed: what the random order is drawn from.
        unique: feature groups whose equal rows a batch has once.
        rank: which of the readers this one is.
        ranks: how many readers share each batch.

    Raises:
        UserError: for a batch_size below 1, and for a damaged file.
    """

    def __init__(
        self,
        schema: Schema,
        folder: Path,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        unique: Collection[str] = (),
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size: {batch_size} holds no rows; use 1 or more")
        self.schema = schema
        self.batch_size = batch_size
        self._folder = folder
        self._shuffle = shuffle
        self._seed = seed % (1 << 64)  # numpy takes no negative seed
        self._unique = unique
        self._rank = rank
        self._ranks = ranks
        with open_files(folder, schema) as parquet:
            meta = parquet[None].parquet.metadata
            self._group_rows = np.array(
                [meta.row_group(i).num_rows for i in range(meta.num_row_groups)], np.int64
            )
        rows = int(self._group_rows.sum())
        self._batches = -(-rows // batch_size)
        self._by = schema.cluster.by if schema.cluster else None  # its equal rows stay side by side
        # what the order depends on
        self._leading = (self._by, *request(schema)) if self._by else ()
        self._columns = schema.of_kind("label", "group", "numeric", "vector", "categorical", "list")
        self._columns += schema.weights
        self._columns += tuple(
            weights_of(name) for name, column in schema.columns.items() if column.weights
        )
        self._columns += self._leading
        self._is_numbered = False
        self._epoch = self._next = 0

    def __len__(self) -> int:
        """Returns how many batches a whole epoch has."""
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        return (share.batch for share in self.shares())

    def shares(self) -> Iterator[Share]:
        """Yields this rank's rows of each batch, with the rows and the sum of the weights of the
        whole batch.
        """
        if self._next < self._batches:
            windows = prefetch(self._windows(), "sparrow-loader")
            for share in prefetch(_gathered(windows), "sparrow-batches", BATCHES_AHEAD):
                self._next += 1
                yield share
        self._epoch = self._epoch + 1
        self._next = 0

    def with_groups(self) -> None:
        """Let rows of a group that stand side by side stay in one batch and with one rank. In a
        clustered log they do.

        Rows are cut apart at the end of a window and, where rows are shuffled, of a row group.
        """
        group = self.schema.role("group")
        if self._by is None and group is not None:
            self._by = group
            self._leading = (group,)

    def groups_cut(self, most: int = 1_000_000) -> tuple[int, int, int]:
        """Returns how many groups there are, how many of them come in pieces, and in how many rows
        they were counted.

        most: about how many of the first rows are counted.
        """
        name = str(self.schema.role("group"))
        ends = np.cumsum(self._group_rows)
        counted = min(int(np.searchsorted(ends, most)) + 1, len(ends))
        with open_files(self._folder, self.schema) as parquet:
            read = read_groups({None: parquet[None]}, list(range(counted)), (name,))
            group_N = Rows(self.schema, [read]).column("group")
        begin_N = features.runs.begins([(group_N, None)], len(group_N))
        step = 1 if self._shuffle else self._window_groups()
        begin_N[ends[: counted - 1][step - 1 :: step]] = True
        first = np.flatnonzero(begin_N)
        pieces = -(-np.diff(first, append=len(group_N)) // self.batch_size)
        groups, group_of_piece = np.unique(group_N[first], return_inverse=True)
        return len(groups), int((np.bincount(group_of_piece, pieces) > 1).sum()), len(group_N)

    def with_rows(self) -> None:
        """Let batches have `row_B`. It depends neither on how ranks divide the rows, nor on where
        one goes on.
        """
        self._is_numbered = True

    def with_time(self) -> None:
        """Let batches have the time of their last row."""
        self._columns += self.schema.of_kind("time")

    def bytes_ahead(self) -> int:
        """Returns about how many bytes of memory windows take in an iteration. Batches come beside
        them.

        While one window is used the next is ready, and when that begins, a third is read: as
        Parquet has it, and as rows. What rows take is known from the largest row group.
        """
        with open_files(self._folder, self.schema) as parquet:
            metas = [file.parquet.metadata for file in parquet.values()]
            sizes = []
            for i in range(metas[0].num_row_groups):
                sizes.append(sum(m.row_group(i).total_byte_size for m in metas))
            if not sizes:
                return 0
            largest = max(range(len(sizes)), key=sizes.__getitem__)
            rows = Rows(self.schema, [read_groups(parquet, [largest], self._columns)], self._unique)
        groups = min(self._window_groups(), len(sizes))
        windows = min(2, -(-len(sizes) // groups) - 1)  # that are there beside the one that is read
        if self._ranks > 1:  # a stretch of each batch, and of one that is shuffled the same stretch
            batches = (
                1
                if self._shuffle
                else -(-groups * int(self._group_rows.max(initial=0)) // self.batch_size)
            )
            # a stretch may begin within a group
            groups = min(groups, -(-groups // self._ranks) + batches)
        return groups * ((windows + 1) * rows.nbytes + sizes[largest])

    @property
    def exhausted(self) -> bool:
        """Whether the current epoch has no batch left."""
        return self._next >= self._batches

    def state_dict(self) -> dict[str, int]:
        """Returns where the loader stands: the epoch and the next batch of it."""
        return {"epoch": self._epoch, "batch": self._next, "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes to where the loader stood when `state_dict` was called.

        Raises:
            UserError: for another batch size, whose batches are cut elsewhere, and for a batch
                beyond the epoch's end.
        """
        if state["batch_size"] != self.batch_size or not 0 <= state["batch"] <= self._batches:
            raise UserError(
                f"batch_size: {self.batch_size} over {self._batches} batches cannot take up"
                f" {dict(state)}; keep the data and the batch size of the run"
            )
        self._epoch = state["epoch"]
        self._next = state["batch"]

    def _window_groups(self) -> int:
        """Returns how many row groups a window has; fewer where they are larger than `prepare`
        makes them now.
        """
        rows, groups = (1 << 18, SHUFFLED_GROUPS) if self._shuffle else (1 << 16, PLAIN_GROUPS)
        return min(groups, max(1, rows // int(self._group_rows.max(initial=1))))

    def _windows(self) -> Iterator[tuple[Rows, list[_Piece]]]:
        """Yields the epoch's rows from the next batch on, a window at a time. Windows before it are
        not read.
        """
        order = np.arange(len(self._group_rows))
        size = self._window_groups()
        low = 0
        if self._shuffle:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(order)
        with open_files(self._folder, self.schema) as parquet:
            for first in range(0, len(order), size):
                groups = order[first : first + size]
                high = low + int(self._group_rows[groups].sum())
                if self._next * self.batch_size < high:
                    random = (
                        np.random.default_rng((self._seed, self._epoch, first))
                        if self._shuffle
                        else None
                    )
                    yield self._window(parquet, groups, low, random)
                low = high

    def _window(
        self,
        parquet: Mapping[str | None, File],
        groups: Int64s,
        low: int,
        random: np.random.Generator | None,
    ) -> tuple[Rows, list[_Piece]]:
        """Returns this reader's rows of some row groups, and its pieces of batches. low: their
        first row's number.
        """
        if self._ranks == 1:
            tables = read_groups(parquet, groups.tolist(), self._columns)
            rows = lead = Rows(self.schema, [tables], self._unique)
        else:
            names = (*self._leading, *self.schema.weights)
            lead_file: Mapping[str | None, File] = {None: parquet[None]}
            lead_tables = [read_groups(lead_file, groups.tolist(), names)] if names else []
            lead = Rows(self.schema, lead_tables)
        sizes = self._group_rows[groups]
        pieces = self._pieces(int(sizes.sum()), lead, low, random)
        if self._ranks > 1:
            at = np.concatenate([piece.places for piece in pieces])
            group_of = np.searchsorted(np.cumsum(sizes), at, "right")
            read = np.unique(group_of)
            tables = read_groups(parquet, groups[read].tolist(), self._columns)
            rows = Rows(self.schema, [tables], self._unique)
            unread = sizes.copy()
            unread[read] = 0
            at -= np.cumsum(unread)[group_of]
            ends = np.cumsum([len(piece.places) for piece in pieces])
            places_of_pieces = np.split(at, ends[:-1])
            for i, places in enumerate(places_of_pieces):
                pieces[i] = replace(pieces[i], places=places)
        return rows, pieces

    def _pieces(
        self, count: int, lead: Rows, low: int, random: np.random.Generator | None
    ) -> list[_Piece]:
        """Returns what a window of `count` rows has of each batch. lead: says where requests begin,
        and weights.
        """
        places, begin_N, requests = self._order(count, lead, random)
        weight_N = lead.column("weight") if self.schema.weights else None
        wanted = np.arange(
            max(self._next, -(-low // self.batch_size)), -(-(low + count) // self.batch_size)
        )
        edges = wanted * self.batch_size - low
        if requests is not None:
            edges = requests[np.searchsorted(requests, edges, "right") - 1]
        pieces = []
        bounds = [0, *edges.tolist(), count]
        for i, (first, last) in enumerate(itertools.pairwise(bounds)):
            piece_places = places[first:last]
            samples = last - first
            if not i and (not samples or self._next >= -(-low // self.batch_size)):
                continue  # of a batch before the next one
            if self._ranks > 1:
                in_order = piece_places if random is None else np.sort(piece_places)
                piece_places = self._rank_stretch(in_order, begin_N)
            mass = float(samples)
            if weight_N is not None:
                mass = float(weight_N[places[first:last]].sum(dtype=np.float64))
            numbers = piece_places + (low + (self._epoch << 40)) if self._is_numbered else None
            pieces.append(_Piece(i > 0, piece_places, numbers, samples, mass))
        return pieces

    def _rank_stretch(self, places: Int64s, begin_N: Bools | None) -> Int64s:
        """Returns this rank's stretch of a window's rows of a batch. Its ends move to where their
        request begins.
        """
        ends = len(places) * np.array([self._rank, self._rank + 1]) // self._ranks
        if begin_N is not None:
            starts = np.flatnonzero(begin_N[places])
            starts = np.concatenate([[0], starts[starts > 0], [len(places)]])
            ends = starts[np.searchsorted(starts, ends, "right") - 1]
        return places[ends[0] : ends[1]]

    def _order(
        self, count: int, lead: Rows, random: np.random.Generator | None
    ) -> tuple[Int64s, Bools | None, Int64s | None]:
        """Returns what is needed to cut a window in batches.

        Returns:
            The places of its rows in this epoch's order; which rows begin a request in the file;
            and where in that order a batch may begin.
        """
        places = np.arange(count)
        if self._by is None:
            return (places if random is None else _mixed(count, random)), None, None
        if random is not None:
            kind = self.schema.columns[self._by].kind
            session = np.append(
                np.flatnonzero(features.runs.begins([(lead.column(kind), None)], count)), count
            )
            chosen = _mixed(len(session) - 1, random)
            lengths = np.diff(session)[chosen]
            places = np.repeat(session[chosen] - np.cumsum(lengths) + lengths, lengths) + places
        columns = [(lead.column(self.schema.columns[name].kind), None) for name in self._leading]
        begin_N = features.runs.begins(columns, count)
        starts = np.flatnonzero(begin_N[places])
        lengths = np.diff(starts, append=count)
        pieces = -(-lengths // self.batch_size)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        return places, begin_N, np.repeat(starts, pieces) + within * self.batch_size


def _mixed(count: int, random: np.random.Generator) -> Int64s:
    """Returns a permutation. Any stretch of it has about as many numbers from each of STRATA equal
    parts of them.
    """
    apiece = -(-count // STRATA)
    mixed = random.permuted(np.arange(STRATA * apiece).reshape(STRATA, apiece), axis=1).T.ravel()
    return mixed[mixed < count]


def _gathered(windows: Iterator[tuple[Rows, list[_Piece]]]) -> Iterator[Share]:
    """Yields the batches that begin in these windows."""
    held: list[Share] = []  # of one batch
    for rows, pieces in windows:
        for piece in pieces:
            if piece.begins and held:
                yield _joined(held)
                held = []
            batch = rows.batch(piece.places)
            if piece.numbers is not None:
                batch = replace(batch, row_B=torch.from_numpy(piece.numbers))
            held.append(Share(batch, piece.samples, piece.mass))
    if held:
        yield _joined(held)


def _joined(held: list[Share]) -> Share:
    batches = [share.batch for share in held if share.batch.batch_size] or [held[0].batch]
    return Share(
        joined(batches), sum(share.samples for share in held), sum(share.mass for share in held)
    )
