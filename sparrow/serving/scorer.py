"""A model folder -> scores of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol
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
from sparrow.embeddings import EmbeddingTables, Placement
from sparrow.embeddings.spec import OF_IDS, Component
from sparrow.embeddings.stores import MemoryStore, RowStore
from sparrow.embeddings.stores.mapped import LeveledRows, MappedStore
from sparrow.features.rows import raw_batches
from sparrow.features.schema import Schema
from sparrow.features.transforms import Transforms
from sparrow.layers.precision import mixing
from sparrow.models import Offset
from sparrow.serving import products
from sparrow.serving.deltas import TABLES, Stack, open_stack
from sparrow.serving.folder import REMEDY, Checked, Folder, fact_of, reading
from sparrow.serving.frames import TAKES, is_frame, pairs_of, stack_requests, user_of
from sparrow.serving.hot_rows import FILE as HOT
from sparrow.serving.requests import Catalogue, Encoder, Known
from sparrow.serving.rows import UnreadableError, tensors_of
from sparrow.serving.values import python_rows
from sparrow.trained import calibrator_files, calibrators
from sparrow.trained.build import scoring, tables_of, untrained
from sparrow.trained.calibrators import Calibrator
from sparrow.trained.run import Run

CHECK = "check.parquet"
DENSE = "dense.safetensors"
# how far scores may lie apart; where inputs of products are rounded
CLOSE = 1e-6
CLOSE_ROUNDED = 2e-2
# where products are in few bits: a last bit of a sum moves few inputs to the next code
CLOSE_ON_AVERAGE = 2e-4
BLOCK = 8192  # rows of a frame that are scored at a time
# multiply-adds that take as long as it takes to follow what is shared through a model
WORTH = 1 << 24
KINDS = 64  # of requests, by the columns of their users, of which it is known what they save
# before the names of what the columns of CHECK hold
IDS = ":ids:"
NUMBER = ":number:"
SCORE = ":score:"


class Crossed(NamedTuple):
    """Requests as one batch.

    counts: the candidates of each. columns: what their users have. known: what a catalogue had of
    the candidates.
    """

    batch: Batch
    counts: list[int]
    columns: tuple[str, ...]
    known: Known | None = None


class Elsewhere(Protocol):
    """Reads rows of some tables from where a model folder does not have them, such as an SSD."""

    def put(
        self,
        tables: Sequence[EmbeddingTables],
        rows: Callable[[Component], tuple[str, LeveledRows]],
        hot: Mapping[str, Tensor],
        before: Sequence[Any],
    ) -> tuple[Any, ...]:
        """Have lookups of some tables read there. Returns what does so, each with the `names` of
        its tables.

        Args:
            tables: all of a model.
            rows: component -> a name that no other rows have, and its rows.
            hot: component -> its rows that are used most, which caches begin with.
            before: what did so in the model before, for rows that it has.
        """


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores requests with a model that was exported. Threads may share it, and compute at the same
    time.

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
    ssd: Elsewhere | None = None
    on_ssd: tuple[Any, ...] = ()

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

    def updated(self, delta: str | Path, *, checked: Mapping[str, Checked] | None = None) -> Scorer:
        """Returns a scorer with the rows, the dense weights and the transforms of a delta too.

        This one stays as it is, for those who still use it. Both share the rows of the full folder.
        A delta that it has already changes nothing.

        Args:
            delta: what `sparrow export --base` wrote with this model's folders.
            checked: see `open_folder`.

        Raises:
            UserError: when it is no delta, is damaged, follows another model, or does not reproduce
                its scores.
        """
        stack = self.stack.updated(delta, checked=checked)
        return self if stack is self.stack else _build(stack, self.threads, self.ssd, self.on_ssd)

    def score(self, rows: Any) -> Float32s:
        """Returns probabilities float32 [N, T] of raw rows, in order.

        Args:
            rows: a list of N mappings; or a mapping of columns, which are lists or arrays of N
                values; or a data frame of N rows, of pandas, polars, arrow or what else arrow can
                read. A frame is a log: if the model was trained on rows with lists of candidates,
                such rows have a score for each candidate.

        Raises:
            UserError: for rows that cannot be encoded, and for scores that are not finite.
        """
        if not is_frame(rows):
            return self.scores(self.encoder.batch(rows)).numpy()
        frames: Any = import_module("sparrow.data.logs.frames")  # only who has a frame waits for it
        table = frames.shape_rows_like(frames.as_table(rows, TAKES), self.schema)
        scores = [torch.empty(0, len(self.labels))]
        for number, batch in enumerate(raw_batches(self.transforms, table, BLOCK)):
            scores.append(self.scores(batch, number * BLOCK))
        return torch.cat(scores).numpy()

    def rank(self, user: Any, candidates: Any) -> Float32s:
        """Returns probabilities float32 [N, T] of a user's candidates, in order.

        The user's columns are encoded, looked up and pooled once, and so are products of them.

        Args:
            user: the columns that all candidates share: a mapping, or a data frame of one row.
            candidates: the other columns, as for `score`, with a row for each candidate.

        Raises:
            UserError: as `score`, and for a column that both have.
        """
        return self.rank_all([(user, candidates)])[0]

    @cached_property
    def mixing(self) -> str:
        """Why a row's score depends on the rows that it is scored with, in words; "" if it does
        not.

        If it does, requests are not to be scored together. Else a request has other scores beside
        others than alone.
        """
        return mixing(self.model, self.run.precision)

    def rank_all(self, requests: Sequence[tuple[Any, Any]]) -> list[Float32s]:
        """Returns probabilities float32 [N, T] of the candidates of each request. Their users have
        the same columns.

        Their rows make one batch, unless scores would depend on that, see `mixing`.

        Args:
            requests: user and candidates of each request, as for `rank`. Of none there is nothing.

        Raises:
            UserError: as `rank`, and when one user has a column that another lacks.
        """
        requests = pairs_of(requests)
        if self.mixing:
            return [self.ranked(self.crossed([request]))[0] for request in requests]
        return self.ranked(self.crossed(requests)) if requests else []

    def crossed(
        self, requests: Sequence[tuple[Any, Any]], catalogue: Catalogue | None = None
    ) -> Crossed:
        """Returns the batch of several requests, see `rank_all`.

        Args:
            requests: see `rank_all`.
            catalogue: has the columns that candidates with its key lack.

        Raises:
            UserError: for rows that cannot be encoded, and when one user has a column that another
                lacks.
        """
        read = self.encoder.read
        users = [user_of(user, number, read) for number, (user, _) in enumerate(requests)]
        for number, user in enumerate(users):
            if odd := users[0].keys() ^ user.keys():
                raise UserError(
                    f"request {number}: {min(odd)!r} is of one user and not of another; give it"
                    " to all"
                )
        rows, counts = stack_requests([candidates for _, candidates in requests], read)
        user_B = np.repeat(np.arange(len(users)), counts)
        columns = tuple(*users[:1])
        repeats = max(len(user_B) - len(users), 0)
        # nothing is known of the first request
        shared = repeats * self._saved.get(columns, math.inf) >= WORTH
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
        scores_BT = self.scores(batch)
        repeats = max(sum(counts) - len(counts), 0)
        if isinstance(batch.dense_BC, Repeated) and repeats:
            if len(self._saved) >= KINDS:
                self._saved.clear()
            self._saved[columns] = batch.dense_BC.users.saved / repeats
        return np.split(scores_BT.numpy(), np.cumsum(counts)[:-1])

    @cached_property
    def _saved(self) -> dict[Any, float]:
        """Which columns were users' -> multiply-adds that a sample saved, but the first of its
        user.
        """
        return {}

    def scores(self, batch: Batch, row0: int = 0) -> Tensor:
        """Returns probabilities [B, T] of a batch. row0: the number of its first row, for errors.

        Raises:
            UserError: for bad ids and for scores that are not finite.
        """
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with torch.inference_mode():
            scores_BT: Tensor = self._score(batch)
            if not torch.isfinite(scores_BT).all():
                row = int((~torch.isfinite(scores_BT)).any(1).nonzero()[0])
                raise UserError(
                    f"row {row0 + row}: its score is not finite; a number in it is far from those"
                    " of training"
                )
        return scores_BT

    @cached_property
    def _score(self) -> Any:
        return calibrators.calibrated(scoring(self.model, self.run, self.schema), self.calibrators)

    @cached_property
    def raw_types(self) -> pa.Schema:
        """The types that the log's columns have."""
        return pq.read_schema(self.folder.path / CHECK)

    @cached_property
    def log_types(self) -> dict[str, pa.DataType]:
        """Column -> type, as in the log. Numbers are float64: a request may have 0.5 where the log
        had integers.
        """
        types = self.raw_types
        kinds = self.encoder.kinds
        return {
            n: pa.float64() if kinds.get(n) == "number" else types.field(n).type
            for n in self.encoder.sources
        }

    def golden_rows(self) -> tuple[pa.Table, list[dict[str, Any]]]:
        """Returns the golden rows of the model: with their ids, numbers and scores, and raw, as a
        request.
        """
        path = self.folder.path / CHECK
        with reading(path):
            table = pq.ParquetFile(path).read()  # `read_table` would import pandas
            ids = [(IDS + name, pa.large_list(pa.int64())) for name in self.schema.sparse]
            numbers = [(NUMBER + name, pa.float32()) for name in self.schema.numbers]
            scores = [(SCORE + label, pa.float32()) for label in self.labels]
            expected = pa.schema([*ids, *numbers, *scores])
            if table.select(expected.names).schema.types != expected.types or not table.num_rows:
                raise ValueError("without the ids, numbers or scores of any row")
            return table, python_rows(table.select(list(self.encoder.sources)))

    def check(self) -> None:
        """Score the golden rows, which also makes the model ready for the first request.

        Raises:
            UserError: when ids, numbers or scores differ from those in the folder.
        """
        path, (golden, rows) = self.folder.path / CHECK, self.golden_rows()
        with reading(self.folder.path):
            try:
                batch = self.encoder.batch(rows)
                scores_BT = self.scores(batch).numpy()
            except UnreadableError:
                raise
            except UserError as error:
                raise UserError(
                    f"{path}: its rows cannot be scored ({fact_of(error)}); {REMEDY}"
                ) from None

        def differs(part: str, row: int, now: Any, before: Any) -> UserError:
            fact = f"row {row}: {part} is {now} here and was {before} where it was exported"
            return UserError(
                f"{path}: {fact}; this machine or its libraries compute otherwise: export the model"
                " here"
            )

        for name in self.schema.sparse:
            exported = golden[IDS + name].combine_chunks()
            encoded = batch.ids[name]
            for row, ids in enumerate(exported.to_pylist()):
                row_ids = encoded.values_N[
                    encoded.offsets_B1[row] : encoded.offsets_B1[row + 1]
                ].tolist()
                if row_ids != ids:
                    raise differs(f"the ids of {name!r}", row, row_ids, ids)
        for c, name in enumerate(self.schema.numbers):
            x_B = batch.dense_BC[:, c].numpy()
            were_B = np.array(golden[NUMBER + name].to_pylist(), np.float32)
            # libraries' logarithms
            for row in np.flatnonzero(np.abs(x_B - were_B) > np.spacing(np.abs(were_B)))[:1]:
                raise differs(f"the number of {name!r}", int(row), x_B[row], were_B[row])
        # a last bit of a sum may move an input to the next code
        close = CLOSE_ROUNDED if self.is_rounded else CLOSE
        few_bits = products.FILE in self.folder.manifest["files"]
        for t, scores_B in enumerate(scores_BT.T):
            were_B = np.array(golden[SCORE + self.labels[t]].to_pylist(), np.float32)
            apart_B = np.abs(scores_B - were_B)
            is_far = few_bits and not apart_B.mean() <= CLOSE_ON_AVERAGE
            for row in (
                np.flatnonzero(~(apart_B <= close))[:1] if not is_far else [apart_B.argmax()]
            ):
                raise differs(
                    f"the score of {self.labels[t]!r}", int(row), scores_B[row], were_B[row]
                )


