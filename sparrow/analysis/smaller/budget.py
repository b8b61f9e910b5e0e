"""Which tables to make smaller, and how, so that all of them fit into a budget at the least expected loss."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor

from sparrow import data
from sparrow.analysis import picture
from sparrow.analysis.judge import Judge, judges
from sparrow.analysis.smaller import knapsack
from sparrow.analysis.smaller.alternatives import Alternative, Bytes, Purpose, alternatives, changed, mapped_rows
from sparrow.analysis.smaller.damage import SHORT, Rebuilt, by_training, in_floats
from sparrow.analysis.smaller.learned_hash import early
from sparrow.analysis.usage import usage
from sparrow.core.errors import UserError, suggest
from sparrow.core.files import whole
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import Numbering, TableSpec
from sparrow.metrics.intervals import Estimate
from sparrow.trained.build import check_schema, tables_of
from sparrow.trained.run import Run
from sparrow.trained.scorer import Restored, restore
from sparrow.training.preflight import dense_state

LEAST_SHARE = 0.001  # of the bytes of all tables: a table with less stays as it is
POINTS = 24  # of the curve


@dataclass(frozen=True, kw_only=True)
class Option:
    """A choice for a table, with the rise of NE that it costs and the standard error of it."""

    alternative: Alternative
    damage: float = 0.0
    error: float = 0.0

    @property
    def cost(self) -> float:
        """What the choice goes by: the damage and an error, where a gain counts as none.

        Else the luckiest measurements would be chosen, and tables made smaller for which there is room.
        """
        return max(self.damage, 0.0) + self.error


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An option for each table.

    The damage is the sum of the tables' damages, each measured alone, as if none made another one worse. Its error is
    the root of the sum of their squared errors.
    """

    options: tuple[Option, ...]
    purpose: Purpose

    @property
    def bytes(self) -> int:
        """Bytes of all tables."""
        return sum(one.alternative.bytes.to(self.purpose) for one in self.options)

    @property
    def damage(self) -> float:
        """By how much NE is expected to rise."""
        return sum(one.damage for one in self.options)

    @property
    def error(self) -> float:
        """The standard error of the damage."""
        return math.hypot(*(one.error for one in self.options))

    def run(self, run: Run, run_dir: str) -> Run:
        """Returns a run with these tables.

        Args:
            run: the one that was looked at.
            run_dir: of the new one.
        """
        changes = {one.alternative.table: one.alternative.change for one in self.options if one.alternative.change}
        return replace(run, run_dir=run_dir, tables=changed(run.tables, changes))


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What is proposed for a budget.

    Args:
        run: the run that was looked at.
        before: its tables as they are.
        plan: what is proposed.
        curve: plans for other budgets, the smallest first.
        budget: the bytes that were allowed.
        checked: by how much NE rises on other rows when everything that is rebuilt is put in at once; None where
            nothing is.
        unmeasured: how many choices were left out, because only training can say what they cost.
    """

    run: Run
    before: Plan
    plan: Plan
    curve: tuple[Plan, ...]
    budget: int
    checked: Estimate | None
    unmeasured: int


def propose(
    run_dir: Path,
    budget: int,
    purpose: Purpose,
    *,
    keep: Collection[str] = (),
    rows: int = 20_000,
    trainings: int = 3,
    which: str = "best",
    maps: Path | None = None,
    told: Progress,
) -> Proposal:
    """Measure what smaller tables cost, and choose those that fit into a budget at the least expected loss.

    Args:
        run_dir: of a trained run.
        budget: the most bytes of all its tables.
        purpose: whether these are the bytes to train or to serve.
        keep: tables that stay as they are.
        rows: of the valid part, by which to choose; as many others check the choice.
        trainings: choices that are measured by short trainings, at most.
        which: the checkpoint, see `restore`.
        maps: a folder for learned maps of ids, to which those of the plan come, in the place of an earlier plan's. Its
            parent is there. None leaves learned hashing out.
        told: is told how far it is.

    Raises:
        UserError: for a budget that no plan meets, an unknown table, and a run without a valid part.
    """
    found = restore(run_dir, which=which)
    run, dataset = found.run, data.open(found.run.data.path)
    check_schema(found.schema, dataset.schema, dataset.path)
    chooses, checks = judges(dataset, rows)
    with _scratch(maps) as fresh:
        known, hits = _alternatives(found, dataset, keep, fresh, told)
        now = {of[0].table: of[0].bytes.to(purpose) for of in known}
        share = budget / sum(now.values())
        # the largest tables first, of these the choices that save as large a share as has to be saved
        only_trained = sorted(
            (one for of in known for one in of if one.how == "trained"),
            key=lambda one: (-now[one.table], abs(math.log(one.bytes.to(purpose) / (share * now[one.table])))),
        )
        trained = only_trained[:trainings]
        known = [[one for one in of if one.how != "trained" or one in trained] for of in known]
        least = sum(min(one.bytes.to(purpose) for one in of) for of in known)
        if least > budget:
            room = f"the smallest plan takes {in_units(least)} to {purpose}"
            raise UserError(f"--budget: {in_units(budget)} are too few, {room}; give more, or keep fewer tables")
        rebuilds = Rebuilt(in_floats(found), hits)
        del found  # a second model, with all that its rules keep
        measured = _rebuilt(known, rebuilds, chooses, told)
        if trained:
            damages = by_training(run, _steps(run, dataset), trained, chooses, told)
            for one, (damage, error) in zip(trained, damages, strict=True):
                measured[one.table].append(Option(alternative=one, damage=damage, error=error))
        options = list(measured.values())
        before, plan = Plan(options=tuple(of[0] for of in options), purpose=purpose), planned(options, budget, purpose)
        checked, curve = _checked(plan, rebuilds, checks), _curve(options, least, before)
        plan = plan if maps is None else _placed(plan, maps)
    return Proposal(
        run=run,
        before=before,
        plan=plan,
        curve=curve,
        budget=budget,
        checked=checked,
        unmeasured=len(only_trained) - len(trained),
    )


def _alternatives(
    found: Restored, dataset: Dataset, keep: Collection[str], maps: Path | None, told: Progress
) -> tuple[list[list[Alternative]], dict[str, Tensor]]:
    """Returns the choices for each table, the present one first, and how often training looks up each row.

    Tables that are kept, or small, have no other choice.
    """
    specs: list[TableSpec] = [spec for tables in tables_of(found.model) for spec in tables.specs]
    names = [spec.name for spec in specs]
    for name in keep:
        if name not in names:
            raise UserError(f"--keep: no table {name!r}{suggest(name, names)}")
    if not specs:
        raise UserError(f"{found.run.run_dir}: its model has no tables, so nothing can be made smaller")
    dense = dense_state(found.run)
    sizes = {spec.name: Bytes.of(spec, dense).weights for spec in specs}
    free = [n for n in names if sizes[n] >= LEAST_SHARE * sum(sizes.values()) and n not in keep]
    files = {} if maps is None else _mapped(dataset, [spec for spec in specs if spec.name in free], maps, told)
    hits = {use.name: use.hits_R for use in usage(found, dataset, (), told)[0]}
    each = [
        alternatives(found.run, found.schema, spec, dense, files.get(spec.name, ()), hits.get(spec.name))
        for spec in specs
    ]
    return [of if of[0].table in free else of[:1] for of in each], hits


def _mapped(dataset: Dataset, specs: Sequence[TableSpec], folder: Path, told: Progress) -> dict[str, list[Path]]:
    """Fit maps of the ids of tables on the earliest training rows. Returns table -> their files."""
    numberings = {spec.name: Numbering.of(dataset.schema.encodings[spec.name]) for spec in specs}
    sizes = {spec.name: of for spec in specs if (of := mapped_rows(spec, numberings[spec.name]))}
    if not sizes:
        return {}
    found, files = early(dataset, sizes, told), dict[str, list[Path]]()
    for name, of in sizes.items():
        files[name] = [folder / f"{quote(name, safe='')}-{rows}.map" for rows in of]
        for rows, path in zip(of, files[name], strict=True):
            found.map_of(name, numberings[name], rows).save(path)
    return files


@contextmanager
def _scratch(maps: Path | None) -> Iterator[Path | None]:
    """Gives a folder beside that of the maps, for those that are tried. It goes, however the proposal ends."""
    if maps is None:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=maps.parent, prefix=f".{maps.name}-") as folder:
        yield Path(folder)


def _placed(plan: Plan, folder: Path) -> Plan:
    """Returns the plan with its maps in their folder, from which those of an earlier plan go."""
    options = []
    for one in plan.options:
        change = one.alternative.change
        if file := change.get("addressing", {}).get("file"):
            folder.mkdir(exist_ok=True)
            path = Path(file).replace(folder / Path(file).name)
            change = {**change, "addressing": {**change["addressing"], "file": str(path)}}
        options.append(replace(one, alternative=replace(one.alternative, change=change)))
    used = {one.alternative.change.get("addressing", {}).get("file") for one in options}
    for path in folder.glob("*.map"):
        path.unlink() if str(path) not in used else None
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return replace(plan, options=tuple(options))


def _rebuilt(
    known: Sequence[Sequence[Alternative]], rebuilds: Rebuilt, judge: Judge, told: Progress
) -> dict[str, list[Option]]:
    """Returns the options of each table but for those that are trained."""
    base = judge.ne(rebuilds.found)
    done, total = 0, sum(one.how == "rebuilt" for of in known for one in of)
    options: dict[str, list[Option]] = {}
    for of in known:
        found = options[of[0].table] = [Option(alternative=of[0])]
        for one in of[1:]:
            if one.how == "rebuilt":
                with rebuilds.holding([one]) as changed_one:
                    rise = judge.ne(changed_one) - base
                found.append(Option(alternative=one, damage=rise.value, error=rise.error))
                done += 1
                told("scored smaller tables", done, total)
    return options


def _steps(run: Run, dataset: Dataset) -> int:
    return math.ceil(SHORT * dataset.rows() / (run.data.batch_size * run.loop.accumulate))


def planned(options: Sequence[Sequence[Option]], budget: int, purpose: Purpose) -> Plan:
    """Returns the plan that fits at the least cost."""
    classes = [[(one.alternative.bytes.to(purpose), one.cost) for one in of] for of in options]
    chosen = knapsack.choose(classes, budget)
    return Plan(options=tuple(of[j] for of, j in zip(options, chosen, strict=True)), purpose=purpose)


def _curve(options: Sequence[Sequence[Option]], least: int, before: Plan) -> tuple[Plan, ...]:
    """Returns plans from the smallest to one with all bytes of today, in even steps of the logarithm."""
    factor = before.bytes / max(least, 1)
    budgets = [least, *(int(least * factor ** (i / POINTS)) for i in range(1, POINTS)), max(before.bytes, least)]
    return tuple(planned(options, budget, before.purpose) for budget in budgets)


def _checked(plan: Plan, rebuilds: Rebuilt, judge: Judge) -> Estimate | None:
    """Returns by how much NE rises with all that is rebuilt at once."""
    chosen = [one.alternative for one in plan.options if one.alternative.how == "rebuilt"]
    if not chosen:
        return None
    base = judge.ne(rebuilds.found)
    with rebuilds.holding(chosen) as together:
        return judge.ne(together) - base


def draw(found: Proposal, path: Path) -> bool:
    """Draw the expected rise of NE against bytes, and the bytes of the largest tables before and after.

    Returns whether it did: False where matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    unit, scale = unit_of(found.before.bytes)
    with matplotlib.rc_context(picture.STYLE):
        figure = Figure(figsize=(10.5, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_curve(left, found, unit, scale)
        _draw_tables(right, found, unit, scale)
        with whole(path) as partial:
            figure.savefig(partial, dpi=130, format="png")
    return True


def _draw_curve(axis: Any, found: Proposal, unit: str, scale: float) -> None:
    from matplotlib.ticker import LogLocator

    x, y = [p.bytes / scale for p in found.curve], [p.damage for p in found.curve]
    edges = [[p.damage + sign * 1.96 * p.error for p in found.curve] for sign in (-1, 1)]
    axis.axhline(0, color=picture.GREY, linewidth=0.8)
    axis.fill_between(x, *edges, color=picture.BLUE, alpha=0.15, linewidth=0)
    axis.plot(x, y, ".-", linewidth=1, label="plans for other budgets, 95 %")
    axis.errorbar(
        [found.plan.bytes / scale],
        [found.plan.damage],
        [1.96 * found.plan.error],
        fmt="o",
        color=picture.ORANGE,
        label="this plan",
    )
    axis.axvline(found.budget / scale, color=picture.ORANGE, linewidth=0.8, linestyle="--", label="budget")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")  # the default writes formulas, which the style leaves
    axis.xaxis.set_minor_formatter(lambda x, _: "")
    axis.set_xlabel(f"{unit} of all tables to {found.plan.purpose}")
    axis.set_title("expected rise of normalised entropy", loc="left")
    axis.legend()


def _draw_tables(axis: Any, found: Proposal, unit: str, scale: float) -> None:
    pairs = sorted(
        zip(found.before.options, found.plan.options, strict=True),
        key=lambda pair: -pair[0].alternative.bytes.to(found.plan.purpose),
    )[:15]
    names = [then.alternative.table for then, _ in pairs]
    for options, color, label, width in (
        ([then for then, _ in pairs], "#d5d9de", "now", 0.8),
        ([now for _, now in pairs], picture.BLUE, "planned", 0.45),
    ):
        sizes = [one.alternative.bytes.to(found.plan.purpose) / scale for one in options]
        axis.barh(range(len(sizes)), sizes, height=width, color=color, label=label)
    axis.set_yticks(range(len(names)), [name if len(name) <= 24 else name[:22] + "…" for name in names])
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    count = len(found.plan.options)
    axis.set_title(f"the {len(pairs)} largest of {count} tables" if count > len(pairs) else "tables", loc="left")
    axis.legend(loc="lower right")


UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def unit_of(count: int) -> tuple[str, float]:
    """Returns the unit that suits so many bytes, and its bytes."""
    return next(((unit, scale) for unit, scale in UNITS.items() if count >= scale), ("B", 1.0))


def in_units(count: int) -> str:
    """Returns bytes in decimal units, as budgets are given."""
    unit, scale = unit_of(count)
    return f"{count / scale:,.3g} {unit}" if count < 999.5 * scale else f"{count / scale:,.0f} {unit}"
