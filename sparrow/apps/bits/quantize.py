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
from sparrow.analysis.judge import BATCH, judges
from sparrow.apps.bits.calibrate import observe, output_errors
from sparrow.apps.bits.variants import EXACT, Inputs, Variants
from sparrow.apps.fewer.parts import Choice
from sparrow.apps.fewer.search import SearchResult, search
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
from sparrow.trained.build import check_schema, records_of

REPORT = "quantized.json"
CANDIDATES, WARM, TURNS = 100, 3, 21  # of the request that is timed


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """What `quantize` wrote, and how it came to it.

    scorer: the new model. result: of the search, which checked it on as many other rows of the
    valid part. parts: what is known of each. ms_before, ms_after: of a request with CANDIDATES
    rows, of one thread.
    """

    scorer: Scorer
    result: SearchResult
    budget: float
    parts: list[dict[str, Any]]
    ms_before: float
    ms_after: float

    def bytes_of(self, choice: Choice) -> int:
        """Returns the bytes of all parts with some formats."""
        names = {(part.kind, part.name): name for part, name in choice.items()}
        return sum(
            part["bytes"][names.get((part["kind"], part["name"]), EXACT)] for part in self.parts
        )

    @property
    def needed(self) -> int | None:
        """How many rows or sessions would show that the narrowest formats keep to the budget; None
        when they do not.
        """
        narrowest = self.result.tried[0].rise
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
    progress: Progress | None = None,
) -> Quantized:
    """Write a model folder with tables and products in fewer bits.

    Ranges of inputs are calibrated on the end of the training part, and damage is measured on the
    valid part. The test part is read for the card alone.

    Args:
        model: a folder in fp32, by `sparrow export`.
        out: the new folder, which must not exist.
        prepared: the prepared log that the model was trained on.
        budget: how much NE may rise, as a share of it; infinite takes the narrowest formats.
        tables: the narrowest format of rows, or "fp32".
        products: the narrowest format of products, or "fp32".
        inputs: see `Variants`.
        rows: of the valid part, by which to choose, as many others of it, to check the choice, and
            of the training part, to calibrate. A valid part of fewer is cut in halves.
        progress: shows how far it is.

    Raises:
        UserError: when a folder or log cannot be read, they do not fit together, or there is
            nothing to calibrate on.
    """
    progress = progress or (lambda *_: None)
    out = Path(out)
    scorer = load(model)
    dataset = data.open(prepared)
    if PRODUCTS in scorer.folder.manifest["files"]:
        raise UserError(f"{model}: in fewer bits already; quantise the folder that it was made of")
    if not scorer.run.precision.is_plain:
        why = f"its products are computed in {scorer.run.precision.name}, as when it was trained"
        raise UserError(f"{model}: {why}; train and export a run with --precision fp32")
    check_schema(scorer.schema, dataset.schema, dataset.path)
    about = {"model": scorer.name, "step": scorer.step, "parent": None, "number": 0}
    about["quantized_from"] = scorer.folder.digest
    with new_folder(out, about, check=lambda folder: load(folder).folder) as new:
        path = new.path
        stats = observe(scorer.model, scorer.scores, last(dataset, rows))
        scratch = path.parent / "rows"
        scratch.mkdir()
        variants = Variants(scorer, stats, scratch, inputs=inputs)
        row_judges = judges(dataset, rows)
        result = search(variants.parts(tables, products), variants.ne, row_judges, budget, progress)
        chooses = row_judges[0].batch
        parts = _parts(variants, result, chooses.part(0, min(4096, chooses.batch_size)))
        _write(path, variants, result.best.choice, dataset, progress)
        write_text(path / REPORT, to_json(_report(result, parts, budget), indent=1) + "\n")
    now = load(out, checked=new.folder.checked)
    before, after = _milliseconds(scorer, now)
    return Quantized(
        scorer=now, result=result, budget=budget, parts=parts, ms_before=before, ms_after=after
    )


