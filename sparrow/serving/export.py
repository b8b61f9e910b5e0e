"""A run -> a model folder that serves, and that proves itself when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

from sparrow.core.config import differences, to_dict, write_toml
from sparrow.core.errors import UserError
from sparrow.core.files import to_json, write_text
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import Addressing, Component, RowRecords, TableChoices
from sparrow.embeddings.choices import Override
from sparrow.embeddings.records import BLOCK
from sparrow.embeddings.spec import OF_IDS, Cache
from sparrow.embeddings.stores import At, RowStore
from sparrow.embeddings.stores.mapped import LeveledRows
from sparrow.features.encodings.vocabulary import Vocabulary
from sparrow.features.rows import batches
from sparrow.features.transforms import Transforms
from sparrow.kernels.formats import fp32
from sparrow.kernels.rules import sgd
from sparrow.serving.card import card
from sparrow.serving.deltas import TABLES
from sparrow.serving.folder import Digest, Folder, NewFile, new_folder
from sparrow.serving.golden_rows import Check, choose_golden_rows
from sparrow.serving.hot_rows import FILE as HOT
from sparrow.serving.hot_rows import hot_rows
from sparrow.serving.rows import changed_rows, write_rows
from sparrow.serving.scorer import CHECK, DENSE, IDS, NUMBER, SCORE, Scorer, load, table_file
from sparrow.trained import calibrator_files, calibrators
from sparrow.trained.build import records_of, tables_of
from sparrow.trained.calibrate import fit_to_valid
from sparrow.trained.calibrators import KINDS
from sparrow.trained.log import open_log
from sparrow.trained.parts import sample_batches
from sparrow.trained.run import Data, Run
from sparrow.trained.scorer import Restored, restore


def export(
    run_dir: str | Path,
    out: str | Path,
    log: Sequence[str | Path],
    *,
    base: Sequence[str | Path] = (),
    which: str = "best",
    data_dir: str | Path | None = None,
    check: Check = "rows",
    calibrate: KINDS | None = None,
    hot: int = 0,
    prune: bool = False,
    progress: Progress | None = None,
) -> Folder:
    """Write a trained model as a folder that serves. Returns it, after it has been loaded and has
    scored its rows.

    The folder holds weights, table rows as they are stored, what raw rows pass through, a card, and
    some raw rows with their scores. It holds no optimizer state, no time and no path: the same run
    makes the same folder.

    Args:
        run_dir: the run.
        out: the folder, which must not exist.
        log: files of a raw log, as `sparrow prepare` takes them, whose first rows are kept with the
            model.
        base: a full folder and its deltas. Of the tables only rows are written that are other than
            there.
        which: the checkpoint, see `restore`.
        data_dir: the prepared log; by default that of the run, see `restore`.
        check: "rows" keeps rows of the log. "made" draws each column apart: no person's row
            travels.
        calibrate: what scores pass through last, fitted to the valid part: "none", "logistic" or
            "isotonic". By default it is what the run has, else of the kind that the base has, else
            none.
        hot: how many rows of each table are listed, by how often the prepared log has them: caches
            begin with them.
        prune: whether rows that never learnt become zeros, in scores too. They take no room on an
            SSD.
        progress: shows how far it is.

    Raises:
        UserError: when the run or the log cannot be read, `out` exists, a row is not finite, or
            tables are others than those of the base.
    """
    out = Path(out)
    progress = progress or (lambda *_: None)
    old = load(base[0], base[1:]) if base else None
    restored = restore(
        run_dir,
        which=which,
        device="cpu",
        calibrated=calibrate is None,
        own=prune,
        data_dir=data_dir,
    )
    if prune:
        _prune(restored)
    run = _serving_settings(restored)
    if old is not None:
        _check_base(old, restored, run)
    golden_rows = choose_golden_rows(restored, log, check)
    dataset = open_log(restored)
    about = _about(restored, old)
    full_files: dict[str, Any] | None = None if old is None else {}
    known: dict[str, Any] = {}

    def reopen(folder: Path) -> Folder:
        return (load(folder) if old is None else old.updated(folder)).folder

    with new_folder(out, about, full_files=full_files, known=known, check=reopen) as new:
        path = new.path
        _write_settings(restored, run, path)
        _write_dense(restored, path)
        for name, entry, full_entry in _write_tables(restored, old, path, progress):
            known[name] = entry
            if full_files is not None:
                full_files[name] = full_entry
        notes: list[str] = []
        if not restored.calibrators:
            restored, notes = _calibrate(restored, dataset, old, calibrate, progress)
        calibrator_files.save(restored.calibrators, path)
        if hot:
            listed = hot_rows(list(tables_of(restored.model)), sample_batches(dataset), hot)
            (path / HOT).write_bytes(safetensors.torch.save(listed))
        pq.write_table(_with_scores(restored, golden_rows), path / CHECK)
        about_model = card(restored, dataset, progress)
        about_model["notes"] += notes
        write_text(path / "card.json", to_json(about_model, indent=1) + "\n")
    return new.folder


def _about(restored: Restored, old: Scorer | None) -> dict[str, Any]:
    """Returns what the manifest says of a model, and of the one that it follows."""
    about = {"model": restored.name, "step": restored.step, "parent": None, "number": 0}
    if old is not None:
        about |= {"parent": old.folder.full_digest, "number": old.folder.manifest["number"] + 1}
    return about


def _write_settings(restored: Restored, run: Run, path: Path) -> None:
    """Write what raw rows pass through, and what the model is."""
    _without_rare(restored.transforms).save(path)
    settings = to_dict(_with_maps(run, path), only=("model", "layers", "tables", "precision"))
    write_text(
        path / "run.toml", write_toml(settings, header="A trained model, by `sparrow export`.")
    )


def _write_dense(restored: Restored, path: Path) -> None:
    dense = {
        name: tensor.contiguous().clone() for name, tensor in restored.model.state_dict().items()
    }
    (path / DENSE).write_bytes(safetensors.torch.save(dense))


def _write_tables(
    restored: Restored, old: Scorer | None, path: Path, progress: Progress
) -> Iterator[tuple[str, Any, Any]]:
    """Write the rows of all tables, of a delta those that are new. Yields the name of each file,
    its entry in the manifest, and that of the full file whose delta it is.
    """
    (path / TABLES).mkdir()
    records = records_of(restored.model)
    for count, record in enumerate(records, 1):
        name = table_file(record.component.name)
        rows = _rows(record)
        rows_U = None if old is None else changed_rows(old.stack.rows[name], rows)
        with NewFile(path / name) as file:
            write_rows(file, rows, rows_U, partial(_check_finite, restored, record, rows))
        full = Digest()
        if old is not None:
            write_rows(full, rows)
        yield name, file.entry, full.entry
        progress("tables written", count, len(records))


def _calibrate(
    restored: Restored,
    dataset: Dataset,
    old: Scorer | None,
    calibrate: KINDS | None,
    progress: Progress,
) -> tuple[Restored, list[str]]:
    """Returns the model with calibrators, where it has none and is to have some, and what to say of
    them.
    """
    base_calibrators = () if old is None else old.calibrators
    if calibrate is None and base_calibrators and not dataset.rows("valid"):
        note = "its calibrator is that of the base, as the log has no valid rows"
        return replace(restored, calibrators=base_calibrators), [note]
    kind = calibrate or calibrators.kind_of(base_calibrators)
    fitted = fit_to_valid(kind, restored, dataset, progress)
    notes: list[str] = []
    if base_calibrators and fitted:
        notes.append(f"its {kind} calibrator was fitted to the valid part, since the base has one")
    return replace(restored, calibrators=fitted), notes


def _prune(restored: Restored) -> None:
    """Have zeros in the place of all rows that never learnt; those of ids that come and go have an
    index, and stay.
    """
    for tables in tables_of(restored.model):
        for record in tables.all_records():
            component = record.component
            for chunk in () if component.policy else record.chunks(BLOCK):
                never_N = chunk.fields["touched"] == 0
                payload = {
                    name: chunk.fields[name].clone()
                    for name in component.format.fields(component.dim)
                }
                for tensor in payload.values():
                    tensor[never_N] = 0
                tables.load_chunk(replace(chunk, fields={**chunk.fields, **payload}))


def _check_base(old: Scorer, restored: Restored, run: Run) -> None:
    """Check that a model may follow another one as a delta: settings and tables are the same, but
    for rows of new ids.

    Args:
        old: the base.
        restored: the model.
        run: its settings, as it is served.

    Raises:
        UserError: names what differs.
    """

    def difference(part: str, new: Any, base: Any) -> UserError:
        place = f"{restored.run.run_dir}: {part} is {new} and was {base} in {old.folder.path}"
        return UserError(
            f"{place}, so its rows are no rows of that model; export all of it, without --base"
        )

    for key, base_value, new_value in differences(_settings(old.run), _settings(run)):
        raise difference(key, repr(new_value), repr(base_value))
    resizable = restored.model.fitted_prefixes  # of any size, as each delta has all dense weights
    shapes = [
        {
            name: list(t.shape)
            for name, t in model.state_dict().items()
            if not name.startswith(resizable)
        }
        for model in (old.model, restored.model)
    ]
    for name, base_value, new_value in differences(*shapes):
        raise difference(f"the shape of {name}", new_value, base_value)
    was = _components(old.model)
    now = _components(restored.model)
    for name in sorted(was.keys() | now.keys()):
        rows = [components[name][0].rows if name in components else 0 for components in (was, now)]
        is_known = name in was and name in now
        # its ids are numbered
        may_grow = is_known and now[name][1].ids is not None and now[name][0].policy is None
        if rows[0] > rows[1] or (rows[0] < rows[1] and not may_grow):
            raise difference(f"the number of rows of table {name!r}", rows[1], rows[0])


def _components(model: Any) -> dict[str, tuple[Component, Addressing]]:
    specs = [spec for tables in tables_of(model) for spec in tables.specs]
    return {
        component.name: (component, spec.addressing)
        for spec in specs
        for component in spec.components
    }


def _settings(run: Run) -> dict[str, Any]:
    """Returns the settings that a run and its base share.

    A map of ids is known by its digest. A seed is of first values.
    """
    settings = to_dict(run, only=("model", "layers", "tables", "precision"))
    sizes = {
        table: {k: v for k, v in size.items() if k != "file"}
        for table, size in settings["tables"]["sizes"].items()
    }
    return settings | {"tables": {**settings["tables"], "sizes": sizes, "seed": None}}


# -- what is written -------------------------------------------------------------------------------


def _serving_settings(restored: Restored) -> Run:
    """Returns the settings of a run that its model needs. Tables learn no more; a cache's exact
    rows become fp32 rows.

    So a table with a cache, whose values are rows in few bits and exact ones, takes the bytes of
    fp32.
    """
    run = restored.run
    tables = run.tables
    plain = [replace(o, rule=None, cache=None, state=None, tier=None) for o in tables.overrides]
    overrides = [o for o in plain if o.addressing or o.format or o.init_scale is not None]
    cached = tuple(
        name
        for name, encoding in restored.schema.encodings.items()
        if tables.for_table(name, encoding.rows or 0).cache.is_on
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
    serving_run = Run(run_dir="none", data=Data(path="none"), tables=choices)
    return replace(serving_run, model=run.model, layers=run.layers, precision=run.precision)


def _with_maps(run: Run, folder: Path) -> Run:
    """Returns the run with the maps of learned addressings copied into the folder."""
    sizes = {}
    for table, size in run.tables.sizes.items():
        if "file" in size:
            (folder / "maps").mkdir(exist_ok=True)
            map_file = f"maps/{list(run.tables.sizes).index(table):03d}.safetensors"
            (folder / map_file).write_bytes(Path(size["file"]).read_bytes())
            size = {**size, "file": map_file}  # `Run.load` looks for it beside its file
        sizes[table] = size
    return replace(run, tables=replace(run.tables, sizes=sizes))


def _without_rare(transforms: Transforms) -> Transforms:
    """Returns the transforms without the ids that are not yet known, which only `prepare --grow`
    reads.
    """
    known = {
        name: (
            Vocabulary(vocabulary.hashes_V, vocabulary.counts_V)
            if isinstance(vocabulary, Vocabulary)
            else vocabulary
        )
        for name, vocabulary in transforms.vocabularies.items()
    }
    return replace(transforms, vocabularies=known)


def _rows(record: RowRecords) -> LeveledRows:
    """Returns the fields of a component's rows that serving reads."""
    component = record.component
    store = record.store
    if store.in_order() is not None:
        fields = {
            name: torch.empty(field.shape(0), dtype=field.dtype)
            for name, field in component.format.fields(component.dim).items()
        }
        return _Elsewhere(fields=fields, store=store, rows=record.rows)
    exact = {"weight": record.weight} if component.cache.is_on else {}
    names = {
        *(exact or component.format.fields(component.dim)),
        *(OF_IDS if component.policy else ()),
    }
    return LeveledRows(
        fields={
            name: tensor.contiguous()
            for name, tensor in (record.fields | exact).items()
            if name in names
        }
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Elsewhere(LeveledRows):
    """Rows that are read when they are asked for. The fields have the types and shapes, and no
    rows.
    """

    store: RowStore
    rows: int

    @property
    def count(self) -> int:
        return self.rows

    @cached_property
    def _in_order(self) -> Callable[[int, int], dict[str, torch.Tensor]]:
        """Reads slices. The last one is kept: it is checked, and then written, and has other
        fields.
        """
        reader = self.store.in_order()
        assert reader is not None
        return lru_cache(1)(lambda first, last: reader.read(slice(first, last)))

    def read(self, name: str, at: At) -> torch.Tensor:
        return (
            self._in_order(at.start, at.stop) if isinstance(at, slice) else self.store.read(at)
        )[name]


def _check_finite(restored: Restored, record: RowRecords, rows: LeveledRows, at: At) -> None:
    """Refuse NaN and infinities among some rows: each request that meets such a row would fail."""
    component = record.component
    stored = fp32.Config() if component.cache.is_on else component.format
    fields = {name: rows.read(name, at) for name in stored.fields(component.dim)}
    are_floats = all(tensor.is_floating_point() for tensor in fields.values())
    # sums are fast; one of large numbers may be infinite all the same
    if are_floats and all(tensor.sum().isfinite() for tensor in fields.values()):
        return
    bad_N = ~torch.isfinite(stored.decode(fields, component.dim)).all(1)
    if bad_N.any():
        rows_N = torch.arange(at.start, at.stop) if isinstance(at, slice) else at
        raise UserError(
            f"{restored.run.run_dir}: row {int(rows_N[bad_N][0])} of table {component.name!r} is"
            " not finite; the model diverged: export an earlier --checkpoint than step"
            f" {restored.step}"
        )


def _with_scores(restored: Restored, rows: pa.Table) -> pa.Table:
    """Returns raw rows with the ids, numbers and scores that the run makes of them."""
    (batch,) = batches(
        restored.schema, restored.transforms.transform(rows, training=False), rows.num_rows
    )
    columns: dict[str, Any] = {}
    for name in restored.schema.sparse:
        ids = batch.ids[name]
        columns[IDS + name] = pa.LargeListArray.from_arrays(
            ids.offsets_B1.numpy(), ids.values_N.numpy()
        )
    for c, name in enumerate(restored.schema.numbers):
        columns[NUMBER + name] = batch.dense_BC[:, c].contiguous().numpy()
    for label, scores_B in zip(
        restored.schema.labels or ("score",), restored.scores(batch).numpy().T, strict=True
    ):
        columns[SCORE + label] = np.ascontiguousarray(scores_B)
    return pa.table({**{name: rows[name] for name in rows.column_names}, **columns})
