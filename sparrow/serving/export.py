"""A run -> a model folder that serves, and that proves itself when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

from sparrow import data
from sparrow.core.config import differences, to_dict, write_toml
from sparrow.core.errors import UserError
from sparrow.core.files import to_json, write_text
from sparrow.core.progress import Progress
from sparrow.embeddings import Addressing, Component, RowRecords, TableChoices
from sparrow.embeddings.choices import Override
from sparrow.embeddings.records import BLOCK
from sparrow.embeddings.spec import OF_IDS, Cache
from sparrow.embeddings.stores import At, LeveledRows, SsdStore
from sparrow.features.encodings.vocabulary import Vocabulary
from sparrow.features.rows import batches
from sparrow.features.transforms import Transforms
from sparrow.kernels.formats import fp32
from sparrow.kernels.rules import sgd
from sparrow.serving.card import card
from sparrow.serving.deltas import TABLES
from sparrow.serving.folder import Digest, Folder, NewFile, new_folder
from sparrow.serving.kept import Check, kept_rows
from sparrow.serving.rows import changed_rows, write_rows
from sparrow.serving.scorer import CHECK, DENSE, IDS, NUMBER, SCORE, Scorer, load, table_file
from sparrow.serving.ssd.hot import FILE as HOT
from sparrow.serving.ssd.hot import hot_rows
from sparrow.trained import calibrators
from sparrow.trained.build import check_schema, tables_of
from sparrow.trained.calibrate import fitted_to_valid
from sparrow.trained.calibrators import KINDS
from sparrow.trained.parts import some_batches
from sparrow.trained.run import Data, Run
from sparrow.trained.scorer import Restored, restore


def export(
    run_dir: str | Path,
    out: str | Path,
    log: Sequence[str | Path],
    *,
    base: Sequence[str | Path] = (),
    which: str = "best",
    check: Check = "rows",
    calibrate: KINDS | None = None,
    hot: int = 0,
    prune: bool = False,
    told: Progress | None = None,
) -> Folder:
    """Write a trained model as a folder that serves. Returns it, after it has been loaded and has scored its rows.

    The folder holds weights, table rows as they are stored, what raw rows pass through, a card, and some raw rows with
    their scores. It holds no optimizer state, no time and no path: the same run makes the same folder.

    Args:
        run_dir: the run.
        out: the folder, which must not exist.
        log: files of a raw log, as `sparrow prepare` takes them, whose first rows are kept with the model.
        base: a full folder and its deltas. Of the tables only rows are written that are other than there.
        which: the checkpoint, see `restore`.
        check: "rows" keeps rows of the log. "made" draws each column apart: no person's row travels.
        calibrate: what scores pass through last, fitted to the valid part: "none", "logistic" or "isotonic". By default
            it is what the run has, else of the kind that the base has, else none.
        hot: how many rows of each table are listed, by how often the prepared log has them: caches begin with them.
        prune: whether rows that never learnt become zeros, in scores too. They take no room on an SSD.
        told: is told how far it is.

    Raises:
        UserError: when the run or the log cannot be read, `out` exists, a row is not finite, or tables are others than
            those of the base.
    """
    out, told = Path(out), told or (lambda what, done, total: None)
    old = load(base[0], base[1:]) if base else None
    found = restore(run_dir, which=which, device="cpu", calibrated=calibrate is None, own=prune)
    if prune:
        _prune(found)
    run = _served(found)
    if old is not None:
        _check_base(old, found, run)
    kept = kept_rows(found, log, check)
    dataset = data.open(found.run.data.path)
    check_schema(found.schema, dataset.schema, dataset.path)
    about = {"model": found.name, "step": found.step, "parent": None, "number": 0}
    if old is not None:
        about |= {"parent": old.folder.whole, "number": old.folder.manifest["number"] + 1}
    whole: dict[str, Any] | None = None if old is None else {}
    known: dict[str, Any] = {}
    with new_folder(out, about, whole=whole, known=known) as made:
        transforms = _without_rare(found.transforms)
        transforms.save(made)
        settings = to_dict(_with_maps(run, made), only=("model", "layers", "tables", "precision"))
        write_text(made / "run.toml", write_toml(settings, header="A trained model, by `sparrow export`."))
        dense = {name: of.contiguous().clone() for name, of in found.model.state_dict().items()}
        (made / DENSE).write_bytes(safetensors.torch.save(dense))
        (made / TABLES).mkdir()
        records = [record for tables in tables_of(found.model) for record in tables.all_records()]
        for done, record in enumerate(records, 1):
            name, new = table_file(record.component.name), _rows(record)
            rows_U = None if old is None else changed_rows(old.stack.rows[name], new)
            with NewFile(made / name) as file:
                write_rows(file, new, rows_U, partial(_check_finite, found, record, new))
            known[name] = file.entry
            if whole is not None:
                write_rows(full := Digest(), new)
                whole[name] = full.entry
            told("tables written", done, len(records))
        if not found.calibrators:
            kind = calibrate or calibrators.kind_of(() if old is None else old.calibrators)
            found = replace(found, calibrators=fitted_to_valid(found, dataset, kind, told))
        calibrators.save(found.calibrators, made)
        if hot:
            listed = hot_rows(list(tables_of(found.model)), some_batches(dataset), hot)
            (made / HOT).write_bytes(safetensors.torch.save(listed))
        pq.write_table(_with_scores(found, kept), made / CHECK)
        write_text(made / "card.json", to_json(card(found, dataset, told), indent=1) + "\n")
    return (load(out) if old is None else old.updated(out)).folder


def _prune(found: Restored) -> None:
    """Have zeros in the place of all rows that never learnt; those of ids that come and go have an index, and stay."""
    for tables in tables_of(found.model):
        for record in tables.all_records():
            component = record.component
            for chunk in () if component.policy else record.chunks(BLOCK):
                never_N = chunk.fields["touched"] == 0
                payload = {name: chunk.fields[name].clone() for name in component.format.fields(component.dim)}
                for of in payload.values():
                    of[never_N] = 0
                tables.load_chunk(replace(chunk, fields={**chunk.fields, **payload}))


def _check_base(old: Scorer, found: Restored, run: Run) -> None:
    """Check that a model may follow another one as a delta: settings and tables are the same, but for rows of new ids.

    Args:
        old: the base.
        found: the model.
        run: its settings, as it is served.

    Raises:
        UserError: names what differs.
    """

    def other(what: str, ours: Any, theirs: Any) -> UserError:
        place = f"{found.run.run_dir}: {what} is {ours} and was {theirs} in {old.folder.path}"
        return UserError(f"{place}, so its rows are no rows of that model; export all of it, without --base")

    for key, theirs, ours in differences(_settings(old.run), _settings(run)):
        raise other(key, repr(ours), repr(theirs))
    shapes = [{name: list(t.shape) for name, t in model.state_dict().items()} for model in (old.model, found.model)]
    for name, theirs, ours in differences(*shapes):
        raise other(f"the shape of {name}", ours, theirs)
    was, now = _components(old.model), _components(found.model)
    for name in sorted(was.keys() | now.keys()):
        rows = [of[name][0].rows if name in of else 0 for of in (was, now)]
        is_known = name in was and name in now
        may_grow = is_known and now[name][1].ids is not None and now[name][0].policy is None  # its ids are numbered
        if rows[0] > rows[1] or (rows[0] < rows[1] and not may_grow):
            raise other(f"the number of rows of table {name!r}", rows[1], rows[0])


def _components(model: Any) -> dict[str, tuple[Component, Addressing]]:
    specs = [spec for tables in tables_of(model) for spec in tables.specs]
    return {component.name: (component, spec.addressing) for spec in specs for component in spec.components}


def _settings(run: Run) -> dict[str, Any]:
    """Returns what a run and its base must share. A map of ids is known by its digest; a seed is of first values."""
    settings = to_dict(run, only=("model", "layers", "tables", "precision"))
    sizes = {table: {k: v for k, v in of.items() if k != "file"} for table, of in settings["tables"]["sizes"].items()}
    return settings | {"tables": {**settings["tables"], "sizes": sizes, "seed": None}}


# -- what is written ------------------------------------------------------------------------------------------------


def _served(found: Restored) -> Run:
    """Returns the settings of a run that its model needs. Tables learn no more; a cache's exact rows become fp32 rows.

    So a table with a cache, whose values are rows in few bits and exact ones, takes the bytes of fp32.
    """
    tables, run = found.run.tables, found.run
    plain = [replace(o, rule=None, cache=None, state=None, tier=None) for o in tables.overrides]
    overrides = [o for o in plain if o.addressing or o.format or o.init_scale is not None]
    cached = tuple(
        name for name, encoding in found.schema.encodings.items() if tables.of(name, encoding.rows or 0).cache.is_on
    )
    if cached:
        overrides.append(Override(names=cached, format={"name": "fp32"}))
    choices = TableChoices(
        addressing=tables.addressing,
        format=tables.format,
        rule=sgd.Config(),
        cache=Cache(),
        init_scale=tables.init_scale,
        seed=run.seed if tables.seed is None else tables.seed,
        overrides=tuple(overrides),
        sizes=tables.sizes,
    )
    told = Run(run_dir="none", data=Data(path="none"), tables=choices)
    return replace(told, model=run.model, layers=run.layers, precision=run.precision)


def _with_maps(run: Run, made: Path) -> Run:
    """Returns the run with the maps of learned addressings copied into the folder."""
    sizes = {}
    for table, of in run.tables.sizes.items():
        if "file" in of:
            (made / "maps").mkdir(exist_ok=True)
            mine = f"maps/{list(run.tables.sizes).index(table):03d}.safetensors"
            (made / mine).write_bytes(Path(of["file"]).read_bytes())
            of = {**of, "file": mine}  # `Run.load` looks for it beside its file
        sizes[table] = of
    return replace(run, tables=replace(run.tables, sizes=sizes))


def _without_rare(transforms: Transforms) -> Transforms:
    """Returns the transforms without the ids that are not yet known, which only `prepare --grow` reads."""
    known = {
        name: Vocabulary(of.hashes_V, of.counts_V) if isinstance(of, Vocabulary) else of
        for name, of in transforms.vocabularies.items()
    }
    return replace(transforms, vocabularies=known)


def _rows(record: RowRecords) -> LeveledRows:
    """Returns the fields of a component's rows that serving reads."""
    component, store = record.component, record.store
    if isinstance(store, SsdStore):
        fields = {
            name: torch.empty(of.shape(0), dtype=of.dtype)
            for name, of in component.format.fields(component.dim).items()
        }
        return _OnSsd(fields=fields, store=store)
    exact = {"weight": record.weight} if component.cache.is_on else {}
    names = {*(exact or component.format.fields(component.dim)), *(OF_IDS if component.policy else ())}
    return LeveledRows(fields={name: of.contiguous() for name, of in (record.fields | exact).items() if name in names})


