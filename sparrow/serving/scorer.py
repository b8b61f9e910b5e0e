"""A model folder -> scores of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow.parquet as pq
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sparrow.core import Batch, Chunk
from sparrow.core.arrays import Float32s
from sparrow.core.errors import UserError
from sparrow.core.repeated import Repeated
from sparrow.embeddings import rows_on, stored_in
from sparrow.embeddings.spec import Component
from sparrow.embeddings.tiers import MemoryStore, RowStore
from sparrow.embeddings.tiers.store import At, level_of
from sparrow.features.schema import Schema
from sparrow.features.transforms import Transforms
from sparrow.kernels.embedding_bag import Rows, Table
from sparrow.models import Offset
from sparrow.serving import requests
from sparrow.serving.folder import Folder, open_folder
from sparrow.serving.requests import Encoder
from sparrow.trained.build import scoring, tables_of, untrained
from sparrow.trained.run import Run

CHECK = "check.parquet"
CLOSE = {"fp32": 1e-6, "bf16": 2e-2}  # how far scores may lie apart, by the precision of products
WORTH = 1 << 24  # multiply-adds that take as long as it takes to follow what is shared through a model
KINDS = 64  # of requests, by the columns of their users, of which it is known what they save
IDS, NUMBER, SCORE = ":ids:", ":number:", ":score:"  # before the names of what the columns of CHECK hold


class MappedStore(nn.Module):
    """Rows in a file, mapped and never written. Processes that map the same file share its memory.

    Args:
        component: whose rows these are, with a rule that keeps nothing of a row.
        fields: the fields of its format.
    """

    slots_are_rows = True
    is_allocated = False  # nobody has to give the rows first values

    def __init__(self, component: Component, fields: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.component = component
        never_R = torch.zeros(1, dtype=torch.uint8).expand(component.rows)  # a byte for all: no row learns
        self.fields = {**fields, "touched": never_R}

    @property
    def levels(self) -> tuple[Rows, ...]:
        """One level: all rows."""
        return (level_of(self.component, self.fields),)

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the rows themselves."""
        return rows_N

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Refuse: no row learns."""
        raise UserError(f"table {self.component.name!r}: a model that was exported does not learn; train its run")

    def settle(self) -> None:
        """Do nothing."""

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns what `RowStore.read` says."""
        return {name: tensor[at] for name, tensor in self.fields.items()}

    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Refuse, as `admit` does."""
        self.admit(torch.empty(0), None)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores requests with a model that was exported. Threads may share it, and compute at the same time.

    Args:
        folder: the model's.
        run: its settings.
        transforms: what its rows pass through.
        model: it, with the offset of its logits.
        threads: how many share the products of a request. It holds for all of torch in the process.
    """

    folder: Folder
    run: Run
    transforms: Transforms
    model: Any
    threads: int = 1

    @property
    def schema(self) -> Schema:
        """What the columns mean."""
        return self.transforms.schema

    @property
    def labels(self) -> tuple[str, ...]:
        """What is predicted, in the order of the scores' columns."""
        return self.schema.labels or ("score",)

    @cached_property
    def encoder(self) -> Encoder:
        """Makes batches of requests."""
        return Encoder(self.transforms)

    def score(self, rows: requests.Rows) -> Float32s:
        """Returns probabilities float32 [N, T] of raw rows, in order.

        Args:
            rows: a list of N dicts, or a dict of lists of N values, see `Encoder.batch`.

        Raises:
            UserError: for rows that cannot be encoded, and for scores that are not finite.
        """
        return self.scores(self.encoder.batch(rows)).numpy()

    def rank(self, user: Mapping[str, Any], candidates: requests.Rows) -> Float32s:
        """Returns probabilities float32 [N, T] of a user's candidates, in order.

        The user's columns are encoded, looked up and pooled once, and so are products of them.

        Args:
            user: the columns that all candidates share.
            candidates: the other columns, as for `score`.

        Raises:
            UserError: as `score`, and for a column that both have.
        """
        return self.rank_all([(user, candidates)])[0]

    def rank_all(self, asked: Sequence[tuple[Mapping[str, Any], requests.Rows]]) -> list[Float32s]:
        """Returns what `rank` does of several requests, whose rows make one batch. Their users have the same columns.

        Args:
            asked: user and candidates of each request.

        Raises:
            UserError: as `rank`, and when one user has a column that another lacks.
        """
        users = [user for user, _ in asked]
        for number, user in enumerate(users):
            if odd := users[0].keys() ^ user.keys():
                raise UserError(f"request {number}: {min(odd)!r} is of one user and not of another; give it to all")
        rows, counts = requests.stacked([candidates for _, candidates in asked])
        user_B, columns = np.repeat(np.arange(len(users)), counts), tuple(*users[:1])
        repeats = max(len(user_B) - len(users), 0)
        shared = repeats * self._saved.get(columns, math.inf) >= WORTH  # nothing is known of the first request
        batch = self.encoder.crossed(users, rows, user_B, shared=shared)
        scores_BT = self.scores(batch)
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
        return scoring(self.model, self.run, self.schema)

    def check(self) -> None:
        """Score the rows that were kept with the model, which also makes it ready for the first request.

        Raises:
            UserError: when ids, numbers or scores differ from those that were kept.
        """
        path = self.folder.path / CHECK
        kept = pq.ParquetFile(path).read()  # `read_table` would import pandas
        rows = kept.select(list(self.encoder.sources)).to_pylist()
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
        for c, name in enumerate(self.schema.dense):
            x_B, were_B = batch.dense_BC[:, c].numpy(), np.array(kept[NUMBER + name].to_pylist(), np.float32)
            for row in np.flatnonzero(np.abs(x_B - were_B) > np.spacing(np.abs(were_B)))[:1]:  # libraries' logarithms
                raise differs(f"the number of {name!r}", int(row), x_B[row], were_B[row])
        for t, scores_B in enumerate(self.scores(batch).numpy().T):
            were_B = np.array(kept[SCORE + self.labels[t]].to_pylist(), np.float32)
            for row in np.flatnonzero(~(np.abs(scores_B - were_B) <= CLOSE[self.run.precision]))[:1]:
                raise differs(f"the score of {self.labels[t]!r}", int(row), scores_B[row], were_B[row])