def load(
    path: str | Path,
    deltas: Sequence[str | Path] = (),
    *,
    threads: int = 1,
    checked: Mapping[str, Checked] | None = None,
    ssd: Elsewhere | None = None,
) -> Scorer:
    """Returns the scorer of a model folder, after it has reproduced the scores that are kept there.

    Nothing from the folder is executed. Tables are mapped: processes share their memory.

    Args:
        path: what `sparrow export` wrote.
        deltas: what `sparrow export --base` wrote, in order; see `Scorer.updated`.
        threads: see `Scorer`.
        checked: see `open_folder`.
        ssd: which tables are read from an SSD, where they are not mapped; by default none.

    Raises:
        UserError: when it is no model folder, is damaged, or does not reproduce its scores.
    """
    return _build(open_stack(path, deltas, checked=checked), threads, ssd)


def _build(
    stack: Stack, threads: int, ssd: Elsewhere | None, before: tuple[Any, ...] = ()
) -> Scorer:
    path = stack.top.path
    torch.set_num_threads(threads)
    with reading(path):
        run, transforms, calibrating = _settings(stack.top)
        model = assemble(
            run,
            transforms.schema,
            lambda component: stack.rows[table_file(component.name)],
            weights(stack.top, DENSE),
            weights(stack.top, products.FILE),
            path,
        )
        hot = weights(stack.top, HOT)

    def rows(component: Component) -> tuple[str, LeveledRows]:
        name = table_file(component.name)
        return stack.folders[0].manifest["files"][name]["sha256"], stack.rows[name]

    with reading(path):
        on_ssd = () if ssd is None else ssd.put(list(tables_of(model)), rows, hot, before)
    scorer = Scorer(
        stack=stack,
        run=run,
        transforms=transforms,
        model=model,
        calibrators=calibrating,
        threads=threads,
        ssd=ssd,
        on_ssd=on_ssd,
    )
    scorer.check()
    return scorer


