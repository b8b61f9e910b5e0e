"""Show what a run's tables cost, propose smaller ones, fit a map of ids to rows, or make a checkpoint whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from sparrow.analysis.smaller.budget import Proposal

By = Literal["both", "counts", "vectors"]


def tables(
    place: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    budget: str | None = None,
    purpose: Annotated[Literal["train", "serve"], tyro.conf.arg(name="for")] = "train",
    keep: tuple[str, ...] = (),
    trainings: int = 3,
    sample: int = 20_000,
    out: Path | None = None,
    picture: Path | None = None,
    checkpoint: str = "best",
    fit: Annotated[str | None, tyro.conf.arg(metavar="TABLE")] = None,
    rows: int | None = None,
    share: float = 0.1,
    numbers: int = 2,
    by: By = "both",
    whole: Annotated[str | None, tyro.conf.arg(metavar="CHECKPOINT")] = None,
) -> None:
    """Show what a run's tables cost, propose smaller ones, fit a map of ids to rows, or make a checkpoint whole.

    With --budget, smaller tables are put into the trained run, and rows of the valid part say what each costs. The
    least expected loss within the budget is written as a run file: `sparrow train RUN/smaller.toml` trains it.

    Args:
        place: The directory of a `sparrow train` job; for --fit also a prepared log.
        budget: Bytes of all tables, such as 200MB or 1.5GB.
        purpose: Whether the budget is for training, with what the optimizer keeps, or for serving.
        keep: Tables that stay as they are.
        trainings: Choices that are measured by short trainings, at most; 0 leaves out what only training can judge.
        sample: Rows of the valid part by which to choose; as many others check the choice.
        out: The run file, RUN/smaller.toml by default; of --fit, the map.
        picture: The picture, RUN/tables.png by default.
        checkpoint: "best" (else the last), "last", or a step number.
        fit: Fit a map of this table's ids to --rows rows, for the addressing "learned".
        rows: Rows of a table with the map that is fitted.
        share: Earliest share of the training rows, to which the map is fitted.
        numbers: Numbers of the vectors that are learnt of the ids to fit the map, 1 to 4.
        by: What the map goes by: counts of the ids, vectors that are learnt of them, or both.
        whole: Write all rows of tables on an SSD into this checkpoint ("last", "best" or a step number). Then the run
            directory is all that it needs.
    """
    from sparrow.cli import _show
    from sparrow.core.errors import UserError, require

    if whole is not None and (fit is not None or budget is not None):
        raise UserError("--whole: writes a checkpoint and does nothing else; leave out --fit and --budget")
    if fit is not None:
        if rows is None or out is None:
            raise UserError(f"--fit: {'--out' if rows else '--rows'} is missing; give --rows N and --out FILE.map")
        _fit(place, fit, rows, out, share=share, numbers=numbers, by=by)
        return
    if whole is not None:
        from sparrow.training.whole import make_whole

        with _show.progress_bar() as told:
            lines = make_whole(place, whole, told)
        _show.notes(lines)
        return
    require(least=0, trainings=trainings)
    require(least=100, sample=sample)
    if budget is None:
        if out is not None or picture is not None or keep:
            raise UserError("--out, --picture, --keep: of a proposal; give --budget too, such as --budget 200MB")
        _look(place, checkpoint)
        return
    from sparrow.analysis.smaller.budget import draw, propose

    out, picture = out or place / "smaller.toml", picture or place / "tables.png"
    for path, suffix in ((picture, ".png"), (out, ".toml")):
        _check_name(path, suffix, place)
    allowed, maps = parsed(budget), out.with_name(f"{out.stem}-maps")
    with _show.progress_bar() as told:
        found = propose(
            place, allowed, purpose, keep=keep, rows=sample, trainings=trainings, which=checkpoint, maps=maps, told=told
        )
    found.plan.run(found.run, f"{found.run.run_dir}-{out.stem}").save(out)  # at once: the earlier plan's maps are gone
    _show_proposal(found)
    drawn = [f"{picture}: NE against bytes"] if draw(found, picture) else []
    for line in (f"{out}: `sparrow train {out}` trains it", *drawn):
        _show.out.print(line, markup=False, soft_wrap=True)


def parsed(budget: str, flag: str = "--budget") -> int:
    """Returns how many bytes a text says, such as "200MB", "12GiB" or "1_500_000". flag: where it was given.

    Raises:
        UserError: when it says none, or less than one.
    """
    from sparrow.analysis.smaller.budget import UNITS
    from sparrow.core.errors import UserError

    found = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)", budget.strip())
    units = {unit.lower(): scale for unit, scale in UNITS.items()} | {"kib": 2**10, "mib": 2**20, "gib": 2**30}
    scale = units.get((found[2] or "B").lower()) if found else None
    count = int(float(found[1].replace("_", "").replace(",", "")) * scale) if found and scale else 0
    if not count:
        raise UserError(f"{flag}: {budget!r} is no number of bytes; write such as 200MB, 1.5GB or 800kB")
    return count


def _check_name(path: Path, suffix: str, place: Path) -> None:
    """Check where a file is to be written, before the work: its folder, and that no file of another kind is meant."""
    from sparrow.core.errors import UserError

    if path.suffix != suffix:
        raise UserError(f"{path}: not a name for this file; end it in {suffix}")
    if path.parent != place and not path.resolve().parent.is_dir():
        raise UserError(f"{path}: no folder {path.resolve().parent}; make it first")


def _look(place: Path, checkpoint: str) -> None:
    """Print a line for each component, and what all tables take."""
    from sparrow import data
    from sparrow.analysis import elements
    from sparrow.analysis.smaller.alternatives import Bytes
    from sparrow.analysis.smaller.budget import in_units, unit_of
    from sparrow.analysis.usage import usage
    from sparrow.cli import _show
    from sparrow.core.errors import UserError
    from sparrow.trained.build import check_schema, tables_of
    from sparrow.trained.scorer import restore
    from sparrow.training.preflight import dense_state

    found = restore(place, which=checkpoint, calibrated=False)  # nothing is scored
    dataset = data.open(found.run.data.path)
    check_schema(found.schema, dataset.schema, dataset.path)
    with _show.progress_bar() as told:
        uses = {use.name: use for use in usage(found, dataset, (), told)[0]}
    if not uses:
        raise UserError(f"{place}: its model has no tables; there is nothing to show")
    dense = dense_state(found.run)
    specs = [spec for each in tables_of(found.model) for spec in each.specs]
    every = {spec.name: Bytes.of(spec, dense) for spec in specs}
    unit, scale = unit_of(max(one.weights for one in every.values()) // 10)
    lines = []
    for spec in specs:
        whole = every[spec.name]
        beside = [whole.map, whole.combine + whole.combine_state]  # of the table, in the line of its first component
        for part in spec.components:
            use = uses[part.name]
            state = use.bytes_state - part.bytes_ids  # these are in the map
            sizes = [f"{n / scale:,.1f}" if n else "" for n in (use.bytes_weight, state, *beside)]
            shares = (f"{100 * x:.1f}" for x in (use.share_of_top(0.01), use.share_of_top(0.1), use.share_unlearnt))
            lines.append([part.name, use.stored[0], f"{part.rows:,}", str(part.dim), *sizes, *shares])
            beside = [0, 0]
    header = ["component", "format", "rows", "dim", "weights", "state", "map", "combine"]
    header += ["top 1 %", "top 10 %", "never learnt"]
    header, lines = elements.without_gaps(header, lines)
    title = f"tables of {place}; bytes in {unit}"
    table = _show.Table(title=title, title_justify="left", box=_show.SLIM, padding=(0, 1, 0, 0))
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=i == 0, overflow="fold")
    for line in lines:
        table.add_row(*line)
    _show.out.print(table)
    train, serve = (in_units(sum(one.to(what) for one in every.values())) for what in ("train", "serve"))
    _show.out.print(f"all tables: {train} to train, {serve} to serve", soft_wrap=True)
    meanings = {
        "top 1 %": "top 1 %, top 10 %: per cent of training's lookups that go to the most used rows",
        "never learnt": "never learnt: per cent of the rows that no update changed; they are what they began with",
        "map": "map: says which row an id has",
        "combine": "combine: the module that makes one vector of several, and what its optimizer keeps",
    }
    _show.notes(line for name, line in meanings.items() if name in header)


def _show_proposal(found: Proposal) -> None:
    from sparrow.analysis.smaller.budget import in_units
    from sparrow.analysis.smaller.damage import SEEDS, SHORT
    from sparrow.cli import _show

    plan, purpose = found.plan, found.plan.purpose
    title = f"tables for {in_units(found.budget)} to {purpose}"
    table = _show.Table(title=title, title_justify="left")
    for name in ("table", "chosen", "now", "then", "rise of NE"):
        table.add_column(name, justify="left" if name in ("table", "chosen") else "right")
    left = [one for one in plan.options if not one.alternative.change]
    for then, one in zip(found.before.options, plan.options, strict=True):
        if one.alternative.change:
            sizes = [in_units(option.alternative.bytes.to(purpose)) for option in (then, one)]
            table.add_row(one.alternative.table, one.alternative.told, *sizes, _rise(one.damage, one.error))
    if left:
        size = in_units(sum(one.alternative.bytes.to(purpose) for one in left))
        table.add_row(f"{len(left)} more", "as they are", size, size, "")
    table.add_section()
    table.add_row("all", "", in_units(found.before.bytes), in_units(plan.bytes), _rise(plan.damage, plan.error))
    _show.out.print(table)
    told = ["rise of NE: on valid, each table alone, ± standard error; below 0 is a gain, or noise; all: their sum"]
    if found.checked is not None:
        rise = _rise(found.checked.value, found.checked.error)
        told.append(f"all that is rebuilt put in at once, on other rows: {rise}")
    if any(one.alternative.how == "trained" for one in plan.options):
        trainings = f"{SEEDS} short trainings each, of {SHORT:g} of an epoch"
        told.append(f"factors, path, int4, blocks and very few columns: judged by {trainings}")
    if found.unmeasured:
        told.append(f"{found.unmeasured} choices that only training can judge were left out; --trainings measures more")
    _show.notes(told)


def _rise(value: float, error: float) -> str:
    return f"{value:+.5f} ± {error:.5f}"


def _fit(place: Path, table: str, rows: int, out: Path, *, share: float, numbers: int, by: By) -> None:
    """Fit a map of a table's ids, and write it."""
    from sparrow import data
    from sparrow.analysis.smaller.learned_hash import fit
    from sparrow.cli import _show
    from sparrow.trained.run import Run

    _check_name(out, ".map", place)
    is_run = (place / "run.toml").is_file()
    dataset = data.open(Run.load(place / "run.toml").data.path if is_run else place)
    with _show.progress_bar() as told:
        found = fit(dataset, table, rows, told, share=share, numbers=numbers, by=by)
    found.save(out)
    how = f"{len(found.row_S):,} ids to {found.rows:,} rows, {found.private:,} of them with one id alone"
    _show.out.print(f"{out}: {how}; fitted to the first {found.fitted:,} training rows", markup=False, soft_wrap=True)
    written = f'addressing = {{ name = "learned", file = "{out}" }}'
    _show.out.print(f"in a run file, for this table: {written}", markup=False, soft_wrap=True)