def load(path: str | Path, *, threads: int = 1) -> Scorer:
    """Returns the scorer of a model folder, after it has reproduced the scores that are kept there.

    Nothing from the folder is executed. Tables are mapped: processes share their memory.

    Args:
        path: what `sparrow export` wrote.
        threads: see `Scorer`.

    Raises:
        UserError: when it is no model folder, is damaged, or does not reproduce its scores.
    """
    folder = open_folder(path)
    torch.set_num_threads(threads)
    run = Run.load(folder.path / "run.toml", {"run_dir": str(path), "data.path": "none"})
    transforms = Transforms.load(folder.path)

    def stored(component: Component, rows: int, dim: int) -> RowStore:
        if component.policy:  # an index of its ids is made of the rows, which are loaded below
            return MemoryStore(component, rows, dim)
        return MappedStore(component, _tensors(folder.path / table_file(component.name)))

    with rows_on("cpu"), stored_in(stored):
        model: Any = Offset(untrained(run, transforms.schema), transforms.schema)
    try:
        model.load_state_dict(safetensors.torch.load_file(folder.path / "dense.safetensors"))
    except (RuntimeError, SafetensorError) as error:
        why = str(error).splitlines()[-1].strip()
        raise UserError(f"{folder.path / 'dense.safetensors'}: not of this model ({why}); export it again") from None
    for tables in tables_of(model):
        tables.mode = "off"
        for record in tables.all_records():
            if record.component.policy:
                name, rows, columns = record.place
                fields = _tensors(folder.path / table_file(name))
                fields["touched"] = torch.zeros(record.rows, dtype=torch.uint8)
                tables.load_chunk(Chunk(table=name, rows=rows, columns=columns, fields=fields))
    scorer = Scorer(
        folder=folder, run=run, transforms=transforms, model=model.eval().requires_grad_(False), threads=threads
    )
    scorer.check()
    return scorer


def table_file(component: str) -> str:
    """Returns the path, in a model folder, of a component's rows."""
    return f"tables/{quote(component, safe='')}.safetensors"


def _tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file, which is mapped."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing or damaged ({error}); export the model again") from None