def last(dataset: Dataset, rows: int) -> list[Batch]:
    """Returns the last rows of the training part, in batches.

    Raises:
        UserError: when it has none.
    """
    if not dataset.rows("train"):
        raise UserError(
            f"{dataset.path}: no training rows to calibrate on; give the log that the model was"
            " trained on"
        )
    loader = dataset.loader(BATCH, split="train", dedup="off")
    first = max(len(loader) - -(-rows // BATCH), 0)
    loader.load_state_dict({"epoch": 0, "batch": first, "batch_size": BATCH})
    return list(loader)


def _write(
    folder: Path, variants: Variants, choice: Choice, dataset: Dataset, progress: Progress
) -> None:
    """Write the files of a model folder, but for its manifest."""
    scorer = variants.scorer
    model = variants.model(choice)
    before = scorer.folder.path
    for name in scorer.folder.manifest["files"]:
        if not name.startswith(TABLES) and name not in (
            DENSE,
            CHECK,
            "card.json",
            "run.toml",
            REPORT,
        ):
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            shutil.copyfile(before / name, folder / name)
    settings = read_toml(before / "run.toml")  # as written, with paths beside it
    overrides = to_dict(variants.run(choice).tables, only=("overrides",))["overrides"]
    settings.setdefault("tables", {})["overrides"] = overrides
    write_text(
        folder / "run.toml", write_toml(settings, header="A trained model, by `sparrow quantize`.")
    )
    dense, few_bits = variants.stored(choice)
    for name, tensors in ((DENSE, dense), (PRODUCTS, few_bits)):
        if tensors or name == DENSE:
            (folder / name).write_bytes(
                safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()})
            )
    (folder / TABLES).mkdir()
    for record in records_of(model):
        shutil.copyfile(variants.file(record.component), folder / table_file(record.component.name))
    now = replace(scorer, run=variants.run(choice), model=model)
    golden, rows = scorer.golden_rows()
    scores_NT = now.score(rows)
    for t, label in enumerate(scorer.labels):
        at = golden.column_names.index(SCORE + label)
        golden = golden.set_column(at, SCORE + label, pa.array(scores_NT[:, t].copy()))
    pq.write_table(golden, folder / CHECK)
    write_text(folder / "card.json", to_json(card(now, dataset, progress), indent=1) + "\n")


def _parts(variants: Variants, result: SearchResult, batch: Batch) -> list[dict[str, Any]]:
    """Describe each part, as plain data, the most harmful first."""
    score = variants.scorer.scores
    stats = variants.stats
    errors: dict[str, dict[str, float]] = {}
    product_parts = [part for part in result.alone if part.kind == "product"]
    names: dict[str, None] = {}
    for part in product_parts:
        names |= dict.fromkeys(part.steps[:-1])
    for name in names:
        sites = [part.name for part in product_parts if name in part.steps]
        products = {site: format_of(name).Product(variants.encoded(site, name)) for site in sites}
        for site, error in output_errors(
            variants.scorer.model, score, batch, dict(stats), products
        ).items():
            errors.setdefault(site, {})[name] = error
    described = []
    for part, rises in result.alone.items():
        format = result.best.choice.get(part, EXACT)
        if part.kind == "table":
            errors[part.name] = {step: variants.error(part, step) for step in part.steps[:-1]}
        product = stats.get(part.name) if part.kind == "product" else None
        described.append(
            {
                "kind": part.kind,
                "name": part.name,
                "shape": variants.shape(part),
                "flops": None if product is None else product.flops,
                "bytes": {step: variants.bytes_of(part, step) for step in part.steps},
                "error": errors.get(part.name, {}),
                "damage": {step: rise.plain() for step, rise in rises.items()},
                "format": format,
            }
        )
    return sorted(
        described, key=lambda entry: -max(rise["upper"] for rise in entry["damage"].values())
    )


def _report(result: SearchResult, parts: list[dict[str, Any]], budget: float) -> dict[str, Any]:
    """Returns the result of the search as plain data."""
    tried = []
    for attempt in result.tried:
        formats = {f"{part.kind} {part.name}": name for part, name in attempt.choice.items()}
        tried.append({"formats": formats, "rise": attempt.rise.plain()})
    rise = {"rise": result.best.rise.plain(), "checked": result.checked.plain()}
    return {"budget": budget, "ne": result.ne, **rise, "parts": parts, "tried": tried}


def _milliseconds(*scorers: Scorer) -> list[float]:
    """Returns the median time of a request with CANDIDATES candidates, of models that take
    turns.
    """
    series: list[list[float]] = [[] for _ in scorers]
    _, rows = scorers[0].golden_rows()
    batches = [scorer.encoder.batch(rows[:CANDIDATES]) for scorer in scorers]
    for turn in range(WARM + TURNS):
        for scorer, batch, times in zip(scorers, batches, series, strict=True):
            begun = time.perf_counter()
            scorer.scores(batch)
            if turn >= WARM:
                times.append(1e3 * (time.perf_counter() - begun))
    return [statistics.median(times) for times in series]