@dataclass(frozen=True, kw_only=True, eq=False)
class _OnSsd(LeveledRows):
    """Rows that are read when they are asked for. The fields have the types and shapes, and no rows."""

    store: SsdStore

    @property
    def count(self) -> int:
        """See `LeveledRows`."""
        return self.store.rows

    @cached_property
    def _in_order(self) -> Callable[[int, int], dict[str, torch.Tensor]]:
        """Reads slices. The last one is kept: it is checked, and then written, and has other fields."""
        reader = self.store.in_order()
        return lru_cache(1)(lambda first, last: reader.read(slice(first, last)))

    def read(self, name: str, at: At) -> torch.Tensor:
        """See `LeveledRows`."""
        return (self._in_order(at.start, at.stop) if isinstance(at, slice) else self.store.read(at))[name]


def _check_finite(found: Restored, record: RowRecords, rows: LeveledRows, at: At) -> None:
    """Refuse NaN and infinities among some rows: each request that meets such a row would fail."""
    component = record.component
    stored = fp32.Config() if component.cache.is_on else component.format
    fields = {name: rows.read(name, at) for name in stored.fields(component.dim)}
    are_floats = all(of.is_floating_point() for of in fields.values())
    if are_floats and all(of.sum().isfinite() for of in fields.values()):  # fast; a sum of large ones says nothing
        return
    bad_N = ~torch.isfinite(stored.decode(fields, component.dim)).all(1)
    if bad_N.any():
        rows_N = torch.arange(at.start, at.stop) if isinstance(at, slice) else at
        raise UserError(
            f"{found.run.run_dir}: row {int(rows_N[bad_N][0])} of table {component.name!r} is not finite; the "
            f"model diverged: export an earlier --checkpoint than step {found.step}"
        )


def _with_scores(found: Restored, rows: pa.Table) -> pa.Table:
    """Returns raw rows with the ids, numbers and scores that the run makes of them."""
    (batch,) = batches(found.schema, found.transforms.transform(rows, training=False), rows.num_rows)
    beside: dict[str, Any] = {}
    for name in found.schema.sparse:
        ids = batch.ids[name]
        beside[IDS + name] = pa.LargeListArray.from_arrays(ids.offsets_B1.numpy(), ids.values_N.numpy())
    for c, name in enumerate(found.schema.numbers):
        beside[NUMBER + name] = batch.dense_BC[:, c].contiguous().numpy()
    for label, scores_B in zip(found.schema.labels or ("score",), found.scores(batch).numpy().T, strict=True):
        beside[SCORE + label] = np.ascontiguousarray(scores_B)
    return pa.table({**{name: rows[name] for name in rows.column_names}, **beside})
