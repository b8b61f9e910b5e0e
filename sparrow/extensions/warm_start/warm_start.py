"""Begin with what another run learnt: the next day's log, with ids that the day before had not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from sparrow.checkpoint.current import unchanged
from sparrow.core import UserError
from sparrow.core.config import Family
from sparrow.core.errors import listed
from sparrow.data.batches.dataset import Dataset
from sparrow.distributed import World
from sparrow.embeddings import Addressing, Component, Numbering, TableSpec
from sparrow.features.encodings import kind_of
from sparrow.features.schema import Column
from sparrow.features.transforms import Transforms
from sparrow.models import MOST_FITTED, run_here
from sparrow.trained.build import identity, records_of, tables_of
from sparrow.trained.optimizer_state import read_optimizer
from sparrow.trained.run import Run
from sparrow.training import earlier_run
from sparrow.training.members import few_parts
from sparrow.training.ranks import Ranks
from sparrow.training.rundir import RunDir

# tables may have other rows
_SAME = ("model", "labels", "features", "dense columns", "dense optimizer")


def warm_start(
    model: Any,
    optimizer: Optimizer,
    run: Run,
    dataset: Dataset,
    say: Callable[[str], None],
    ranks: Ranks | None = None,
) -> None:
    """Give the model and its optimizers what the run `run.init_from` ended with: its best
    checkpoint, else the last.

    An id takes its table row with it. Rows are matched by id where the two logs number ids
    differently, and new ids begin as in any run. Table rows and the state of their rules are
    converted where they were stored in other formats. Dense weights, the offset and the state of
    both optimizers come along; parts of a model that are fitted whole are fitted to the new log,
    and stay where it has no valid rows. Schedule and steps begin anew. The log's own base rate does
    not count, because what the model has learned says more. Where the two logs kept other shares of
    their negatives, the offset moves by the logarithm of their ratio, so that corrected scores stay
    the same.

    Args:
        model: is changed.
        optimizer: of the dense weights; is changed.
        run: the run that begins.
        dataset: its prepared log.
        say: is told what a person should know.
        ranks: the ranks; by default one.

    Raises:
        UserError: when there is no such run, or it has another model, other columns, other rules of
            tables or another dense optimizer.
    """
    place = Path(str(run.init_from))
    world = ranks.world if ranks else World()
    old, then = earlier_run.read_settings(RunDir(place), world)
    own = {"labels": list(dataset.schema.labels), **identity(run, dataset.schema)}
    earlier = {"labels": list(then.schema.labels), **identity(old, then.schema)}
    for name in _SAME:
        if own[name] != earlier[name]:
            raise UserError(
                f"init_from: {place} has {name} {earlier[name]} and this run {own[name]}; use the"
                " same"
            )
    for name in [name for name in own["tables"] if name in earlier["tables"]]:
        rule = own["tables"][name]["rule"]
        earlier_rule = earlier["tables"][name]["rule"]
        if rule != earlier_rule:
            raise UserError(
                f"init_from: {place} has rule {earlier_rule} for table {name!r} and this run"
                f" {rule}; use the same"
            )
    moves: dict[str, torch.Tensor] = {}
    were: dict[str, Component] = {}
    specs = list(chain.from_iterable(tables.specs for tables in tables_of(model)))
    for spec in specs:
        moves |= _moved_rows(spec, old, then, dataset.transforms)
        were |= _stored_before(spec, old, then, moves, say)
    saved = earlier_run.best_checkpoint(RunDir(place), world)
    shift = _shift(then.schema.split.negatives, dataset.schema.split.negatives, say)
    with unchanged(saved):
        _take_dense(model, saved.part("dense"), shift, (then, dataset), run, say, ranks)
        read_optimizer(model, optimizer, saved)
        records = records_of(model)
        for chunk in saved.chunks():
            for record in records:
                if record.component.name == chunk.table:
                    record.load_rows(
                        chunk, moves[chunk.table][slice(*chunk.rows)], were[chunk.table]
                    )
    for tables in tables_of(model):
        tables.changed()
    components = chain.from_iterable(spec.components for spec in specs)
    rows = sum(component.rows for component in components)
    carried = sum(int((to_R >= 0).sum()) for to_R in moves.values())
    say(
        f"begun with {place}, step {saved.step}: {carried:,} of {rows:,} table rows come from there"
    )
    for name in (*dataset.schema.dense, *dataset.schema.sparse):
        if _fitted_of(dataset.schema.columns[name]) != _fitted_of(then.schema.columns[name]):
            remedy = f"`sparrow prepare --like {place} --grow` keeps it as it was"
            say(f"{name}: standardised or bucketed otherwise than in {place}; {remedy}")


def _fitted_of(column: Column) -> tuple[Any, ...]:
    """Returns what a column's numbers are standardised and bucketed by."""
    standard = (column.mean, column.std, column.means, column.stds)
    return (*standard, column.transform, column.boundaries)


