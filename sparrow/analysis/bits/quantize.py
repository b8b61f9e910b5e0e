"""A model folder -> one in fewer bits, whose NE rises by no more than a budget."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch

from sparrow import data
from sparrow.analysis.bits.calibrate import observed, output_errors
from sparrow.analysis.bits.search import Choice, Found, Rise, rises, search
from sparrow.analysis.bits.variants import EXACT, Inputs, Variants
from sparrow.analysis.judge import BATCH, judges
from sparrow.core import Batch
from sparrow.core.config import read_toml, to_dict, write_toml
from sparrow.core.errors import UserError
from sparrow.core.files import to_json, write_text
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.serving import Scorer, load
from sparrow.serving.card import card
from sparrow.serving.deltas import TABLES
from sparrow.serving.folder import new_folder
from sparrow.serving.products import FILE as PRODUCTS
from sparrow.serving.products import format_of
from sparrow.serving.scorer import CHECK, DENSE, SCORE, table_file
from sparrow.trained.build import check_schema, tables_of

REPORT = "quantized.json"
CANDIDATES, WARM, TURNS = 100, 3, 21  # of the request that is timed


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """What `quantize` wrote, and how it came to it.

    scorer: the new model. found: by the search. checked: the rise on as many other rows of the valid part, None where
    it has no more. parts: what is known of each. ms_before, ms_after: of a request with CANDIDATES rows, of one thread.
    """

    scorer: Scorer
    found: Found
    checked: Rise | None
    budget: float
    parts: list[dict[str, Any]]
    ms_before: float
    ms_after: float

    def bytes_of(self, choice: Choice) -> int:
        """Returns the bytes of all parts with some formats."""
        names = {(part.kind, part.name): name for part, name in choice.items()}
        return sum(part["bytes"][names.get((part["kind"], part["name"]), EXACT)] for part in self.parts)

    @property
    def needed(self) -> int | None:
        """How many rows or sessions would show that the narrowest formats keep to the budget; None when they do not."""
        narrowest = self.found.tried[0].rise
        fits = narrowest.upper <= self.budget
        return None if fits else narrowest.units_for(self.budget)


def quantize(
    model: str | Path,
    out: str | Path,
    prepared: str | Path,
    *,
    budget: float,
    tables: str = "int4",
    products: str = "int8",
    inputs: Inputs = "calibrated",
    rows: int = 50_000,
    told: Progress | None = None,
) -> Quantized:
    """Write a model folder with tables and products in fewer bits.

    Ranges of inputs are calibrated on the end of the training part, and damage is measured on the valid part. The test
    part is read for the card alone.

    Args:
        model: a folder in fp32, by `sparrow export`.
        out: the new folder, which must not exist.
        prepared: the prepared log that the model was trained on.
        budget: how much NE may rise, as a share of it; infinite takes the narrowest formats.
        tables: the narrowest format of rows, or "fp32".
        products: the narrowest format of products, or "fp32".
        inputs: see `Variants`.
        rows: of the valid part, by which to choose; and of the training part, to calibrate.
        told: is told how far it is.

    Raises:
        UserError: when a folder or log cannot be read, they do not fit together, or there is nothing to calibrate on.
    """
    told, out = told or (lambda what, done, total: None), Path(out)
    scorer, dataset = load(model), data.open(prepared)
    if scorer.is_rounded:
        raise UserError(f"{model}: not in fp32; quantise the folder that it was made of, or export the run again")
    check_schema(scorer.schema, dataset.schema, dataset.path)
    about = {"model": scorer.name, "step": scorer.step, "parent": None, "number": 0}
    with new_folder(out, {**about, "quantized_from": scorer.folder.digest}) as made:
        seen = observed(scorer.model, scorer.scores, last(dataset, rows))
        scratch = made.parent / "rows"
        scratch.mkdir()
        variants = Variants(scorer, seen, scratch, inputs=inputs)
        judge, *others = judges(dataset, rows, parts=2 if dataset.rows("valid") >= 2 * rows else 1)
        found = search(variants.parts(tables, products), variants.score, judge, budget, told)
        checks = [[other.ne_of(variants.score(choice)) for choice in ({}, found.best.choice)] for other in others]
        checked = rises(*checks[0]) if checks else None  # the first of many that keeps to a budget is a lucky one
        parts = _parts(variants, found, judge.batch.part(0, min(4096, judge.batch.batch_size)))
        _write(made, variants, found.best.choice, dataset, told)
        write_text(made / REPORT, to_json(_report(found, checked, parts, budget), indent=1) + "\n")
    now = load(out)
    before, after = _milliseconds(scorer, now)
    return Quantized(
        scorer=now, found=found, checked=checked, budget=budget, parts=parts, ms_before=before, ms_after=after
    )


def last(dataset: Dataset, rows: int) -> list[Batch]:
    """Returns the last rows of the training part, in batches.

    Raises:
        UserError: when it has none.
    """
    if not dataset.rows("train"):
        raise UserError(f"{dataset.path}: no training rows to calibrate on; give the log that the model was trained on")
    loader = dataset.loader(BATCH, split="train", dedup="off")
    first = max(len(loader) - -(-rows // BATCH), 0)
    loader.load_state_dict({"epoch": 0, "batch": first, "batch_size": BATCH})
    return list(loader)


def _write(made: Path, variants: Variants, choice: Choice, dataset: Dataset, told: Progress) -> None:
    """Write the files of a model folder, but for its manifest."""
    scorer, model = variants.scorer, variants.model(choice)
    before = scorer.folder.path
    for name in scorer.folder.manifest["files"]:
        if not name.startswith(TABLES) and name not in (DENSE, CHECK, "card.json", "run.toml", REPORT):
            (made / name).parent.mkdir(exist_ok=True, parents=True)
            shutil.copyfile(before / name, made / name)
    settings = read_toml(before / "run.toml")  # as written, with paths beside it
    overrides = to_dict(variants.run(choice).tables, only=("overrides",))["overrides"]
    settings.setdefault("tables", {})["overrides"] = overrides
    write_text(made / "run.toml", write_toml(settings, header="A trained model, by `sparrow quantize`."))
    dense, few_bits = variants.stored(choice)
    for name, of in ((DENSE, dense), (PRODUCTS, few_bits)):
        if of or name == DENSE:
            (made / name).write_bytes(safetensors.torch.save({n: t.contiguous() for n, t in of.items()}))
    (made / TABLES).mkdir()
    for tables in tables_of(model):
        for record in tables.all_records():
            shutil.copyfile(variants.file(record.component), made / table_file(record.component.name))
    now = replace(scorer, run=variants.run(choice), model=model)
    kept, rows = scorer.kept()
    scores_NT = now.score(rows)
    for t, label in enumerate(scorer.labels):
        at = kept.column_names.index(SCORE + label)
        kept = kept.set_column(at, SCORE + label, pa.array(scores_NT[:, t].copy()))
    pq.write_table(kept, made / CHECK)
    write_text(made / "card.json", to_json(card(now, dataset, told), indent=1) + "\n")


def _parts(variants: Variants, found: Found, batch: Batch) -> list[dict[str, Any]]:
    """Returns what is known of each part, as plain data, the most harmful first."""
    score, seen = variants.scorer.scores, variants.seen
    errors: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(step for part in found.alone for step in part.steps[:-1] if part.kind == "product"):
        sites = [part.name for part in found.alone if part.kind == "product" and name in part.steps]
        made = {site: format_of(name).Product(variants.encoded(site, name)) for site in sites}
        for site, error in output_errors(variants.scorer.model, score, batch, dict(seen), made).items():
            errors.setdefault(site, {})[name] = error
    told = []
    for part, of in found.alone.items():
        format = found.best.choice.get(part, EXACT)
        if part.kind == "table":
            errors[part.name] = {step: variants.error(part, step) for step in part.steps[:-1]}
        product = seen.get(part.name) if part.kind == "product" else None
        told.append(
            {
                "kind": part.kind,
                "name": part.name,
                "shape": variants.shape(part),
                "flops": None if product is None else product.flops,
                "bytes": {step: variants.bytes_of(part, step) for step in part.steps},
                "error": errors.get(part.name, {}),
                "damage": {step: _told(rise) for step, rise in of.items()},
                "format": format,
            }
        )
    return sorted(told, key=lambda one: -max(of["value"] for of in one["damage"].values()))


def _told(rise: Rise) -> dict[str, float]:
    return {"value": rise.value, "error": rise.error, "upper": rise.upper}


def _report(found: Found, checked: Rise | None, parts: list[dict[str, Any]], budget: float) -> dict[str, Any]:
    """Returns what the search found, as plain data."""
    tried = [
        {"formats": {f"{part.kind} {part.name}": name for part, name in one.choice.items()}, "rise": _told(one.rise)}
        for one in found.tried
    ]
    rise = {"rise": _told(found.best.rise), "checked": None if checked is None else _told(checked)}
    return {"budget": budget, "ne": found.ne, **rise, "parts": parts, "tried": tried}


def _milliseconds(*scorers: Scorer) -> list[float]:
    """Returns the median time of a request with CANDIDATES candidates, of models that take turns."""
    taken: list[list[float]] = [[] for _ in scorers]
    _, rows = scorers[0].kept()
    batches = [scorer.encoder.batch(rows[:CANDIDATES]) for scorer in scorers]
    for turn in range(WARM + TURNS):
        for scorer, batch, times in zip(scorers, batches, taken, strict=True):
            begun = time.perf_counter()
            scorer.scores(batch)
            if turn >= WARM:
                times.append(1e3 * (time.perf_counter() - begun))
    return [statistics.median(times) for times in taken]
