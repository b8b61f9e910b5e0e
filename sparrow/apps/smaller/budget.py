"""Which tables to make smaller, and how, so that all of them fit into a budget at the least
loss.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor

from sparrow.analysis import picture
from sparrow.analysis.judge import Judge, judges
from sparrow.analysis.usage import count_usage
from sparrow.apps.fewer.parts import Choice, Part, alone
from sparrow.apps.smaller.alternatives import Alternative, Bytes, Purpose, alternatives, mapped_rows
from sparrow.apps.smaller.damage import Rebuilt, in_floats
from sparrow.apps.smaller.learned_hash import read_earliest
from sparrow.apps.smaller.plans import Option, Plan, add_guesses, curve, rivals
from sparrow.apps.smaller.trainings import Verdict, by_training
from sparrow.core.errors import UserError, suggest
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import Numbering, TableSpec
from sparrow.metrics.intervals import Estimate
from sparrow.trained.build import tables_of
from sparrow.trained.log import open_log
from sparrow.trained.run import Run
from sparrow.trained.scorer import Restored, restore
from sparrow.training.preflight import dense_state

LEAST_SHARE = 0.001  # of the bytes of all tables: a table with less stays as it is


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What is proposed for a budget.

    Args:
        run: the run that was looked at.
        before: its tables as they are.
        plan: what is proposed; `before` where that keeps to the budget already.
        curve: plans for other budgets by rebuilt rows, the smallest first; none where nothing was
            measured.
        budget: the bytes that were allowed.
        verdict: what short trainings say, first of the plan that is proposed; None where there was
            none.
    """

    run: Run
    before: Plan
    plan: Plan
    curve: tuple[Plan, ...]
    budget: int
    verdict: Verdict | None


def propose(
    run_dir: Path,
    budget: int,
    purpose: Purpose,
    *,
    keep: Collection[str] = (),
    rows: int = 20_000,
    trainings: int = 16,
    examples: int = 500_000,
    seeds: int = 3,
    which: str = "best",
    data_dir: str | Path | None = None,
    maps: Path | None = None,
    progress: Progress,
) -> Proposal:
    """Choose smaller tables that fit into a budget: by rebuilt rows which plans are worth a
    training, then by that.

    Args:
        run_dir: of a trained run.
        budget: the most bytes of all its tables.
        purpose: whether these are the bytes to train or to serve.
        keep: tables that stay as they are.
        rows: of the valid part, by which to choose; as many others say what the choice costs.
        trainings: plans that are trained, at most; without any, rebuilt rows choose, and promise
            nothing.
        examples: rows that each training reads, at most; see `by_training`.
        seeds: trainings of the best plan, of its two nearest rivals and of the run as it is.
        which: the checkpoint, see `restore`.
        data_dir: the prepared log; by default that of the run, see `restore`.
        maps: a folder for learned maps of ids, to which those of the plan come, in the place of an
            earlier plan's. Its parent is there. None leaves learned hashing out.
        progress: shows how far it is.

    Raises:
        UserError: for a budget that no plan meets, an unknown table, and a run without a valid
            part.
    """
    restored = restore(run_dir, which=which, data_dir=data_dir)
    run = restored.run
    dataset = open_log(restored)
    specs = _specs(restored, keep)
    dense = dense_state(run)
    now = [
        Alternative(change={}, spec=spec, bytes=Bytes.from_spec(spec, dense), how="kept")
        for spec in specs
    ]
    before = Plan(
        options=tuple(Option(alternative=alternative) for alternative in now), purpose=purpose
    )
    if before.bytes <= budget:
        return Proposal(run=run, before=before, plan=before, curve=(), budget=budget, verdict=None)
    row_judges = judges(dataset, rows)
    with _scratch(maps) as fresh:
        known, hits = _alternatives(restored, dataset, keep, fresh, progress)
        if not trainings:
            known = [_untrained(row) for row in known]
        _check_budget(known, budget, purpose)
        rebuilds = Rebuilt(in_floats(restored), hits)
        del restored  # a second model, with all that its rules keep
        measured = _measure_rebuilt(known, rebuilds, row_judges[0], progress)
        del rebuilds
        options = add_guesses(measured, known, purpose)
        plans = rivals(options, budget, purpose, max(trainings, 1))
        verdict = None
        if trainings:
            how = {"examples": examples, "seeds": seeds}
            verdict = by_training(
                run, run_dir, dataset, plans, row_judges, **how, progress=progress
            )
        plan = plans[0] if verdict is None else verdict.plans[0].plan
        plan = plan if maps is None else _place_maps(plan, maps)
    return Proposal(
        run=run,
        before=before,
        plan=plan,
        curve=curve(list(measured.values()), purpose),
        budget=budget,
        verdict=verdict,
    )