def _take_dense(
    model: Any,
    dense: Mapping[str, torch.Tensor],
    shift: float,
    logs: tuple[Transforms, Dataset],
    run: Run,
    say: Callable[[str], None],
    ranks: Ranks | None,
) -> None:
    """Give a model the dense weights of an earlier run, and fit anew what is fitted whole.

    Without valid rows nothing says which fit is best. So what that run fitted stays.
    """
    then, dataset = logs
    is_unjudged = model.fitted_prefixes and not dataset.rows("valid")
    rows = _rows_before(then, dataset.transforms) if is_unjudged else None
    model.begin_with(dense, shift, rows)
    if rows is not None:
        stays = f"what was fitted whole stays as in {run.init_from}"
        say(
            f"the log has no valid rows: {stays}, and so do the weights of"
            f" {listed(model.part_names)}"
        )
        return
    model.fit_whole(
        partial(dataset.first, MOST_FITTED), run.seed, ranks.run_on_rank0 if ranks else run_here
    )
    if is_unjudged:
        why = f"and ids that are numbered otherwise than in {run.init_from}"
        say(f"{few_parts(model)}, {why}; prepare it with --like and --grow, or with --valid 0.1")


def _rows_before(then: Transforms, now: Transforms) -> dict[str, int] | None:
    """Returns table -> how many ids the earlier log had, if all of them have their numbers
    still.
    """
    moves = {name: _moved(name, then, now) for name in now.schema.encodings}
    is_same = all(bool((to_R == torch.arange(len(to_R))).all()) for to_R in moves.values())
    return {name: len(to_R) for name, to_R in moves.items()} if is_same else None


def _shift(then: float, now: float, say: Callable[[str], None]) -> float:
    """Returns by how much the offset moves to where a share `now` of the negatives is kept, from
    `then`.
    """
    shift = math.log(then / now)
    if then != now:
        say(f"{now:g} of the negatives are kept, {then:g} were there: logits move by {shift:+.3f}")
    return shift


def _stored_before(
    spec: TableSpec,
    old: Run,
    then: Transforms,
    moves: dict[str, torch.Tensor],
    say: Callable[[str], None],
) -> dict[str, Component]:
    """Returns the components of a table as the earlier run had them, and says what is stored
    otherwise now.
    """
    chosen = old.tables.for_table(spec.name, then.schema.encodings[spec.name].rows or 0)
    formats = Family("sparrow.kernels.formats")
    parts = (
        ("rows", formats.name_of(chosen.format), formats.name_of(spec.format)),
        ("state", chosen.state, spec.state),
    )
    changes = [
        f"{part} converted from {before} to {after}"
        for part, before, after in parts
        if before != after
    ]
    if changes:
        say(f"{spec.name}: {' and '.join(changes)}")
    were = replace(spec, format=chosen.format, state=chosen.state).components
    return {
        component.name: replace(component, rows=len(moves[component.name])) for component in were
    }


