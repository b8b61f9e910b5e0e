"""A model folder -> scores of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from sparrow.core import Batch, Chunk
from sparrow.core.arrays import Float32s
from sparrow.core.errors import UserError
from sparrow.core.repeated import Repeated
from sparrow.embeddings import rows_on, stored_in
from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores import LeveledRows, MappedStore, MemoryStore, RowStore
from sparrow.features.schema import Schema
from sparrow.features.transforms import Transforms
from sparrow.kernels.encode import Rows
from sparrow.models import Offset
from sparrow.serving import products
from sparrow.serving.deltas import TABLES, Stack, opened
from sparrow.serving.folder import Folder
from sparrow.serving.requests import Catalogue, Encoder, Known
from sparrow.serving.rows import tensors_of
from sparrow.serving.ssd import OnSsd, Ssd, UnreadableError, put_on_ssd
from sparrow.serving.ssd.hot import FILE as HOT
from sparrow.serving.values import stacked
from sparrow.trained import calibrators
from sparrow.trained.build import scoring, tables_of, untrained
from sparrow.trained.calibrators import Calibrator
from sparrow.trained.run import Run

CHECK, DENSE = "check.parquet", "dense.safetensors"
CLOSE, CLOSE_ROUNDED = 1e-6, 2e-2  # how far scores may lie apart; where inputs of products are rounded
CLOSE_ON_AVERAGE = 2e-4  # where products are in few bits: a last bit of a sum moves few inputs to the next code
WORTH = 1 << 24  # multiply-adds that take as long as it takes to follow what is shared through a model
KINDS = 64  # of requests, by the columns of their users, of which it is known what they save
IDS, NUMBER, SCORE = ":ids:", ":number:", ":score:"  # before the names of what the columns of CHECK hold


class Crossed(NamedTuple):
    """Requests as one batch.

    counts: the candidates of each. columns: what their users have. known: what a catalogue had of the candidates.
    """

    batch: Batch
    counts: list[int]
    columns: tuple[str, ...]
    known: Known | None = None


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores requests with a model that was exported. Threads may share it, and compute at the same time.

    Args:
        stack: the model's folder, and the deltas above it.
        run: its settings.
        transforms: what its rows pass through.
        model: it, with the offset of its logits.
        calibrators: what scores pass through, for each label, if anything.
        threads: how many share the products of a request. It holds for all of torch in the process.
        ssd: which tables are read from an SSD, if any.
        on_ssd: these tables.
    """

    stack: Stack
    run: Run
    transforms: Transforms
    model: Any
    calibrators: tuple[Calibrator, ...] = ()
    threads: int = 1
    ssd: Ssd | None = None
    on_ssd: tuple[OnSsd, ...] = ()

    @property
    def folder(self) -> Folder:
        """The model's, or its last delta."""
        return self.stack.top

    @property
    def schema(self) -> Schema:
        """What the columns mean."""
        return self.transforms.schema

    @property
    def labels(self) -> tuple[str, ...]:
        """What is predicted, in the order of the scores' columns."""
        return self.schema.labels or ("score",)

    @property
    def name(self) -> str:
        """The model's name in a run file."""
        return str(self.folder.manifest["model"])

    @property
    def step(self) -> int:
        """The step of the training run after which it was exported."""
        return int(self.folder.manifest["step"])

    @property
    def is_rounded(self) -> bool:
        """Whether inputs of products are rounded."""
        return not self.run.precision.is_plain or products.FILE in self.folder.manifest["files"]

    @cached_property
    def encoder(self) -> Encoder:
        """Makes batches of requests."""
        return Encoder(self.transforms)

    def updated(self, delta: str | Path, *, checksums: bool = True) -> Scorer:
        """Returns a scorer with the rows, the dense weights and the transforms of a delta too.

        This one stays as it is, for those who still use it. Both share the rows of the full folder. A delta that it has
        already changes nothing.

        Args:
            delta: what `sparrow export --base` wrote with this model's folders.
            checksums: see `open_folder`.

        Raises:
            UserError: when it is no delta, is damaged, follows another model, or does not reproduce its scores.
        """
        stack = self.stack.updated(delta, checksums=checksums)
        return self if stack is self.stack else _made(stack, self.threads, self.ssd, self.on_ssd)

    def score(self, rows: Rows) -> Float32s:
        """Returns probabilities float32 [N, T] of raw rows, in order.

        Args:
            rows: a list of N dicts, or a dict of lists of N values, see `Encoder.batch`.

        Raises:
            UserError: for rows that cannot be encoded, and for scores that are not finite.
        """
        return self.scores(self.encoder.batch(rows)).numpy()

    def rank(self, user: Mapping[str, Any], candidates: Rows) -> Float32s:
        """Returns probabilities float32 [N, T] of a user's candidates, in order.

        The user's columns are encoded, looked up and pooled once, and so are products of them.

        Args:
            user: the columns that all candidates share.
            candidates: the other columns, as for `score`.

        Raises:
            UserError: as `score`, and for a column that both have.
        """
        return self.rank_all([(user, candidates)])[0]

    def rank_all(self, asked: Sequence[tuple[Mapping[str, Any], Rows]]) -> list[Float32s]:
        """Returns what `rank` does of several requests, whose rows make one batch. Their users have the same columns.

        Args:
            asked: user and candidates of each request.

        Raises:
            UserError: as `rank`, and when one user has a column that another lacks.
        """
        return self.ranked(self.crossed(asked))

    def crossed(self, asked: Sequence[tuple[Mapping[str, Any], Rows]], catalogue: Catalogue | None = None) -> Crossed:
        """Returns the batch of several requests, see `rank_all`.

        Args:
            asked: see `rank_all`.
            catalogue: has the columns that candidates with its key lack.

        Raises:
            UserError: for rows that cannot be encoded, and when one user has a column that another lacks.
        """
        users = [user for user, _ in asked]
        for number, user in enumerate(users):
            if odd := users[0].keys() ^ user.keys():
                raise UserError(f"request {number}: {min(odd)!r} is of one user and not of another; give it to all")
        rows, counts = stacked([candidates for _, candidates in asked])
        user_B, columns = np.repeat(np.arange(len(users)), counts), tuple(*users[:1])
        repeats = max(len(user_B) - len(users), 0)
        shared = repeats * self._saved.get(columns, math.inf) >= WORTH  # nothing is known of the first request
        known = None if catalogue is None else catalogue.known(rows, columns)
        parts = {} if known is None else known.parts
        batch = self.encoder.crossed(users, rows, user_B, shared=shared, known=parts)
        return Crossed(batch, counts, columns, known)

    def ranked(self, crossed: Crossed) -> list[Float32s]:
        """Returns probabilities float32 [N, T] of each request in a batch.

        Raises:
            UserError: as `scores`.
        """
        batch, counts, columns, _ = crossed
        scores_BT, repeats = self.scores(batch), max(sum(counts) - len(counts), 0)
        if isinstance(batch.dense_BC, Repeated) and repeats:
            if len(self._saved) >= KINDS:
                self._saved.clear()
            self._saved[columns] = batch.dense_BC.users.saved / repeats
        return np.split(scores_BT.numpy(), np.cumsum(counts)[:-1])

    @cached_property
    def _saved(self) -> dict[Any, float]:
        """Which columns were users' -> multiply-adds that a sample saved, but the first of its user."""
        return {}

    def scores(self, batch: Batch) -> Tensor:
        """Returns probabilities [B, T] of a batch.

        Raises:
            UserError: for bad ids and for scores that are not finite.
        """
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with torch.inference_mode():
            scores_BT: Tensor = self._score(batch)
            if not torch.isfinite(scores_BT).all():
                row = int((~torch.isfinite(scores_BT)).any(1).nonzero()[0])
                raise UserError(f"row {row}: its score is not finite; a number in it is far from those of training")
        return scores_BT

    @cached_property
    def _score(self) -> Any:
        return calibrators.calibrated(scoring(self.model, self.run, self.schema), self.calibrators)

    @cached_property
    def log_types(self) -> dict[str, pa.DataType]:
        """Column -> type, as in the log. Numbers are float64: a request may have 0.5 where the log had integers."""
        types, kinds = pq.read_schema(self.folder.path / CHECK), self.encoder.kinds
        return {n: pa.float64() if kinds.get(n) == "number" else types.field(n).type for n in self.encoder.sources}

    def kept(self) -> tuple[pa.Table, list[dict[str, Any]]]:
        """Returns the rows that are kept with the model: with their ids, numbers and scores, and raw, as a request."""
        kept = pq.ParquetFile(self.folder.path / CHECK).read()  # `read_table` would import pandas
        return kept, kept.select(list(self.encoder.sources)).to_pylist()

    def check(self) -> None:
        """Score the rows that were kept with the model, which also makes it ready for the first request.

        Raises:
            UserError: when ids, numbers or scores differ from those that were kept.
        """
        path, (kept, rows) = self.folder.path / CHECK, self.kept()
        batch = self.encoder.batch(rows)

        def differs(what: str, row: int, ours: Any, theirs: Any) -> UserError:
            told = f"row {row}: {what} is {ours} here and was {theirs} where it was exported"
            return UserError(f"{path}: {told}; this machine or its libraries compute otherwise: export the model here")

        for name in self.schema.sparse:
            theirs, ours = kept[IDS + name].combine_chunks(), batch.ids[name]
            for row, ids in enumerate(theirs.to_pylist()):
                mine = ours.values_N[ours.offsets_B1[row] : ours.offsets_B1[row + 1]].tolist()
                if mine != ids:
                    raise differs(f"the ids of {name!r}", row, mine, ids)
        for c, name in enumerate(self.schema.numbers):
            x_B, were_B = batch.dense_BC[:, c].numpy(), np.array(kept[NUMBER + name].to_pylist(), np.float32)
            for row in np.flatnonzero(np.abs(x_B - were_B) > np.spacing(np.abs(were_B)))[:1]:  # libraries' logarithms
                raise differs(f"the number of {name!r}", int(row), x_B[row], were_B[row])
        close = CLOSE_ROUNDED if self.is_rounded else CLOSE  # a last bit of a sum may move an input to the next code
        few_bits = products.FILE in self.folder.manifest["files"]
        for t, scores_B in enumerate(self.scores(batch).numpy().T):
            were_B = np.array(kept[SCORE + self.labels[t]].to_pylist(), np.float32)
            apart_B = np.abs(scores_B - were_B)
            is_far = few_bits and not apart_B.mean() <= CLOSE_ON_AVERAGE
            for row in np.flatnonzero(~(apart_B <= close))[:1] if not is_far else [apart_B.argmax()]:
                raise differs(f"the score of {self.labels[t]!r}", int(row), scores_B[row], were_B[row])