def _check_budget(known: Sequence[Sequence[Alternative]], budget: int, purpose: Purpose) -> None:
    """Check that some plan meets the budget. known: the choices for each table."""
    least = sum(min(alternative.bytes.to(purpose) for alternative in row) for row in known)
    if least > budget:
        room = f"the smallest plan takes {in_units(least)} to {purpose}"
        raise UserError(
            f"--budget: {in_units(budget)} are too few, {room}; give more, or keep fewer tables"
        )


def _untrained(row: Sequence[Alternative]) -> list[Alternative]:
    """Returns the choices for a table whose damage rebuilt rows tell."""
    return [alternative for alternative in row if alternative.how != "trained"]


def _specs(restored: Restored, keep: Collection[str]) -> list[TableSpec]:
    """Returns the specs of a model's tables. keep: names that must be among them."""
    specs: list[TableSpec] = [spec for tables in tables_of(restored.model) for spec in tables.specs]
    names = [spec.name for spec in specs]
    for name in keep:
        if name not in names:
            raise UserError(f"--keep: no table {name!r}{suggest(name, names)}")
    if not specs:
        raise UserError(
            f"{restored.run.run_dir}: its model has no tables, so nothing can be made smaller"
        )
    return specs


def _alternatives(
    restored: Restored,
    dataset: Dataset,
    keep: Collection[str],
    maps: Path | None,
    progress: Progress,
) -> tuple[list[list[Alternative]], dict[str, Tensor]]:
    """Returns the choices for each table, the present one first, and how often training looks up
    each row.

    Tables that are kept, or small, have no other choice.
    """
    specs = _specs(restored, keep)
    dense = dense_state(restored.run)
    sizes = {spec.name: Bytes.from_spec(spec, dense).weights for spec in specs}
    free = [n for n in sizes if sizes[n] >= LEAST_SHARE * sum(sizes.values()) and n not in keep]
    files = (
        {}
        if maps is None
        else _fit_maps(dataset, [spec for spec in specs if spec.name in free], maps, progress)
    )
    hits = {use.name: use.hits_R for use in count_usage(restored, dataset, (), progress)[0]}
    choices = [
        alternatives(
            restored.run,
            restored.schema,
            spec,
            dense,
            files.get(spec.name, ()),
            hits.get(spec.name),
        )
        for spec in specs
    ]
    return [row if row[0].table in free else row[:1] for row in choices], hits


def _fit_maps(
    dataset: Dataset, specs: Sequence[TableSpec], folder: Path, progress: Progress
) -> dict[str, list[Path]]:
    """Fit maps of the ids of tables on the earliest training rows. Returns table -> their files."""
    numberings = {spec.name: Numbering.of(dataset.schema.encodings[spec.name]) for spec in specs}
    sizes = {
        spec.name: row_counts
        for spec in specs
        if (row_counts := mapped_rows(spec, numberings[spec.name]))
    }
    if not sizes:
        return {}
    earliest = read_earliest(dataset, sizes, progress)
    files = dict[str, list[Path]]()
    for name, row_counts in sizes.items():
        files[name] = [folder / f"{quote(name, safe='')}-{rows}.map" for rows in row_counts]
        for rows, path in zip(row_counts, files[name], strict=True):
            earliest.map_of(name, numberings[name], rows).save(path)
    return files


@contextmanager
def _scratch(maps: Path | None) -> Iterator[Path | None]:
    """Gives a folder beside that of the maps, for those that are tried. It goes, however the
    proposal ends.
    """
    if maps is None:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=maps.parent, prefix=f".{maps.name}-") as folder:
        yield Path(folder)


def _place_maps(plan: Plan, folder: Path) -> Plan:
    """Move the maps of a plan into their folder, from which those of an earlier plan go."""
    options = []
    for option in plan.options:
        change = option.alternative.change
        if file := change.get("addressing", {}).get("file"):
            folder.mkdir(exist_ok=True)
            path = Path(file).replace(folder / Path(file).name)
            change = {**change, "addressing": {**change["addressing"], "file": str(path)}}
        options.append(replace(option, alternative=replace(option.alternative, change=change)))
    used = {option.alternative.change.get("addressing", {}).get("file") for option in options}
    for path in folder.glob("*.map"):
        path.unlink() if str(path) not in used else None
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return replace(plan, options=tuple(options))