def _moved_rows(
    spec: TableSpec, old: Run, then: Transforms, now: Transforms
) -> dict[str, torch.Tensor]:
    """Returns for each component the rows of the same ids now, or -1, for each row that it had in
    the earlier run.
    """
    table = then.schema.encodings[spec.name]
    before = old.tables.addressed(spec.name, Numbering.of(table))
    after = spec.addressing
    to_R = _moved(spec.name, then, now)
    then_parts = before.components(spec.dim)
    now_parts = after.components(spec.dim)
    same = [(part.name, part.dim) for part in then_parts] == [
        (part.name, part.dim) for part in now_parts
    ]
    weights = _weights(before, spec.dim)
    new_weights = _weights(after, spec.dim)
    was = before.traits.policy
    policy = after.traits.policy
    if not same or weights != new_weights or (was is None) != (policy is None):
        remedy = f"keep that: {old.tables.addressing_of(spec.name, Numbering.of(table))}"
        if same and weights != new_weights and weights.keys() == new_weights.keys():
            remedy += "; a path that needs another MLP must be trained anew"
        raise UserError(
            f"init_from: table {spec.name!r} is addressed otherwise than in the run before;"
            f" {remedy}"
        )
    parts = list(zip(spec.components, then_parts, strict=True))
    is_same = bool((to_R == torch.arange(len(to_R))).all())
    if was and policy:
        fixed = [(p.capacity, p.buckets, p.clock) for p in (was, policy)]
        if fixed[0] != fixed[1] or not is_same:
            remedy = (
                f"keep its {was.capacity:,} rows, bucket and clock, and number ids as then (--like,"
                " --grow)"
            )
            raise UserError(
                f"init_from: ids of table {spec.name!r} would have other rows than before; {remedy}"
            )
    if was or (before == after and is_same):
        return {component.name: torch.arange(size.rows) for component, size in parts}
    if not table.is_numbered:
        raise UserError(
            f"init_from: table {spec.name!r} addresses hashes otherwise than the run before; keep"
            " that"
        )
    old_rows = before.rows_of(torch.arange(len(to_R)))
    stays = to_R >= 0
    new_rows = after.rows_of(to_R.clamp(min=0))
    moves = {}
    for (component, size), old_N, new_N in zip(parts, old_rows, new_rows, strict=True):
        moves[component.name] = moved_N = torch.full((size.rows,), -1)
        olds, news = _pairs(component.name, old_N[stays], new_N[stays])
        moved_N[olds] = news
    return moves


def _pairs(name: str, old_N: torch.Tensor, new_N: torch.Tensor) -> torch.Tensor:
    """Returns the earlier and the present row of ids, int64 [2, pairs], each row once.

    Raises:
        UserError: when a row would go to several, or several to one.
    """
    pairs = torch.stack([old_N, new_N]).unique(dim=1)
    pairs = pairs[:, (pairs >= 0).any(0)]  # an id may have no row in a component
    if (
        bool((pairs < 0).any())
        or pairs.shape[1] != len(pairs[0].unique())
        or pairs.shape[1] != len(pairs[1].unique())
    ):
        raise UserError(
            f"init_from: rows of table {name!r} are shared by ids that have other rows now;"
            " prepare the log with --like and --grow, or choose direct addressing"
        )
    return pairs


def _weights(addressing: Addressing, dim: int) -> dict[str, torch.Size]:
    """Returns the shapes of the dense weights of a table's addressing."""
    with torch.device("meta"):
        combine = addressing.combine(dim)
    return (
        {}
        if combine is None
        else {name: weight.shape for name, weight in combine.state_dict().items()}
    )


def _moved(name: str, then: Transforms, now: Transforms) -> torch.Tensor:
    """Returns for each row of a table of the earlier run the row of the same id now, or -1: int64
    [R].
    """
    old = then.schema.encodings[name]
    new = now.schema.encodings[name]
    rows = old.rows or 0
    same = np.arange(rows)
    if (old.kind, old.rows, old.low, old.digest) == (new.kind, new.rows, new.low, new.digest):
        return torch.from_numpy(same)
    if old.kind == new.kind:
        to_R = kind_of(old).moved(old, new, then.vocabularies.get(name), now.vocabularies.get(name))
        if to_R is not None:
            return torch.from_numpy(to_R)
    raise UserError(
        f"init_from: table {name!r}: {old.kind} of {old.rows} rows then, {new.kind} of {new.rows}"
        " now; prepare the log with --like and the run, and --grow"
    )