def load(
    path: str | Path,
    deltas: Sequence[str | Path] = (),
    *,
    threads: int = 1,
    checksums: bool = True,
    ssd: Ssd | None = None,
) -> Scorer:
    """Returns the scorer of a model folder, after it has reproduced the scores that are kept there.

    Nothing from the folder is executed. Tables are mapped: processes share their memory.

    Args:
        path: what `sparrow export` wrote.
        deltas: what `sparrow export --base` wrote, in order; see `Scorer.updated`.
        threads: see `Scorer`.
        checksums: see `open_folder`.
        ssd: which tables are read from an SSD, where they are not mapped; by default none.

    Raises:
        UserError: when it is no model folder, is damaged, or does not reproduce its scores.
    """
    return _made(opened(path, deltas, checksums=checksums), threads, ssd)


def _made(stack: Stack, threads: int, ssd: Ssd | None, before: tuple[OnSsd, ...] = ()) -> Scorer:
    path = stack.top.path
    torch.set_num_threads(threads)
    run = Run.load(path / "run.toml", {"run_dir": str(path), "data.path": "none"})
    transforms = Transforms.load(path)
    try:
        model = assembled(
            run,
            transforms.schema,
            lambda component: stack.rows[table_file(component.name)],
            weights(stack.top, DENSE),
            weights(stack.top, products.FILE),
        )
    except UserError as error:
        raise UserError(f"{path / DENSE}: {error}") from None

    def rows(component: Component) -> tuple[str, LeveledRows]:
        name = table_file(component.name)
        return stack.folders[0].manifest["files"][name]["sha256"], stack.rows[name]

    hot = weights(stack.top, HOT)
    try:
        on_ssd = () if ssd is None else put_on_ssd(list(tables_of(model)), rows, ssd, hot, before)
    except UnreadableError as error:
        raise UserError(str(error)) from None
    scorer = Scorer(
        stack=stack,
        run=run,
        transforms=transforms,
        model=model,
        calibrators=calibrators.load(path) if calibrators.FILE in stack.top.manifest["files"] else (),
        threads=threads,
        ssd=ssd,
        on_ssd=on_ssd,
    )
    try:
        scorer.check()
    except UnreadableError as error:
        raise UserError(str(error)) from None
    return scorer