def _settings(folder: Folder) -> tuple[Run, Transforms, tuple[Calibrator, ...]]:
    """Read the settings, transforms and calibrators of a folder."""
    path = folder.path
    with _blaming_settings(path):
        run = Run.load(path / "run.toml", {"run_dir": str(path), "data.path": "none"})
        transforms = Transforms.load(path)
        calibrating = (
            calibrator_files.load(path) if calibrators.FILE in folder.manifest["files"] else ()
        )
    labels = transforms.schema.labels or ("score",)
    if len(calibrating) not in (0, len(labels)):
        reason = f"{len(calibrating)} calibrators for {len(labels)} labels"
        raise UserError(f"{path / calibrators.FILE}: not of this model ({reason}); {REMEDY}")
    return run, transforms, calibrating


def assemble(
    run: Run,
    schema: Schema,
    rows: Callable[[Component], LeveledRows],
    dense: Mapping[str, Tensor],
    few_bits: Mapping[str, Tensor],
    place: Path,
) -> Any:
    """Returns a model that scores and does not learn.

    Args:
        run: its settings.
        schema: of its log.
        rows: gives those of a component, which stay where they are, but for those whose ids come
            and go.
        dense: its dense weights.
        few_bits: products in other formats than fp32, see `products.put`.
        place: the folder of all these, for errors.

    Raises:
        UserError: when weights or rows are not those of this model.
    """

    def stored(component: Component, count: int, dim: int) -> RowStore:
        _check_rows(component, count, rows(component), place)
        if component.policy:  # an index of its ids is made of the rows, which are loaded below
            return MemoryStore(component, count, dim)
        return MappedStore(component, rows(component))

    with _blaming_settings(place):
        model = Offset(untrained(run, schema, Placement(store=stored)), schema)
    try:
        products.put(model, few_bits, dense)
    except UserError as error:
        raise UserError(f"{place / DENSE}: {error}") from None
    for tables in tables_of(model):
        tables.mode = "off"
        for record in tables.all_records():
            if record.component.policy:
                never_R = torch.zeros(record.rows, dtype=torch.uint8)
                name, at, columns = record.place
                held = rows(record.component)
                fields = {field: held.read(field, slice(None)) for field in held.fields} | {
                    "touched": never_R
                }
                with _blaming_settings(place):
                    tables.load_chunk(Chunk(table=name, rows=at, columns=columns, fields=fields))
    return model.eval().requires_grad_(False)


