"""A run directory and its log -> what few bits do to each of its products, a page about it, and a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sparrow import data
from sparrow.analysis.numerics.dispatch import as_file, as_in_recipe, verdicts, within_budget
from sparrow.analysis.numerics.found import LEARNED, NORMAL, REAL, SAMPLED, SHOWN, Key, Numerics
from sparrow.analysis.numerics.measure import (
    BATCHES,
    PASSES,
    Site,
    compared,
    damage,
    drawn,
    gathered,
    judges_of,
    standard,
)
from sparrow.analysis.numerics.page import page_of
from sparrow.core.errors import UserError, listed, require, suggest
from sparrow.core.files import to_json, write_text
from sparrow.core.progress import Progress
from sparrow.layers import named_sites
from sparrow.layers.candidates import candidates
from sparrow.layers.precision import native
from sparrow.numerics.errors import Errors
from sparrow.trained.build import check_schema
from sparrow.trained.scorer import restore
from sparrow.training import probe

PAGE, RESULTS, RECIPE = "numerics.html", "numerics.json", "recipe.toml"
MOST_OFF = 0.5  # of a covariance, as a share of its norm, beyond which a person is told


def numerics(
    run_dir: str | Path,
    *,
    shown: str = "mxfp8",
    budget: float = 0.0002,
    rows: int = 20_000,
    which: str = "best",
    progress: Progress | None = None,
) -> Numerics:
    """Measure what few bits do to each product of a trained model. Writes a page, figures and a recipe into `run_dir`.

    Args:
        run_dir: the run directory.
        shown: the precision of the page's table, one of SHOWN.
        budget: how much NE may rise by all products of the recipe together, as a share of it.
        rows: of the valid part, by which NE is judged; as many others check the recipe.
        which: the checkpoint, see `restore`.
        progress: is told how far it is.

    Raises:
        UserError: when run, log and probe file cannot be read, or do not fit together.
    """
    require(least=100, rows=rows)
    if shown not in SHOWN:
        raise UserError(f"precision: {shown!r} is not one that is shown{suggest(shown, SHOWN)}")
    run_dir, told = Path(run_dir), progress or (lambda what, done, total: None)
    found = restore(run_dir, which=which)
    dataset, device = data.open(found.run.data.path), torch.device(found.run.device)
    check_schema(found.schema, dataset.schema, dataset.path)
    file = run_dir / probe.FILE
    learned, step = probe.load(file) if file.exists() else ({}, 0)
    sites = gathered(found, dataset, learned, told)
    if not sites:
        raise UserError(f"{run_dir}: {found.name} has no products of matrices that train")
    notes = of_learned(sites, learned, step if file.exists() else None)
    judges, judged_by = judges_of(dataset, rows)
    chooses, checks = (judge.batch.batch_size for judge in judges)
    notes.append(f"NE: of {chooses:,} rows of {judged_by}; with the recipe, of {checks:,} others")
    notes += [f"the run: {of}" for of in [native(found.run.precision, device)] if of]
    notes += [f"{name}: {one.NEVER}" for name, one in candidates().items() if one.NEVER]
    names = [site.name for site in sites]
    errors = _errors(sites, told)
    before, rises = damage(found, names, SHOWN, judges[0], told)
    alone = verdicts(sites, found.run, told)
    precision, rise = within_budget(found, alone, judges, budget, told)
    done = Numerics(
        run_dir=run_dir,
        shown=shown,
        budget=budget,
        sites=sites,
        errors=errors,
        ne=before[0].value,
        rises=rises,
        verdicts=as_in_recipe(alone, precision),
        precision=precision,
        rise=rise,
        notes=notes,
        unseen=[name for name in named_sites(found.model.model) if name not in names],
    )
    told_of = f"By `sparrow numerics`, for {found.name} of step {found.step} on the machine it ran on."
    recipe = as_file(precision, told_of)
    write_text(run_dir / RECIPE, recipe)
    write_text(run_dir / RESULTS, to_json(done.plain(), indent=1) + "\n")
    write_text(run_dir / PAGE, page_of(done, recipe))
    return done


def of_learned(sites: Sequence[Site], learned: Mapping[str, probe.Learned], step: int | None) -> list[str]:
    """Returns where learned inputs come from, and of which products too few rows were seen.

    Args:
        sites: the products.
        learned: what the probe of the run knows.
        step: of its file; None if there is none.
    """
    remedy = "`sparrow train --probe` learns them while a run trains"
    if step is not None:
        remedy = f"the probe looks at every {probe.EVERY}th step, and saw none of {step:,}"
    notes = [f"learned inputs: of {BATCHES} batches of training that were taken now; {remedy}"]
    if learned:
        rows_seen = max(of.x.count for of in learned.values())
        notes = [f"learned inputs: by the probe of the run, until step {step:,}, from {rows_seen:,} rows"]
    off = {s.name: max(s.learned.x.error, s.learned.grad.error) for s in sites if s.learned is not None}
    if few := sorted((name for name in off if off[name] > MOST_OFF), key=lambda name: -off[name]):
        told = f"covariances of {listed(few)} are likely to be off by half or more"
        notes.append(f"learned inputs: too few rows were seen: {told}; a longer run with --probe sees more")
    return notes


def _errors(sites: Sequence[Site], told: Progress) -> dict[Key, tuple[Errors, float]]:
    found: dict[Key, tuple[Errors, float]] = {}
    for number, site in enumerate(sites):
        told("errors of products", number, len(sites))
        inputs = {REAL: site.operands, NORMAL: standard(site.operands, seed=1)}
        if site.learned is not None:
            inputs[LEARNED] = drawn(site.learned, site.operands.weight, seed=0)
            if site.learned.weight.steps:  # it was seen to change
                inputs[SAMPLED] = drawn(site.learned, None, seed=0)
        for name, operands in inputs.items():
            # W is no operand of its own gradient
            for which in PASSES[:-1] if name == SAMPLED else PASSES:
                for precision, of in compared(which, operands, SHOWN).items():
                    found[site.name, which, name, precision] = of
    told("errors of products", len(sites), len(sites))
    return found