def assembled(
    run: Run,
    schema: Schema,
    rows: Callable[[Component], LeveledRows],
    dense: Mapping[str, Tensor],
    few_bits: Mapping[str, Tensor],
) -> Any:
    """Returns a model that scores and does not learn.

    Args:
        run: its settings.
        schema: of its log.
        rows: gives those of a component, which stay where they are, but for those whose ids come and go.
        dense: its dense weights.
        few_bits: products in other formats than fp32, see `products.put`.

    Raises:
        UserError: when weights are not those of this model.
    """

    def stored(component: Component, count: int, dim: int) -> RowStore:
        if component.policy:  # an index of its ids is made of the rows, which are loaded below
            return MemoryStore(component, count, dim)
        return MappedStore(component, rows(component))

    with rows_on("cpu"), stored_in(stored):
        model = Offset(untrained(run, schema), schema)
    products.put(model, few_bits, dense)
    for tables in tables_of(model):
        tables.mode = "off"
        for record in tables.all_records():
            if record.component.policy:
                never_R = torch.zeros(record.rows, dtype=torch.uint8)
                name, at, columns = record.place
                held = rows(record.component)
                fields = {of: held.read(of, slice(None)) for of in held.fields} | {"touched": never_R}
                tables.load_chunk(Chunk(table=name, rows=at, columns=columns, fields=fields))
    return model.eval().requires_grad_(False)


def weights(folder: Folder, name: str) -> dict[str, Tensor]:
    """Returns the tensors of one of a folder's files, mapped; none when the folder has no such file."""
    return tensors_of(folder.path / name) if name in folder.manifest["files"] else {}


def table_file(component: str) -> str:
    """Returns the path, in a model folder, of a component's rows."""
    return f"{TABLES}{quote(component, safe='')}.safetensors"
