"""A synthetic click log whose click probabilities are known, so that a model's logloss can be read
against the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from sparrow.apps.generate.settings import Settings
from sparrow.apps.generate.truth import EXACT_ROWS, Truth
from sparrow.core import Progress, UserError
from sparrow.core.arrays import Floats, Ints
from sparrow.core.files import refuse_existing, replace_file, to_json, write_text
from sparrow.core.keywords import keywords

_BLOCK_ROWS = 50_000
_PILOT_ROWS = 50_000
_SORTED = 1 << 20  # sessions whose times are in memory to sort them
_START_MS = 1_704_067_200_000  # 2024-01-01
_DAY_MS = 86_400_000
_SHARES_OF_TRUTH = {"all": 1.0, "last_20": 0.2, "last_10": 0.1}
_LATENT = 4
_TAGS, _TAGS_PER_ITEM = 53, 5  # a prime: steps through it repeat no tag
_CANDIDATES = 4  # a history's item is the user's favourite of so many
_FADE = 1.2  # with drift 1 popularity correlates exp(-_FADE^2 / 2) = 0.49 between the log's ends
_SPREAD = 1.65  # standard deviation of the logit: the AUC of the truth is then 0.80 to 0.85
_SHARES = {
    "taste": 0.15,
    "quality": 0.2,
    "history": 0.15,
    "context": 0.25,
    "numeric": 0.2,
    "pair": 0.05,
}


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A written log, and what `sparrow.metrics.evaluate` says of the true probabilities on the
    labels drawn from them.

    limit: for the whole log; no model can hope to beat it. truth: for "all" rows and for the
    "last_20" and "last_10" per cent in time (cut as `prepare` cuts); it is also in OUT.truth.json.
    """

    out: Path
    rows: int
    sessions: int
    limit: dict[str, float]
    truth: dict[str, dict[str, float]]
    notes: tuple[str, ...] = ()