def _measure_rebuilt(
    known: Sequence[Sequence[Alternative]], rebuilds: Rebuilt, judge: Judge, progress: Progress
) -> dict[str, list[Option]]:
    """Returns the options of each table but for those that are trained."""

    def ne(choice: Choice) -> list[Estimate]:
        with rebuilds.holding([*choice.values()]) as changed:
            return [judge.ne(changed)]

    (base,) = ne({})
    parts = []
    options = dict[str, list[Option]]()
    for now, *rest in known:
        steps = [alternative for alternative in rest if alternative.how == "rebuilt"]
        parts.append(Part(kind="table", name=now.table, steps=(*steps, now)))
        options[now.table] = [Option(alternative=now)]
    for part, alternative, (changed,) in alone(parts, ne, progress):
        rise = changed - base
        options[part.name].append(
            Option(alternative=alternative, damage=rise.value, error=rise.error)
        )
    return options


def draw(proposal: Proposal, path: Path) -> bool:
    """Draw the expected rise of NE against bytes, and the bytes of the largest tables before and
    after.

    Returns whether it did: False where matplotlib is not installed.
    """
    unit, scale = unit_of(proposal.before.bytes)

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        _draw_curve(left, proposal, unit, scale)
        _draw_tables(right, proposal, unit, scale)

    return picture.save(path, paint, size=(10.5, 4))


def _draw_curve(axis: Any, proposal: Proposal, unit: str, scale: float) -> None:
    from matplotlib.ticker import LogLocator

    x = [p.bytes / scale for p in proposal.curve]
    y = [p.damage for p in proposal.curve]
    edges = [[p.damage + sign * 1.96 * p.error for p in proposal.curve] for sign in (-1, 1)]
    axis.axhline(0, color=picture.GREY, linewidth=0.8)
    axis.fill_between(x, *edges, color=picture.BLUE, alpha=0.15, linewidth=0)
    axis.plot(x, y, ".-", linewidth=1, label="rebuilt rows, not trained, 95 %")
    trained = proposal.verdict.plans if proposal.verdict else ()
    kinds = (
        (trained[1:], picture.GREY, "other plans, trained"),
        (trained[:1], picture.ORANGE, "this plan"),
    )
    for plans, color, label in kinds:
        if plans:
            sizes = [entry.plan.bytes / scale for entry in plans]
            damages = [entry.damage for entry in plans]
            errors = [1.96 * entry.error for entry in plans]
            axis.errorbar(sizes, damages, errors, fmt="o", color=color, label=label)
    axis.axvline(
        proposal.budget / scale, color=picture.ORANGE, linewidth=0.8, linestyle="--", label="budget"
    )
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    # the default writes formulas, which the style leaves
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.xaxis.set_minor_formatter(lambda x, _: "")
    axis.set_xlabel(f"{unit} of all tables to {proposal.plan.purpose}")
    axis.set_title("rise of normalised entropy", loc="left")
    axis.legend()


def _draw_tables(axis: Any, proposal: Proposal, unit: str, scale: float) -> None:
    pairs = sorted(
        zip(proposal.before.options, proposal.plan.options, strict=True),
        key=lambda pair: -pair[0].alternative.bytes.to(proposal.plan.purpose),
    )[:15]
    names = [then.alternative.table for then, _ in pairs]
    for options, color, label, width in (
        ([then for then, _ in pairs], "#d5d9de", "now", 0.8),
        ([now for _, now in pairs], picture.BLUE, "planned", 0.45),
    ):
        sizes = [option.alternative.bytes.to(proposal.plan.purpose) / scale for option in options]
        axis.barh(range(len(sizes)), sizes, height=width, color=color, label=label)
    axis.set_yticks(
        range(len(names)), [name if len(name) <= 24 else name[:22] + "…" for name in names]
    )
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    count = len(proposal.plan.options)
    axis.set_title(
        f"the {len(pairs)} largest of {count} tables" if count > len(pairs) else "tables",
        loc="left",
    )
    axis.legend(loc="lower right")


UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def unit_of(count: int) -> tuple[str, float]:
    """Returns the unit that suits so many bytes, and its bytes."""
    return next(((unit, scale) for unit, scale in UNITS.items() if count >= scale), ("B", 1.0))


def in_units(count: int) -> str:
    """Returns bytes in decimal units, as budgets are given."""
    unit, scale = unit_of(count)
    return (
        f"{count / scale:,.3g} {unit}" if count < 999.5 * scale else f"{count / scale:,.0f} {unit}"
    )