@contextmanager
def _blaming_settings(place: Path) -> Iterator[None]:
    """Gives errors the remedy of who has a folder and, where they name none of its files, the place
    of its settings.
    """
    try:
        yield
    except UserError as error:
        fact = fact_of(error)
        where = "" if fact.startswith(str(place)) else f"{place / 'run.toml'}: "
        raise UserError(f"{where}{fact}; {REMEDY}") from None


def _check_rows(component: Component, count: int, rows: LeveledRows, place: Path) -> None:
    """Check that rows are those of a component: compiled code reads them where their fields say
    that they are.
    """
    fields = component.format.fields(component.dim) | (OF_IDS if component.policy else {})
    wanted = {name: (field.dtype, field.shape(count)[1:]) for name, field in fields.items()}
    stored = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in rows.fields.items()}
    lengths = {len(tensor) if tensor.dim() else -1 for tensor in rows.fields.values()}
    reason = (
        ""
        if wanted == stored and len(lengths) == 1 and -1 not in lengths
        else "its fields are others"
    )
    if not reason and rows.count != count:
        reason = f"{rows.count} rows where the model has {count}"
    if reason:
        raise UserError(
            f"{place / table_file(component.name)}: not of this model ({reason}); export it again"
        )


def weights(folder: Folder, name: str) -> dict[str, Tensor]:
    """Returns the tensors of one of a folder's files, mapped; none when the folder has no such
    file.
    """
    return tensors_of(folder.path / name) if name in folder.manifest["files"] else {}


def table_file(component: str) -> str:
    """Returns the path, in a model folder, of a component's rows."""
    return f"{TABLES}{quote(component, safe='')}.safetensors"
