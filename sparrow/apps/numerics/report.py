"""A run directory and its log -> what few bits do to each of its products, a page about it, and a
recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sparrow.apps.numerics.dispatch import as_file, as_in_recipe, verdicts, within_budget
from sparrow.apps.numerics.measure import (
    BATCHES,
    MOST_OFF,
    PASSES,
    Site,
    compare_precisions,
    damage,
    draw_operands,
    gather_sites,
    judges_of,
    standard,
)
from sparrow.apps.numerics.page import page_of
from sparrow.apps.numerics.results import LEARNED, NORMAL, REAL, SAMPLED, SHOWN, Key, Numerics
from sparrow.core.errors import UserError, listed, require, suggest
from sparrow.core.files import to_json, write_text
from sparrow.core.progress import Progress
from sparrow.extensions.low_precision import probe
from sparrow.extensions.low_precision.candidates import candidates
from sparrow.layers.precision import native
from sparrow.layers.site import named_sites
from sparrow.numerics.errors import Errors
from sparrow.trained.log import open_log
from sparrow.trained.scorer import restore

PAGE = "numerics.html"
RESULTS = "numerics.json"
RECIPE = "recipe.toml"


def numerics(
    run_dir: str | Path,
    *,
    shown: str = "mxfp8",
    budget: float = 0.0002,
    rows: int = 20_000,
    which: str = "best",
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Numerics:
    """Measure what few bits do to each product of a trained model. Writes a page, figures and a
    recipe into `run_dir`.

    Args:
        run_dir: the run directory.
        shown: the precision of the page's table, one of SHOWN.
        budget: how much NE may rise by all products of the recipe together, as a share of it.
        rows: of the valid part, by which NE is judged; as many others check the recipe.
        which: the checkpoint, see `restore`.
        data_dir: the prepared log; by default that of the run, see `restore`.
        progress: shows how far it is.

    Raises:
        UserError: when run, log and probe file cannot be read, or do not fit together.
    """
    require(least=100, rows=rows)
    if shown not in SHOWN:
        raise UserError(f"precision: {shown!r} is not one that is shown{suggest(shown, SHOWN)}")
    run_dir = Path(run_dir)
    progress = progress or (lambda *_: None)
    restored = restore(run_dir, which=which, data_dir=data_dir)
    dataset = open_log(restored)
    device = torch.device(restored.run.device)
    learned, step = probe.load_of_run(run_dir)
    sites = gather_sites(restored, dataset, learned, progress)
    if not sites:
        raise UserError(f"{run_dir}: {restored.name} has no products of matrices that train")
    notes = describe_learned_inputs(sites, learned, step)
    judges, judged_by = judges_of(dataset, rows)
    chooses, checks = (judge.batch.batch_size for judge in judges)
    notes.append(f"NE: of {chooses:,} rows of {judged_by}; with the recipe, of {checks:,} others")
    notes += [
        f"the run: {note}"
        for note in (native(restored.run.precision, device), restored.mixing)
        if note
    ]
    notes += [
        f"{name}: {candidate.NEVER}" for name, candidate in candidates().items() if candidate.NEVER
    ]
    names = [site.name for site in sites]
    errors = _errors(sites, progress)
    before, rises = damage(restored, names, SHOWN, judges[0], progress)
    alone = verdicts(sites, restored.run, progress)
    precision, rise = within_budget(restored, alone, judges, budget, progress)
    results = Numerics(
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
        unseen=[name for name in named_sites(restored.model.model) if name not in names],
    )
    _write(results, f"{restored.name} of step {restored.step}")
    return results


def _write(results: Numerics, model: str) -> None:
    """Write the page, the figures and the recipe. model: its name in words."""
    header = f"By `sparrow numerics`, for {model} on the machine it ran on."
    recipe = as_file(results.precision, header)
    write_text(results.run_dir / RECIPE, recipe)
    write_text(results.run_dir / RESULTS, to_json(results.plain(), indent=1) + "\n")
    write_text(results.run_dir / PAGE, page_of(results, recipe))


def describe_learned_inputs(
    sites: Sequence[Site], learned: Mapping[str, probe.Learned], step: int | None
) -> list[str]:
    """Describe where learned inputs come from, and of which products too few rows were seen.

    Args:
        sites: the products.
        learned: what the probe of the run knows.
        step: of its file; None if there is none.
    """
    known = {site.name: site.learned for site in sites if site.learned is not None}
    from_run = [name for name in known if known[name] is learned.get(name)]
    from_batches = [name for name in known if name not in from_run]
    notes = []
    if from_run:
        rows_seen = max(learned[name].x.count for name in from_run)
        notes.append(
            f"learned inputs: by the probe of the run, until step {step:,}, from {rows_seen:,} rows"
        )
    if from_batches or not from_run:
        why = "`sparrow train --probe` learns them while a run trains"
        if step is not None:
            why = (
                f"the probe looks at every {probe.EVERY}th step, and saw too few rows of them until"
                f" step {step:,}"
            )
        whose = f", of {listed(from_batches)}" if from_run else ""
        notes.append(
            f"learned inputs{whose}: of {BATCHES} batches of training that were taken now; {why}"
        )
    few = [name for name in known if known[name].error > MOST_OFF]
    if few := sorted(few, key=lambda name: -known[name].error):
        fact = f"covariances of {listed(few)} are likely to be off by half or more"
        notes.append(
            f"learned inputs: too few rows were seen: {fact}; a longer run with --probe sees more"
        )
    return notes


def _errors(sites: Sequence[Site], progress: Progress) -> dict[Key, tuple[Errors, float]]:
    errors: dict[Key, tuple[Errors, float]] = {}
    for number, site in enumerate(sites):
        progress("errors of products", number, len(sites))
        inputs = {REAL: site.operands, NORMAL: standard(site.operands, seed=1)}
        if site.learned is not None:
            inputs[LEARNED] = draw_operands(site.learned, site.operands.weight, seed=0)
            if site.learned.weight.steps:  # it was seen to change
                inputs[SAMPLED] = draw_operands(site.learned, None, seed=0)
        for name, operands in inputs.items():
            # W is no operand of its own gradient
            for pass_name in PASSES[:-1] if name == SAMPLED else PASSES:
                for precision, error in compare_precisions(pass_name, operands, SHOWN).items():
                    errors[site.name, pass_name, name, precision] = error
    progress("errors of products", len(sites), len(sites))
    return errors
