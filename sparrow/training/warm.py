"""Begin with what another run learnt: the next day's log, with ids that the day before had not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from sparrow.checkpoint.whole import unchanged
from sparrow.core import UserError
from sparrow.core.config import Family
from sparrow.data.batches.dataset import Dataset
from sparrow.distributed import World
from sparrow.embeddings import Addressing, Component, Numbering, TableSpec
from sparrow.features.encodings import kind_of
from sparrow.features.transforms import Transforms
from sparrow.optimizers import to_fp32
from sparrow.trained.build import identity, load_optimizer, tables_of
from sparrow.trained.run import Run
from sparrow.training.pretrained import give_vectors
from sparrow.training.rundir import RunDir

WHOLE = 1_000_000  # rows, for what is fitted whole
_SAME = ("model", "labels", "features", "dense columns", "dense optimizer")  # tables may have other rows


def begin(
    model: Any, optimizer: Optimizer, run: Run, dataset: Dataset, say: Callable[[str], None], world: World
) -> None:
    """Give a new run's model what its settings say that it begins with. See `give_vectors` and `warm_start`.

    A row that comes from an earlier run stays as it was there.
    """
    give_vectors(model, run, dataset, say)
    if run.init_from:
        warm_start(model, optimizer, run, dataset, say, world)


def warm_start(
    model: Any, optimizer: Optimizer, run: Run, dataset: Dataset, say: Callable[[str], None], world: World | None = None
) -> None:
    """Give the model and its optimizers what the run `run.init_from` ended with: its best checkpoint, else the last.

    An id takes its table row with it. Rows are matched by id where the two logs number ids differently, and new ids
    begin as in any run. Table rows and the state of their rules are converted where they were stored in other formats.
    Dense weights, the offset and the state of both optimizers come along; parts of a model that are fitted whole are
    fitted to the new log. Schedule and steps begin anew. The log's own base rate does not count, because what the model
    has learned says more. Where the two logs kept other shares of their negatives, the offset moves by the logarithm of
    their ratio, so that corrected scores stay the same.

    Args:
        model: is changed.
        optimizer: of the dense weights; is changed.
        run: the run that begins.
        dataset: its prepared log.
        say: is told what a person should know.
        world: the ranks; by default one.

    Raises:
        UserError: when there is no such run, or it has another model, other columns, other rules of tables or another
            dense optimizer.
    """
    place, world = Path(str(run.init_from)), world or World()
    old, then = earlier(run, world)
    ours = {"labels": list(dataset.schema.labels), **identity(run, dataset.schema)}
    theirs = {"labels": list(then.schema.labels), **identity(old, then.schema)}
    for name in _SAME:
        if ours[name] != theirs[name]:
            raise UserError(f"init_from: {place} has {name} {theirs[name]} and this run {ours[name]}; use the same")
    for name in [name for name in ours["tables"] if name in theirs["tables"]]:
        mine, its = ours["tables"][name]["rule"], theirs["tables"][name]["rule"]
        if mine != its:
            raise UserError(f"init_from: {place} has rule {its} for table {name!r} and this run {mine}; use the same")
    moves: dict[str, torch.Tensor] = {}
    were: dict[str, Component] = {}
    for spec in [spec for tables in tables_of(model) for spec in tables.specs]:
        moves |= _moved_rows(spec, old, then, dataset.transforms)
        were |= _stored_before(spec, old, then, moves, say)
    saved = RunDir(place).best(world)
    shift = _shift(then.schema.split.negatives, dataset.schema.split.negatives, say)
    with unchanged(saved):
        model.begin_with(saved.part("dense"), shift, lambda part: dataset.first(WHOLE, part), run.seed)
        load_optimizer(optimizer, saved)
        to_fp32(optimizer)  # the run before may have kept its weights otherwise
        records = [record for tables in tables_of(model) for record in tables.all_records()]
        for chunk in saved.chunks():
            for record in records:
                if record.component.name == chunk.table:
                    record.load_rows(chunk, moves[chunk.table][slice(*chunk.rows)], were[chunk.table])
    for tables in tables_of(model):
        tables.changed()
    rows = sum(component.rows for tables in tables_of(model) for spec in tables.specs for component in spec.components)
    carried = sum(int((to_R >= 0).sum()) for to_R in moves.values())
    say(f"begun with {place}, step {saved.step}: {carried:,} of {rows:,} table rows come from there")
    for name in (*dataset.schema.dense, *dataset.schema.sparse):
        one, other = dataset.schema.columns[name], then.schema.columns[name]
        fitted = [(c.mean, c.std, c.means, c.stds, c.transform, c.boundaries) for c in (one, other)]
        if fitted[0] != fitted[1]:
            remedy = f"`sparrow prepare --like {place} --grow` keeps it as it was"
            say(f"{name}: standardised or bucketed otherwise than in {place}; {remedy}")


def earlier(run: Run, world: World) -> tuple[Run, Transforms]:
    """Returns the settings of the run that `run` begins with, and how its log was prepared.

    Args:
        run: has `init_from`.
        world: the ranks.

    Raises:
        UserError: when that is no run's directory.
    """
    place = Path(str(run.init_from))

    def files() -> list[Path]:
        if not (place / "run.toml").exists():
            remedy = "give that of a `sparrow train` job"
            raise UserError(f"init_from: {place} is not a run directory (no run.toml); {remedy}")
        return sorted([*place.glob("*.toml"), *place.glob("vocabulary/*"), *place.glob("maps/*")])

    RunDir(place).see("init_from", world, files)  # ranks may see it later than rank 0
    return Run.load(place / "run.toml"), Transforms.load(place)


def _shift(then: float, now: float, say: Callable[[str], None]) -> float:
    """Returns by how much the offset moves to where a share `now` of the negatives is kept, from `then`."""
    shift = math.log(then / now)
    if then != now:
        say(f"{now:g} of the negatives are kept, {then:g} were there: logits move by {shift:+.3f}")
    return shift


def _stored_before(
    spec: TableSpec, old: Run, then: Transforms, moves: dict[str, torch.Tensor], say: Callable[[str], None]
) -> dict[str, Component]:
    """Returns the components of a table as the earlier run had them, and says what is stored otherwise now."""
    chosen = old.tables.of(spec.name, then.schema.encodings[spec.name].rows or 0)
    one, other = (Family("sparrow.kernels.formats").name_of(has.format) for has in (chosen, spec))
    parts = (("rows", one, other), ("state", chosen.state, spec.state))
    if told := [f"{part} converted from {one} to {other}" for part, one, other in parts if one != other]:
        say(f"{spec.name}: {' and '.join(told)}")
    were = replace(spec, format=chosen.format, state=chosen.state).components
    return {component.name: replace(component, rows=len(moves[component.name])) for component in were}


def _moved_rows(spec: TableSpec, old: Run, then: Transforms, now: Transforms) -> dict[str, torch.Tensor]:
    """Returns for each component the rows of the same ids now, or -1, for each row that it had in the earlier run."""
    table = then.schema.encodings[spec.name]
    before, after = old.tables.addressed(spec.name, Numbering.of(table)), spec.addressing
    to_R = _moved(spec.name, then, now)
    then_parts, now_parts = before.components(spec.dim), after.components(spec.dim)
    same = [(part.name, part.dim) for part in then_parts] == [(part.name, part.dim) for part in now_parts]
    weights, new_weights = _weights(before, spec.dim), _weights(after, spec.dim)
    was, policy = before.traits.policy, after.traits.policy
    if not same or weights != new_weights or (was is None) != (policy is None):
        remedy = f"keep that: {old.tables.addressing_of(spec.name, Numbering.of(table))}"
        if same and weights != new_weights and weights.keys() == new_weights.keys():
            remedy += "; a path that needs another MLP must be trained anew"
        raise UserError(f"init_from: table {spec.name!r} is addressed otherwise than in the run before; {remedy}")
    parts = list(zip(spec.components, then_parts, strict=True))
    is_same = bool((to_R == torch.arange(len(to_R))).all())
    if was and policy:
        fixed = [(p.capacity, p.buckets, p.clock) for p in (was, policy)]
        if fixed[0] != fixed[1] or not is_same:
            remedy = f"keep its {was.capacity:,} rows, bucket and clock, and number ids as then (--like, --grow)"
            raise UserError(f"init_from: ids of table {spec.name!r} would have other rows than before; {remedy}")
    if was or (before == after and is_same):
        return {component.name: torch.arange(size.rows) for component, size in parts}
    if not table.is_numbered:
        raise UserError(f"init_from: table {spec.name!r} addresses hashes otherwise than the run before; keep that")
    old_rows, stays = before.rows_of(torch.arange(len(to_R))), to_R >= 0
    new_rows = after.rows_of(to_R.clamp(min=0))
    found = {}
    for (component, size), old_N, new_N in zip(parts, old_rows, new_rows, strict=True):
        found[component.name] = moved_N = torch.full((size.rows,), -1)
        pairs = torch.stack([old_N[stays], new_N[stays]]).unique(dim=1)
        pairs = pairs[:, (pairs >= 0).any(0)]  # an id may have no row in a component
        if (
            bool((pairs < 0).any())
            or pairs.shape[1] != len(pairs[0].unique())
            or pairs.shape[1] != len(pairs[1].unique())
        ):
            raise UserError(
                f"init_from: rows of table {component.name!r} are shared by ids that have other rows now; prepare the "
                "log with --like and --grow, or choose direct addressing"
            )
        moved_N[pairs[0]] = pairs[1]  # each row goes to one, and none to another's
    return found


def _weights(addressing: Addressing, dim: int) -> dict[str, torch.Size]:
    """Returns the shapes of the dense weights of a table's addressing."""
    with torch.device("meta"):
        combine = addressing.combine(dim)
    return {} if combine is None else {name: weight.shape for name, weight in combine.state_dict().items()}


def _moved(name: str, then: Transforms, now: Transforms) -> torch.Tensor:
    """Returns for each row of a table of the earlier run the row of the same id now, or -1: int64 [R]."""
    old, new = then.schema.encodings[name], now.schema.encodings[name]
    rows = old.rows or 0
    same = np.arange(rows)
    if (old.kind, old.rows, old.low, old.digest) == (new.kind, new.rows, new.low, new.digest):
        return torch.from_numpy(same)
    if old.kind == new.kind:
        to_R = kind_of(old).moved(old, new, then.vocabularies.get(name), now.vocabularies.get(name))
        if to_R is not None:
            return torch.from_numpy(to_R)
    told = f"{old.kind} of {old.rows} rows then, {new.kind} of {new.rows} now"
    raise UserError(f"init_from: table {name!r}: {told}; prepare the log with --like and the run, and --grow")