@keywords(Settings)
def generate(
    out: str | Path,
    *,
    with_truth: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Generated:
    """Writes a click log, .parquet, .csv or .tsv, whose clicks are drawn from known probabilities.

    Columns: session, ts (ms, one per session), user, item, history (items that the user likes),
    tags (of the item), cat_* (text; every other one has missing values), num_* (counts with missing
    values, and normals), label; and, with_truth, true_p: the probability that the label was drawn
    with. OUT.truth.json beside it says what the truth scores. CSV and TSV have no lists: history
    and tags are left out, and clicks do not depend on them. The same arguments give the same log.
    Memory does not grow with the rows. Of more than 1,048,576 rows the AUC of the truth comes from
    bins, see `Streaming`.

    Args:
        out: the file. Its suffix says the format.
        with_truth: whether the log has the column true_p.
        overwrite: whether to replace `out`.
        progress: see `Progress`.
        **settings: see `Settings`.

    Returns:
        The log that was written, and what the true probabilities score.

    Raises:
        UserError: for a number out of range, for another suffix, and for an `out` that exists,
            unless `overwrite`.
    """
    config = Settings(**settings)
    out = Path(out)
    _check_out(out, overwrite)
    lists = out.suffix == ".parquet"
    world = _World(config, lists=lists)
    truth_file = out.with_name(f"{out.name}.truth.json")
    log = _Log(world, with_truth=with_truth)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(out) as partial:
        _write(partial, out.suffix, log.tables(progress or (lambda *_: None)))
        truth = log.truth()
        truth_file.unlink(missing_ok=True)  # never a log beside another one's truth
    if with_truth:
        write_text(truth_file, to_json(truth | {"config": asdict(config)}, indent=1) + "\n")
    notes = () if lists else (f"{out.suffix} has no lists: history and tags are left out",)
    return Generated(
        out=out,
        rows=config.rows,
        sessions=log.sessions,
        limit=truth["all"],
        truth=truth,
        notes=notes,
    )


class _Streams:
    """One random stream per column, read in order, so that the draws do not depend on how rows are
    cut in blocks.

    That holds for uniform and standard normal numbers, which use up a stream value by value.
    """

    def __init__(self, seed: int, part: str) -> None:
        self._seed = seed % (1 << 64)
        self._part = part  # numpy takes no negative seed
        self._open: dict[str, np.random.Generator] = {}

    def _stream(self, name: str) -> np.random.Generator:
        key = [self._seed, *f"{self._part}/{name}".encode()]
        return self._open.setdefault(name, np.random.default_rng(key))

    def uniform(self, name: str, *shape: int) -> Floats:
        """In [0, 1)."""
        return self._stream(name).random(shape)

    def normal(self, name: str, *shape: int) -> Floats:
        """Standard normal, float32."""
        return self._stream(name).standard_normal(shape).astype(np.float32)


class _Zipf:
    """Ranks 0..size - 1 with probability proportional to (rank + 1)^-exponent."""

    def __init__(self, size: int, exponent: float) -> None:
        self._cdf = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
        self._cdf /= self._cdf[-1]

    def ranks(self, uniform: Floats) -> Ints:
        """Int64, of the shape of numbers in [0, 1)."""
        return np.searchsorted(self._cdf, uniform, side="right")


class _Waves:
    """A value per item that wanders in time: Gaussian with variance 1, and correlation exp(-(drift
    _FADE dt)^2 / 2).
    """

    def __init__(self, random: _Streams, name: str, items: int, drift: float) -> None:
        self._cos_R, self._sin_R, self._speed_R = random.normal(name, 3, items)
        self._speed_R *= np.float32(_FADE * drift)

    def at(self, time: Floats | float, item: Ints | slice) -> Floats:
        """Float32; time: share of the log that has passed, like item or one number."""
        angle = self._speed_R[item] * np.asarray(time, np.float32)
        return self._cos_R[item] * np.cos(angle) + self._sin_R[item] * np.sin(angle)


@dataclass(frozen=True)
class _Sessions:
    """Some sessions in order of time: rows of each, their time as a share of the log, and their
    user.

    first, row: how many sessions and rows of the log came before.
    """

    first: int
    row: int
    rows_S: Ints
    time_S: Floats
    user_S: Ints


@dataclass(frozen=True)
class _Block:
    """Rows of some sessions, and the terms of their logits."""

    session_B: Ints
    user_B: Ints
    item_B: Ints
    liked_SH: Ints
    liked_lengths_S: Ints
    categories: list[Ints]  # the last one of a vocabulary stands for missing
    numbers: list[Floats]  # NaN where missing
    terms: dict[str, Floats]


class _World:
    """Users, items and the law of clicks."""

    def __init__(self, config: Settings, *, lists: bool) -> None:
        self.config = config
        self.lists = lists
        random = _Streams(config.seed, "world")
        self._users = _Zipf(config.users, config.zipf)
        self._items = _Zipf(config.items, config.zipf)
        self._user_of_rank = np.argsort(random.uniform("user order", config.users))
        step = random.uniform("tag step", config.items)
        first = random.uniform("tag first", config.items)
        steps = (
            np.arange(_TAGS_PER_ITEM) * (1 + step * (_TAGS - 1)).astype(np.int64)[:, None]
        ).astype(np.int64)
        self.tags_RT = ((first * _TAGS).astype(np.int64)[:, None] + steps) % _TAGS
        self.tag_counts_R = (
            random.uniform("tag count", config.items) * (_TAGS_PER_ITEM + 1)
        ).astype(np.int64)
        self._taste = random.normal("taste", config.users, _LATENT)
        tagged = _masked_mean(random.normal("tag", _TAGS, _LATENT)[self.tags_RT], self.tag_counts_R)
        self._latent = random.normal("item", config.items, _LATENT) + tagged
        self._heat = _Waves(random, "heat", config.items, config.drift)
        self._quality = _Waves(random, "quality", config.items, config.drift)
        self.vocabularies = np.geomspace(3, 10_000, config.categorical).round().astype(np.int64)
        self._choices = [_Zipf(size, config.zipf) for size in self.vocabularies]
        self._effects = [
            random.normal(f"cat {i}", size + 1) for i, size in enumerate(self.vocabularies)
        ]
        self._pair = (
            random.normal("pair", *(self.vocabularies[:2] + 1)) if config.categorical > 1 else None
        )
        self._bends = random.uniform("bends", config.numeric, 2) * [0.8, 2 * math.pi] + [0.8, 0.0]

    def sessions(self, part: str, rows: int, block_rows: int) -> Iterator[_Sessions]:
        """As many as hold `rows` rows, those of about `block_rows` at a time: at random times,
        users by Zipf's law.

        part: what they are drawn for.
        """
        count = sum(len(rows_S) for rows_S in self._lengths(part, rows, block_rows))
        random = _Streams(self.config.seed, part)
        times = self._times(part, count)
        held_S = np.zeros(0)
        first = row = 0
        for rows_S in self._lengths(part, rows, block_rows):
            while len(held_S) < len(rows_S):
                held_S = np.concatenate([held_S, next(times)])
            time_S, held_S = np.split(held_S, [len(rows_S)])
            user_S = self._user_of_rank[self._users.ranks(random.uniform("user", len(rows_S)))]
            yield _Sessions(first, row, rows_S, time_S, user_S)
            first = first + len(rows_S)
            row = row + int(rows_S.sum())

    def _lengths(self, part: str, rows: int, block_rows: int) -> Iterator[Ints]:
        """Rows of each session, geometric; a block ends with the session that reaches a multiple of
        `block_rows`.
        """
        random = _Streams(self.config.seed, part)
        held_S = np.zeros(0, np.int64)
        row = 0
        with np.errstate(divide="ignore"):
            # -inf when every session has one row
            stop = np.log1p(-1 / np.float64(self.config.session_rows))
        while row < rows:
            drawn_S = (
                np.ceil(np.log1p(-random.uniform("length", block_rows)) / stop)
                .clip(1, rows)
                .astype(np.int64)
            )
            rows_S = np.concatenate([held_S, drawn_S])
            ends_S = row + rows_S.cumsum()
            # more than there are where the log goes on
            count = int(np.searchsorted(ends_S, rows)) + 1
            is_last = count <= len(ends_S)
            if is_last:
                rows_S = rows_S[:count]
                ends_S = ends_S[:count]
                rows_S[-1] -= ends_S[-1] - rows
                ends_S[-1] = rows
            *blocks, held_S = np.split(
                rows_S, np.flatnonzero(np.diff((ends_S - 1) // block_rows)) + 1
            )
            yield from [*blocks, held_S] if is_last else blocks
            row = rows if is_last else int(ends_S[-1] - held_S.sum())

    def _times(self, part: str, count: int) -> Iterator[Floats]:
        """Uniform numbers in order of size, as many as `count`, some at a time: all are drawn again
        for each range.
        """
        ranges = -(-count // _SORTED)
        for i in range(ranges):
            random = _Streams(self.config.seed, part)
            times = []
            for start in range(0, count, _SORTED):
                time_S = random.uniform("time", min(_SORTED, count - start))
                times.append(time_S[(time_S >= i / ranges) & (time_S < (i + 1) / ranges)])
            yield np.sort(np.concatenate(times))

    def block(self, random: _Streams, sessions: _Sessions) -> _Block:
        """Draw the rows of some sessions."""
        config = self.config
        time_S = sessions.time_S
        user_S = sessions.user_S
        local_B = np.repeat(np.arange(len(time_S)), sessions.rows_S)
        user_B = user_S[local_B]
        time_B = time_S[local_B]
        size = len(local_B)
        item_B = self._items_at(self._items.ranks(random.uniform("item", size)), time_B)
        liked_SH, liked_lengths_S = self._draw_liked(random, user_S, time_S)
        categories = [
            zipf.ranks(random.uniform(f"cat {i}", size)) for i, zipf in enumerate(self._choices)
        ]
        for i in range(1, config.categorical, 2):
            categories[i][random.uniform(f"cat missing {i}", size) < config.missing] = (
                self.vocabularies[i]
            )
        numbers = [random.normal(f"num {i}", size) for i in range(config.numeric)]
        for i in range(0, config.numeric, 2):
            numbers[i] = np.floor(np.exp(2 * numbers[i] + 1))
            numbers[i][random.uniform(f"num missing {i}", size) < config.missing] = np.nan
        item_BK = self._latent[item_B]
        zeros = np.zeros(size, np.float32)
        liked_SK = _masked_mean(self._latent[liked_SH], liked_lengths_S)
        terms = {
            "taste": (self._taste[user_B] * item_BK).sum(1),
            "quality": self._quality.at(time_B, item_B),
            "history": (liked_SK[local_B] * item_BK).sum(1),
            "context": sum(
                (effect[c] for effect, c in zip(self._effects, categories, strict=True)), zeros
            ),
            "numeric": sum((self._bend(i, x) for i, x in enumerate(numbers)), zeros),
            "pair": zeros if self._pair is None else self._pair[categories[0], categories[1]],
        }
        return _Block(
            sessions.first + local_B,
            user_B,
            item_B,
            liked_SH,
            liked_lengths_S,
            categories,
            numbers,
            terms,
        )

    def _items_at(self, ranks: Ints, time: Floats) -> Ints:
        """The items of these popularity ranks at these times; the order of popularity changes
        daily.
        """
        day = (time * self.config.days).astype(np.int64)
        items = np.empty_like(ranks)
        for number in np.unique(day):
            order_R = np.argsort(
                -self._heat.at(number / self.config.days, slice(None)), kind="stable"
            )
            items[day == number] = order_R[ranks[day == number]]
        return items

    def _draw_liked(self, random: _Streams, user_S: Ints, time_S: Floats) -> tuple[Ints, Ints]:
        """Items that each session's user liked, int64 [S, H], and how many of them there are."""
        count = len(user_S)
        longest = self.config.history if self.lists else 0
        ranks = self._items.ranks(random.uniform("liked", count, longest, _CANDIDATES))
        offered_SHC = self._items_at(ranks, np.broadcast_to(time_S[:, None, None], ranks.shape))
        fit_SHC = (self._latent[offered_SHC] * self._taste[user_S, None, None]).sum(-1)
        liked_SH = np.take_along_axis(offered_SHC, fit_SHC.argmax(-1)[..., None], -1)[..., 0]
        return liked_SH, (random.uniform("liked count", count) ** 2 * (longest + 1)).astype(
            np.int64
        )

    def _bend(self, i: int, x: Floats) -> Floats:
        speed, shift = self._bends[i].astype(np.float32)
        return np.nan_to_num(np.sin(speed * (np.log1p(x) / 2 if i % 2 == 0 else x) + shift))


class _Law:
    """Turns the terms of a logit into a click probability; fitted on a pilot that is not part of
    the log.
    """

    def __init__(self, world: _World) -> None:
        config = world.config
        random = _Streams(world.config.seed, "pilot")
        (sessions,) = world.sessions("pilot", _PILOT_ROWS, _PILOT_ROWS)
        terms = world.block(random, sessions).terms
        self._scales = {name: (float(x.mean()), float(x.std()) or 1.0) for name, x in terms.items()}
        self._spread = 1.0
        self._bias = 0.0
        self._spread = _SPREAD / (float(self._logits(terms).std()) or 1.0)
        low = -50.0
        high = 50.0
        for _ in range(60):
            self._bias = (low + high) / 2
            low, high = (
                (self._bias, high) if self(terms).mean() < config.click_rate else (low, self._bias)
            )

    def _logits(self, terms: dict[str, Floats]) -> Floats:
        logits = np.zeros(len(terms["taste"]))
        for name, x in terms.items():
            mean, deviation = self._scales[name]
            logits += math.sqrt(_SHARES[name]) / deviation * (x - mean)
        return self._bias + self._spread * logits

    def __call__(self, terms: dict[str, Floats]) -> Floats:
        """Click probabilities, float32 [B]."""
        return (1 / (1 + np.exp(-self._logits(terms)))).astype(np.float32)


class _Log:
    """A world's log as a stream of Arrow tables, and the truth about it."""

    def __init__(self, world: _World, *, with_truth: bool) -> None:
        self._world = world
        self._with_truth = with_truth
        self._random = _Streams(world.config.seed, "log")
        self._law = _Law(world)
        exact = world.config.rows <= EXACT_ROWS
        self._truth = {
            part: Truth(first, exact=exact) for part, first in self._first_rows().items()
        }
        self.sessions = 0  # of the tables so far

    def _sessions(self) -> Iterator[_Sessions]:
        return self._world.sessions("log", self._world.config.rows, _BLOCK_ROWS)

    def _ts(self, sessions: _Sessions) -> Ints:
        """The time of each session, ms since 1970."""
        return _START_MS + (sessions.time_S * (self._world.config.days * _DAY_MS)).astype(np.int64)

    def _first_rows(self) -> dict[str, int]:
        """The first row of each part of the truth. Rows of one time stay together."""
        rows = self._world.config.rows
        last_ts = -1
        begin = 0
        places = {
            part: min(round(rows * (1 - share)), rows - 1)
            for part, share in _SHARES_OF_TRUTH.items()
        }
        first_rows = {}
        for sessions in self._sessions():
            ts_S = self._ts(sessions)
            row_S = sessions.row + sessions.rows_S.cumsum() - sessions.rows_S
            begin_S = np.maximum.accumulate(
                np.where(np.diff(ts_S, prepend=last_ts) > 0, row_S, begin)
            )
            for part, place in places.items():
                if sessions.row <= place < sessions.row + sessions.rows_S.sum():
                    first_rows[part] = int(begin_S[np.searchsorted(row_S, place, side="right") - 1])
            last_ts = int(ts_S[-1])
            begin = int(begin_S[-1])
        return {part: first_rows[part] for part in places}

    def tables(self, progress: Progress) -> Iterator[pa.Table]:
        """The rows in order of time, some ten thousand at a time; can be read once."""
        rows = self._world.config.rows
        for sessions in self._sessions():
            block = self._world.block(self._random, sessions)
            p_B = self._law(block.terms)
            label_B = (self._random.uniform("label", len(p_B)) < p_B).astype(np.int8)
            for truth in self._truth.values():
                truth.add(sessions.row, p_B, label_B, block.session_B)
            self.sessions += len(sessions.rows_S)
            yield self._table(block, sessions, p_B, label_B)
            progress("generated", sessions.row + len(p_B), rows)

    def truth(self) -> dict[str, dict[str, float]]:
        """What the true probabilities score on all rows and on the last in time, once the tables
        have been read.
        """
        return {part: truth.result() for part, truth in self._truth.items()}

    def _table(self, block: _Block, sessions: _Sessions, p_B: Floats, label_B: Ints) -> pa.Table:
        world = self._world
        local_B = block.session_B - sessions.first
        columns: dict[str, Any] = {"session": block.session_B, "ts": self._ts(sessions)[local_B]}
        columns |= {"user": block.user_B, "item": block.item_B}
        if world.lists and world.config.history:
            columns["history"] = _lists(block.liked_SH, block.liked_lengths_S, local_B, None)
        if world.lists:
            columns["tags"] = _lists(
                world.tags_RT, world.tag_counts_R, block.item_B, _names("tag", _TAGS)
            )
        for i, (category_B, size) in enumerate(
            zip(block.categories, world.vocabularies, strict=True)
        ):
            columns[f"cat_{i}"] = _name_values(category_B, _names(f"c{i}", size))
        for i, x_B in enumerate(block.numbers):
            counts_B = (
                pa.array(np.nan_to_num(x_B).astype(np.int64), mask=np.isnan(x_B))
                if i % 2 == 0
                else x_B
            )
            columns[f"num_{i}"] = counts_B
        columns["label"] = label_B
        if self._with_truth:
            columns["true_p"] = p_B
        return pa.table(columns)


def _masked_mean(vectors_SHK: Floats, lengths_S: Ints) -> Floats:
    """Mean [S, K] over each row's first `lengths_S`; zeros where that is none."""
    mask_SH = np.arange(vectors_SHK.shape[1]) < lengths_S[:, None]
    return (vectors_SHK * mask_SH[..., None]).sum(1) / np.maximum(lengths_S, 1).astype(np.float32)[
        :, None
    ]


def _lists(values_RH: Ints, lengths_R: Ints, index_B: Ints, names: pa.Array | None) -> pa.Array:
    """For each row of index_B the first lengths_R of that row of values_RH, or their names."""
    mask_BH = np.arange(values_RH.shape[1]) < lengths_R[index_B, None]
    offsets_B1 = np.concatenate([[0], lengths_R[index_B].cumsum()]).astype(np.int32)
    values_N = values_RH[index_B][mask_BH]
    return pa.ListArray.from_arrays(
        offsets_B1, values_N if names is None else _name_values(values_N, names)
    )


def _names(prefix: str, size: int) -> pa.Array:
    return pa.array([f"{prefix}_{i}" for i in range(size)])


def _name_values(index_N: Ints, names: pa.Array) -> pa.Array:
    """Text per index; the index after the last name is a missing value."""
    indices = pa.array(index_N.astype(np.int32), mask=index_N == len(names))
    return pa.DictionaryArray.from_arrays(indices, names).cast(pa.string())


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix not in (".parquet", ".csv", ".tsv"):
        raise UserError(f"{out}: no known suffix; end the name in .parquet, .csv or .tsv")
    if out.is_dir():
        raise UserError(f"{out}: a folder; choose another name")
    refuse_existing(out, overwrite)


def _write(file: Path, suffix: str, tables: Iterable[pa.Table]) -> None:
    writer: Any = None
    try:
        for table in tables:
            if writer is None and suffix == ".parquet":
                writer = pq.ParquetWriter(file, table.schema)
            elif writer is None:
                style = pacsv.WriteOptions(
                    delimiter="\t" if suffix == ".tsv" else ",", quoting_style="none"
                )
                writer = pacsv.CSVWriter(file, table.schema, write_options=style)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
