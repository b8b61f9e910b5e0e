"""Show what a run's tables cost, propose smaller ones, fit a map of ids to rows, or make a
checkpoint whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from sparrow.analysis.usage import TableUse
    from sparrow.apps.smaller.alternatives import Bytes
    from sparrow.apps.smaller.budget import Proposal
    from sparrow.apps.smaller.trainings import Verdict
    from sparrow.embeddings import TableSpec

By = Literal["both", "counts", "vectors"]


def tables(
    place: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    budget: str | None = None,
    purpose: Annotated[Literal["train", "serve"], tyro.conf.arg(name="for")] = "train",
    keep: tuple[str, ...] = (),
    trainings: int = 16,
    examples: int = 500_000,
    seeds: int = 3,
    sample: int = 20_000,
    out: Path | None = None,
    picture: Path | None = None,
    data: Path | None = None,
    checkpoint: str = "best",
    fit: Annotated[str | None, tyro.conf.arg(metavar="TABLE")] = None,
    rows: int | None = None,
    share: float = 0.1,
    numbers: int = 2,
    by: By = "both",
    whole: Annotated[str | None, tyro.conf.arg(metavar="CHECKPOINT")] = None,
) -> None:
    """Show what a run's tables cost, propose smaller ones, fit a map of ids to rows, or make a
    checkpoint whole.

    With --budget, plans of different kinds that keep to it are trained a short time beside the run
    as it is, and so it is seen what each costs or gains. The best is written as a run file:
    `sparrow train RUN/smaller.toml` trains it.

    Args:
        place: The directory of a `sparrow train` job; for --fit also a prepared log.
        budget: Bytes of all tables, in memory and on disks, such as 200MB or 1.5GB.
        purpose: Whether the budget is for training, with what the optimizer keeps, or for serving.
        keep: Tables that stay as they are.
        trainings: Plans that are trained once, at most. With 0 nothing is trained, and nothing is
            promised.
        examples: Rows that each short training reads, at most. Where the run reads more, a plan may
            cost more than is said.
        seeds: Further trainings of the best plan, of its two nearest rivals and of the run as it
            is.
        sample: Rows of the valid part by which to choose; as many others say what the choice costs.
        out: The run file, RUN/smaller.toml by default; of --fit, the map.
        picture: The picture, RUN/tables.png by default.
        data: Where the prepared log is; by default where the run has it.
        checkpoint: "best" (else the last), "last", or a step number.
        fit: Fit a map of this table's ids to --rows rows, for the addressing "learned".
        rows: Rows of a table with the map that is fitted.
        share: Earliest share of the training rows, to which the map is fitted.
        numbers: Numbers of the vectors that are learnt of the ids to fit the map, 1 to 4.
        by: What the map goes by: counts of the ids, vectors that are learnt of them, or both.
        whole: Write all rows of tables on an SSD into this checkpoint ("last", "best" or a step
            number). Then the run directory is all that it needs.
    """
    from sparrow.cli import _show
    from sparrow.core.errors import UserError, require

    if whole is not None and (fit is not None or budget is not None):
        raise UserError(
            "--whole: writes a checkpoint and does nothing else; leave out --fit and --budget"
        )
    if fit is not None:
        if rows is None or out is None:
            raise UserError(
                f"--fit: {'--out' if rows else '--rows'} is missing; give --rows N and --out"
                " FILE.map"
            )
        _fit(place, data, fit, rows, out, share=share, numbers=numbers, by=by)
        return
    if whole is not None:
        _complete(place, whole)
        return
    require(least=0, trainings=trainings)
    require(least=1, examples=examples)
    require(least=2, seeds=seeds)
    require(least=100, sample=sample)
    if budget is None:
        if out is not None or picture is not None or keep:
            raise UserError(
                "--out, --picture, --keep: of a proposal; give --budget too, such as --budget 200MB"
            )
        _look(place, checkpoint, data)
        return
    from sparrow.apps.smaller.budget import in_units, propose

    out = out or place / "smaller.toml"
    picture = picture or place / "tables.png"
    for path, suffix in ((picture, ".png"), (out, ".toml")):
        _check_name(path, suffix, place)
    allowed = parsed(budget)
    maps = out.with_name(f"{out.stem}-maps")
    with _show.progress_bar() as progress:
        proposal = propose(
            place,
            allowed,
            purpose,
            keep=keep,
            rows=sample,
            trainings=trainings,
            examples=examples,
            seeds=seeds,
            which=checkpoint,
            data_dir=data,
            maps=maps,
            progress=progress,
        )
    if proposal.plan is not proposal.before:
        _write(proposal, out, picture)
        return
    has = (
        f"its tables take {in_units(proposal.before.bytes)} to {purpose}, no more than"
        f" {in_units(allowed)}"
    )
    _show.out.print(
        f"{place}: {has}; nothing was tried, and no file is written", markup=False, soft_wrap=True
    )


def _complete(place: Path, whole: str) -> None:
    """Write all rows of tables on an SSD into a checkpoint."""
    from sparrow.cli import _show
    from sparrow.extensions.tiers.full_checkpoint import make_whole

    with _show.progress_bar() as progress:
        lines = make_whole(place, whole, progress)
    _show.notes(lines)


def _write(proposal: Proposal, out: Path, picture: Path) -> None:
    """Write the run file of the best plan, show all, and draw them."""
    from sparrow.apps.smaller.budget import draw
    from sparrow.cli import _show

    # at once: the earlier plan's maps are gone
    proposal.plan.run(proposal.run, f"{proposal.run.run_dir}-{out.stem}").save(out)
    _show_proposal(proposal)
    drawn = [f"{picture}: NE against bytes"] if draw(proposal, picture) else []
    for line in (f"{out}: `sparrow train {out}` trains it", *drawn):
        _show.out.print(line, markup=False, soft_wrap=True)


def parsed(budget: str, flag: str = "--budget") -> int:
    """Returns how many bytes a text says, such as "200MB", "12GiB" or "1_500_000". flag: where it
    was given.

    Raises:
        UserError: when it says none, or less than one.
    """
    from sparrow.apps.smaller.budget import UNITS
    from sparrow.core.errors import UserError

    # a comma stands before three digits: in 1,5GB it would be a point to some, and nothing to
    # others
    digits = r"[0-9][0-9_]*|[0-9]{1,3}(?:,[0-9]{3})+"
    match = re.fullmatch(rf"((?:{digits})(?:\.[0-9]+)?)\s*([a-zA-Z]*)", budget.strip())
    units = {unit.lower(): scale for unit, scale in UNITS.items()} | {
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
    }
    count = 0
    if match and (scale := units.get((match[2] or "B").lower())):
        count = int(float(match[1].replace("_", "").replace(",", "")) * scale)
    if not count:
        raise UserError(
            f"{flag}: {budget!r} is no number of bytes; write such as 200MB, 1.5GB or 800kB"
        )
    return count


def _check_name(path: Path, suffix: str, place: Path) -> None:
    """Check where a file is to be written, before the work: its folder, and that no file of another
    kind is meant.
    """
    from sparrow.core.errors import UserError

    if path.suffix != suffix:
        raise UserError(f"{path}: not a name for this file; end it in {suffix}")
    if path.parent != place and not path.resolve().parent.is_dir():
        raise UserError(f"{path}: no folder {path.resolve().parent}; make it first")


def _component_lines(
    spec: TableSpec, table_bytes: Bytes, uses: Mapping[str, TableUse], scale: float
) -> list[list[str]]:
    """Returns the cells of each component of a table. Map and combining module, which are of the
    table, stand with the first one. scale: bytes of the unit.
    """
    from sparrow.embeddings.sizes import state_bytes

    lines = []
    map_and_combine = [table_bytes.map, table_bytes.combine + table_bytes.combine_state]
    for part in spec.components:
        use = uses[part.name]
        part_bytes = (part.bytes_values, state_bytes(part), *map_and_combine)
        shares = (use.share_of_top(0.01), use.share_of_top(0.1), use.share_unlearnt)
        line = [part.name, use.stored[0], f"{part.rows:,}", str(part.dim)]
        line += [f"{size / scale:,.1f}" if size else "" for size in part_bytes]
        line += [f"{100 * share:.1f}" for share in shares]
        lines.append(line)
        map_and_combine = [0, 0]
    return lines


def _look(place: Path, checkpoint: str, data_dir: Path | None) -> None:
    """Print a line for each component, and what all tables take."""
    from sparrow.analysis import elements
    from sparrow.analysis.usage import count_usage
    from sparrow.apps.smaller.alternatives import Bytes
    from sparrow.apps.smaller.budget import in_units, unit_of
    from sparrow.cli import _show
    from sparrow.core.errors import UserError
    from sparrow.trained.build import tables_of
    from sparrow.trained.log import open_log
    from sparrow.trained.scorer import restore
    from sparrow.training.preflight import dense_state

    # nothing is scored
    restored = restore(place, which=checkpoint, calibrated=False, data_dir=data_dir)
    dataset = open_log(restored)
    with _show.progress_bar() as progress:
        uses = {use.name: use for use in count_usage(restored, dataset, (), progress)[0]}
    if not uses:
        raise UserError(f"{place}: its model has no tables; there is nothing to show")
    dense = dense_state(restored.run)
    specs = list(chain.from_iterable(module.specs for module in tables_of(restored.model)))
    bytes_of = {spec.name: Bytes.from_spec(spec, dense) for spec in specs}
    unit, scale = unit_of(max(sizes.weights for sizes in bytes_of.values()) // 10)
    lines: list[list[str]] = []
    for spec in specs:
        lines += _component_lines(spec, bytes_of[spec.name], uses, scale)
    header = ["component", "format", "rows", "dim", "weights", "state", "map", "combine"]
    header += ["top 1 %", "top 10 %", "never learnt"]
    header, lines = elements.without_empty_columns(header, lines)
    title = f"tables of {place}; bytes in {unit}"
    table = _show.Table(title=title, title_justify="left", box=_show.SLIM, padding=(0, 1, 0, 0))
    for i, name in enumerate(header):
        table.add_column(
            name, justify="left" if i < 2 else "right", no_wrap=i == 0, overflow="fold"
        )
    for line in lines:
        table.add_row(*line)
    _show.out.print(table)
    train = in_units(sum(sizes.to("train") for sizes in bytes_of.values()))
    serve = in_units(sum(sizes.to("serve") for sizes in bytes_of.values()))
    disk = sum(sizes.disk for sizes in bytes_of.values())
    places = f" ({in_units(disk)} of them on a disk)" if disk else ""
    _show.out.print(f"all tables: {train} to train{places}, {serve} to serve", soft_wrap=True)
    meanings = {
        "top 1 %": (
            "top 1 %, top 10 %: per cent of training's lookups that go to the most used rows"
        ),
        "never learnt": (
            "never learnt: per cent of the rows that no update changed; they are what they began"
            " with"
        ),
        "map": "map: says which row an id has",
        "combine": (
            "combine: the module that makes one vector of several, and what its optimizer keeps"
        ),
    }
    _show.notes(line for name, line in meanings.items() if name in header)


def _show_proposal(proposal: Proposal) -> None:
    from sparrow.apps.smaller.budget import in_units
    from sparrow.cli import _show

    plan = proposal.plan
    purpose = proposal.plan.purpose
    title = f"tables for {in_units(proposal.budget)} to {purpose}"
    table = _show.Table(title=title, title_justify="left")
    for name in ("table", "chosen", "now", "then"):
        table.add_column(name, justify="left" if name in ("table", "chosen") else "right")
    left = [choice for choice in plan.options if not choice.alternative.change]
    for then, choice in zip(proposal.before.options, plan.options, strict=True):
        if choice.alternative.change:
            sizes = [in_units(option.alternative.bytes.to(purpose)) for option in (then, choice)]
            table.add_row(choice.alternative.table, choice.alternative.description, *sizes)
    if left:
        size = in_units(sum(choice.alternative.bytes.to(purpose) for choice in left))
        table.add_row(f"{len(left)} more", "as they are", size, size)
    table.add_section()
    table.add_row("all", "", in_units(proposal.before.bytes), in_units(plan.bytes))
    _show.out.print(table)
    if proposal.verdict is None:
        message = (
            f"rebuilt rows raise NE by {_rise(plan.damage, plan.error)}, each table alone, on valid"
        )
        _show.notes(
            [
                message,
                (
                    "nothing was trained, and merged rows often train worse; --trainings 16 says by"
                    " how much"
                ),
            ]
        )
        return
    _show_trained(proposal.verdict)


def _show_trained(verdict: Verdict) -> None:
    from sparrow.apps.smaller.budget import in_units
    from sparrow.cli import _show

    table = _show.Table(
        title="rise of NE by short trainings; the first plan is proposed", title_justify="left"
    )
    for name in ("plan", "bytes", "rebuilt rows", "trained", "seeds"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for trial in verdict.plans:
        expected = _rise(trial.plan.damage, trial.plan.error) if trial.plan.is_measured else ""
        trained = _rise(trial.damage, trial.error)
        size = in_units(trial.plan.bytes)
        table.add_row(trial.plan.kind, size, expected, trained, str(trial.seeds))
    _show.out.print(table)
    notes = [
        (
            "trained: beside trainings of the tables as they are, ± standard error of rows and"
            " seeds; below 0 is a gain"
        ),
        (
            f"seeds of the same tables differ by {verdict.spread:.5f} of NE (standard deviation),"
            " so one training may too"
        ),
    ]
    if verdict.share < 1:
        notes.append(
            f"each training took {100 * verdict.share:.0f} % of the run's steps; a whole one may"
            " cost more; --examples raises it"
        )
    _show.notes(
        [*notes, *(f"left out, since it cannot be trained: {line}" for line in verdict.failures)]
    )


def _rise(value: float, error: float) -> str:
    return f"{value:+.5f} ± {error:.5f}"


def _fit(
    place: Path,
    data_dir: Path | None,
    table: str,
    rows: int,
    out: Path,
    *,
    share: float,
    numbers: int,
    by: By,
) -> None:
    """Fit a map of a table's ids, and write it."""
    from sparrow import data
    from sparrow.apps.smaller.learned_hash import fit
    from sparrow.cli import _show
    from sparrow.trained.run import Run
    from sparrow.trained.scorer import find_log

    _check_name(out, ".map", place)
    is_run = data_dir is None and (place / "run.toml").is_file()
    log_path = data_dir or place
    if is_run:
        log_path = find_log(place, Run.load(place / "run.toml").data.path, None)
    dataset = data.open(log_path)
    with _show.progress_bar() as progress:
        learned = fit(dataset, table, rows, progress, share=share, numbers=numbers, by=by)
    learned.save(out)
    _show.out.print(
        f"{out}: {len(learned.row_S):,} ids to {learned.rows:,} rows, {learned.private:,} of them"
        f" with one id alone; fitted to the first {learned.fitted:,} training rows",
        markup=False,
        soft_wrap=True,
    )
    written = f'addressing = {{ name = "learned", file = "{out}" }}'
    _show.out.print(f"in a run file, for this table: {written}", markup=False, soft_wrap=True)
