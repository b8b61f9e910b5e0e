"""What a run will need of memory, found before it needs it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparrow import training
from sparrow.core import Batch, UserError
from sparrow.core.cores import cores
from sparrow.core.errors import listed
from sparrow.core.extensions import adapt_optimizer
from sparrow.core.memory import available_bytes, gb, let_go, limit_bytes, resident_bytes
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.loader import BATCHES_AHEAD
from sparrow.distributed import Grid
from sparrow.embeddings import UNALLOCATED, Component, Placement, TableChoices, TableSpec
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.stores.folded import FoldedStore
from sparrow.features.schema import Schema
from sparrow.features.transforms import Transforms
from sparrow.layers.precision import computing
from sparrow.losses import binary_cross_entropy
from sparrow.metrics import evaluation, metric_of
from sparrow.models import MOST_FITTED
from sparrow.trained.build import tables_of, untrained, within_memory
from sparrow.trained.run import Run
from sparrow.training.dropout import default_shares
from sparrow.training.plan import Need, Plan, hooks_of

PROBE_ROWS = 256
DENSE = "dense weights, gradients and optimizer"
# measured on DCNv2 and DLRM of several sizes, with which the sum was within a seventh of what runs
# took bytes a step needs for each byte that autograd keeps: what flows backward, and the
# allocator's gaps
_STEP = 2.0
_FIRST_STEP = 60_000_000  # bytes of operators that load at their first call, and of metrics
_HOLES = 32 << 20  # bytes that stay free between blocks of a step
FIT = "what is fitted whole"
IN_TURN = {
    "a step": ("loader", "a step", "pairs", "freed and kept"),
    "scoring": ("loader", "evaluation", "valid loader", "freed and kept"),
    "judging": ("loader", "evaluation", "metrics"),
    "a checkpoint": ("loader", "a checkpoint"),
    FIT: (FIT,),
}
"""What a run does one after the other, and what takes memory meanwhile. Other parts take it
always.
"""
# of a step, which a second thread would take longer to join than to do
SMALL_FLOP = 1e9
SMALL_BYTES = 58e6


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes that a run will have at once, by what they are for.

    Args:
        host: what it is for -> bytes of the host.
        device: what it is for -> bytes of the device, where that is a GPU.
        largest: the table that takes most, with its bytes.
        flop: floating-point operations of a step's products with dense weights, at least, forward
            and backward.
        extras: what extensions take of the host.
    """

    host: dict[str, int]
    device: dict[str, int]
    largest: tuple[str, int]
    flop: float
    extras: Sequence[Need] = ()

    @property
    def bytes_host(self) -> int:
        """Bytes that the host has to hold."""
        passing = {
            *itertools.chain(*IN_TURN.values()),
            *(need.part for need in self.extras if need.turn),
        }
        lasting = sum(size for part, size in self.host.items() if part not in passing)
        return lasting + max(self.turns.values())

    @property
    def turns(self) -> dict[str, int]:
        """Bytes of the host that each member of `IN_TURN` takes."""
        turns = {}
        for turn, parts in IN_TURN.items():
            turns[turn] = sum(self.host.get(part, 0) for part in parts)
        for need in self.extras:
            if need.turn:
                turns[need.turn] = turns.get(need.turn, 0) + self.host.get(need.part, 0)
        return turns

    @property
    def bytes_device(self) -> int:
        """Bytes that the device has to hold."""
        return sum(self.device.values())


def estimate(
    run: Run, dataset: Dataset, ranks: int = 1, per_host: int = 1, options: Collection[str] = ()
) -> Needs:
    """Returns what one rank of the run will need. It is found with the same model over tables of a
    few rows.

    Tables count as rows times the bytes of a row with its optimizer state, where the run's plan
    puts them. The figure is for a rank of the host that has most, or for the GPU that has most.
    Dense weights count with gradients and optimizer state. A step counts with what autograd keeps,
    and with gradients of as many table rows as a batch can touch. Pairs that the loss compares
    count as in the log's first batch. A model that is too large even without a step is never built,
    and what autograd keeps is then left out, and so are pairs.

    Args:
        run: its settings.
        dataset: the prepared log.
        ranks: how many the job has.
        per_host: how many of them share a host.
        options: what else was asked for, see `Plan`.
    """
    schema = dataset.schema
    plan = Plan(run=run, dataset=dataset, ranks=ranks, per_host=per_host, options=options)
    batch = dataset.first(min(PROBE_ROWS, run.data.batch_size))
    specs, (weights, state) = _sizes(run, schema)
    components = _components_of(specs)
    # before the program is measured: libraries of what is fitted and of extensions are a part of it
    fitted = _fitting(run, dataset, batch)
    extras = [need for hooks in hooks_of(plan) for need in hooks.needs(plan, components, batch)]
    let_go()  # what was only needed to get here
    program = resident_bytes()
    on_device = torch.device(run.device).type == "cuda"
    is_copied = run.checkpoint.background or on_device
    host = {
        "program": program + _FIRST_STEP,
        "freed and kept": _HOLES,
        **_bytes_of_reading(plan, batch),
        **_bytes_of_judging(plan),
        FIT: fitted,
        "a checkpoint": is_copied * (weights + state),
        **{need.part: need.size for need in extras},
    }
    gradients = _bytes_of_row_gradients(plan, specs, batch)
    model = {
        "tables": _bytes_of_tables(plan, specs),
        DENSE: 2 * weights + state,
        "a step": int(gradients),
        "pairs": 0,
    }
    needs = Needs(
        host=host if on_device else {**host, **model},
        device=model if on_device else {},
        largest=_largest(components),
        flop=6.0 * weights / 4 * run.data.batch_size / ranks,
        extras=extras,
    )
    if not fits(needs, run, per_host):
        return needs
    row, fixed, members = _measure_autograd(run, schema, batch)
    let_go()  # see above
    autograd_bytes = row * run.data.batch_size / ranks + fixed
    step = {
        "a step": int(_STEP * autograd_bytes + gradients),
        "pairs": _bytes_of_pairs(plan, members),
    }
    if on_device:
        return dataclasses.replace(needs, device=needs.device | step)
    return dataclasses.replace(needs, host=needs.host | step)


def _bytes_of_reading(plan: Plan, batch: Batch) -> dict[str, int]:
    """Returns what the loaders of both parts take with their batches. batch: some rows."""
    run = plan.run
    dataset = plan.dataset
    rows = run.data.batch_size
    scale = rows / plan.ranks / batch.batch_size
    batches = (BATCHES_AHEAD + 2) * int(batch.nbytes * scale)
    loader = dataset.loader(rows, shuffle=bool(run.data.shuffle), ranks=plan.ranks)
    valid_loader = dataset.loader(rows, "valid", ranks=plan.ranks)
    return {
        "loader": loader.bytes_ahead() + batches,
        "valid loader": valid_loader.bytes_ahead() + batches,
    }


def _bytes_of_judging(plan: Plan) -> dict[str, int]:
    """Returns what scores of the valid part take, and the metrics of them."""
    schema = plan.dataset.schema
    rows = -(-plan.dataset.rows("valid") // plan.ranks)
    has_groups = schema.role("group") is not None
    return {
        "evaluation": evaluation.scored_bytes(rows, len(schema.labels), has_groups),
        "metrics": evaluation.judging_bytes(rows),
    }


def _bytes_of_row_gradients(plan: Plan, specs: Sequence[TableSpec], batch: Batch) -> float:
    """Returns what gradients take of as many table rows as a batch can touch. batch: some rows."""
    scale = plan.run.data.batch_size / plan.ranks / batch.batch_size
    ids = dict.fromkeys((spec.name for spec in specs), 0.0)
    for feature in plan.dataset.schema.sparse:
        table = plan.dataset.schema.columns[feature].table
        assert table is not None
        ids[table] += batch.ids[feature].values_N.numel() * scale
    gradients = 0.0
    for spec in specs:
        gradients += sum(2 * 4 * c.dim * min(ids[spec.name], c.rows) for c in spec.components)
    return gradients


def _bytes_of_tables(plan: Plan, specs: Sequence[TableSpec]) -> int:
    """Returns what tables take of the GPU that has most, or for a rank of the host that has
    most.
    """
    per_host = plan.per_host
    grid = Grid(plan.ranks // per_host, per_host)
    sizes = bytes_of_ranks(plan.run, specs, grid)
    if torch.device(plan.run.device).type == "cuda":
        return max(sizes)
    firsts = range(0, plan.ranks, per_host)
    return max(sum(sizes[first : first + per_host]) // per_host for first in firsts)


def _bytes_of_pairs(plan: Plan, members: int) -> int:
    """Returns what pairs take that the loss compares. members: of the model."""
    run = plan.run
    dataset = plan.dataset
    if not run.loss.compares or dataset.schema.role("group") is None:
        return 0
    return run.loss.bytes_of(dataset.first(run.data.batch_size), members) // plan.ranks


def _largest(components: Sequence[Component]) -> tuple[str, int]:
    """Returns the table that takes most, with its bytes."""
    sizes = {
        component.name: memory_bytes(component, component.rows, component.dim)
        for component in components
    }
    return max(sizes.items(), key=lambda item: item[1], default=("", 0))


def _fitting(run: Run, dataset: Dataset, batch: Batch) -> int:
    """Returns the bytes that the model's parts take which are fitted whole."""
    rows = min(dataset.rows("train"), MOST_FITTED), min(dataset.rows("valid"), MOST_FITTED)
    return (
        run.model.bytes_of_fit(dataset.schema, batch, rows)
        if hasattr(run.model, "bytes_of_fit")
        else 0
    )


def bytes_of_ranks(run: Run, specs: Sequence[TableSpec], grid: Grid) -> list[int]:
    """Returns the bytes of memory of tables on every rank, as the run's plan puts them, with maps
    of ids.

    Args:
        run: its settings.
        specs: of all tables.
        grid: the ranks.

    Raises:
        UserError: when the plan is not for these tables, or not for so many ranks.
    """
    maps = sum(spec.addressing.traits.bytes_map for spec in specs)
    sizes = row_bytes_of_ranks(run, _components_of(specs), grid, memory_bytes)
    return [maps + size for size in sizes]


def row_bytes_of_ranks(
    run: Run, components: Sequence[Component], grid: Grid, part_bytes: Callable[..., int]
) -> list[int]:
    """Returns the bytes of rows on every rank, as the run's plan puts them.

    Args:
        run: its settings.
        components: of all tables.
        grid: the ranks.
        part_bytes: (component, rows, columns) -> bytes of such a part.

    Raises:
        UserError: when the plan is not for these tables, or not for so many ranks.
    """
    copies = 1 + run.checkpoint.background
    if grid.size == 1:
        parts = (part_bytes(component, component.rows, component.dim) for component in components)
        return [copies * sum(parts)]
    from sparrow import sharding  # one process shards nothing

    rank_bytes = [0] * grid.size
    plan = sharding.plan(run.sharding.plan, components, grid)
    for component in components:
        layout = plan[component.name]
        layout.check(component.name, grid.size, grid.local_size)
        for shard in layout.shards(component.name, component.rows, component.dim, component.policy):
            rows = shard.rows[1] - shard.rows[0]
            columns = shard.columns[1] - shard.columns[0]
            rank_bytes[shard.rank] += copies * part_bytes(component, rows, columns) if rows else 0
        if layout.is_replicated:
            rank_bytes = [
                already + copies * part_bytes(component, component.rows, component.dim)
                for already in rank_bytes
            ]
    return rank_bytes


def check_fits(
    run: Run, dataset: Dataset, ranks: int = 1, per_host: int = 1, options: Collection[str] = ()
) -> Needs:
    """Returns what `estimate` finds.

    Args:
        run: its settings.
        dataset: the prepared log.
        ranks: how many the job has.
        per_host: how many of them share a host's memory.
        options: what else was asked for, see `Plan`.

    Raises:
        UserError: when memory is too small. It names the sum, and the smallest change that would
            do. Also for what an extension finds.
    """
    plan = Plan(run=run, dataset=dataset, ranks=ranks, per_host=per_host, options=options)
    check_extensions(plan)
    limit = limit_bytes()
    if limit < _FIRST_STEP:
        limits = f"the limits of this process (ulimit -v, -d) leave {gb(limit)}"
        raise UserError(
            f"memory: {limits}, and a first step alone takes {gb(_FIRST_STEP)}; raise them"
        )
    needs = estimate(run, dataset, ranks, per_host, options)
    if fits(needs, run, per_host):
        return needs
    training.remedies.refuse(plan, needs)


def check_settings(plan: Plan) -> None:
    """Check that the run can judge itself as it is to.

    Raises:
        UserError: when it cannot.
    """
    run = plan.run
    dataset = plan.dataset
    monitor = run.loop.monitor
    if metric_of(monitor).needs_groups and dataset.schema.role("group") is None:
        raise UserError(
            f"loop.monitor: {monitor!r} needs a column of kind group; declare one, or monitor 'ne'"
        )
    if run.loop.patience is not None and not dataset.rows("valid"):
        remedy = "nothing to be patient with, the valid part is empty; prepare with --valid 0.1"
        raise UserError(f"loop.patience: {remedy}")
    for split, why in (("train", "to learn from"), ("valid", "to judge by")):
        if dataset.rows(split) and not dataset.counts(split):
            raise UserError(
                f"data.path: {dataset.path}: the weights of all {dataset.rows(split):,} rows of"
                f" the {split} part are 0, so there is none {why}; mend column"
                f" {listed(dataset.schema.weights)}, or prepare with another --valid"
            )


def check_extensions(plan: Plan) -> None:
    """Let extensions that go along with a run check what is theirs. Ranks may find different
    things.

    Raises:
        UserError: when something is wrong.
    """
    for hooks in hooks_of(plan):
        hooks.check(plan, lambda: _components(plan.run, plan.dataset.schema))


def _components(run: Run, schema: Schema) -> list[Component]:
    return _components_of(_sizes(run, schema)[0])


def _components_of(specs: Sequence[TableSpec]) -> list[Component]:
    return list(itertools.chain.from_iterable(spec.components for spec in specs))


def resolved(
    run: Run,
    dataset: Dataset,
    before: tuple[Run, Transforms] | None = None,
    say: Callable[[str], None] = lambda text: None,
    options: Collection[str] = (),
) -> Run:
    """Returns the run with every automatic choice made for this log but `threads`.

    Args:
        run: its settings.
        dataset: the prepared log.
        before: the run that it goes on with, and how its log was prepared.
        say: is told what takes long, and of overrides of tables that are for none.
        options: what else was asked for, see `Plan`.

    Raises:
        UserError: for settings of tables that do not fit each other or the log.
    """
    schema = dataset.schema
    rows = {name: table.rows or 0 for name, table in schema.encodings.items()}
    for line in run.tables.unused(rows):
        say(line)
    if run.sharding.plan.endswith(".toml"):
        from sparrow.sharding.plan import tiers_of  # few runs have a file of a plan

        tiers = tiers_of(run.sharding.plan, list(rows))
        run = dataclasses.replace(run, tables=run.tables.placed(tiers, rows))
    for hooks in hooks_of(Plan(run=run, dataset=dataset, options=options)):
        run = hooks.resolve(Plan(run=run, dataset=dataset, options=options, say=say))
    run = run.resolved(dataset.rows("train"), schema.split.by == "time")
    if run.data.id_dropout is None:
        run = dataclasses.replace(
            run, data=dataclasses.replace(run.data, id_dropout=default_shares(dataset))
        )
    return dataclasses.replace(run, tables=_with_sizes(run, dataset, before, say))


def _with_sizes(
    run: Run, dataset: Dataset, before: tuple[Run, Transforms] | None, say: Callable[[str], None]
) -> TableChoices:
    """Returns the choices of tables with the sizes of their addressings settled."""
    tables = dataset.schema.encodings
    if before is None and all(
        run.tables.for_table(name, table.rows or 0).addressing is None
        for name, table in tables.items()
    ):
        return run.tables
    plain = dataclasses.replace(run, tables=run.tables.unaddressed)
    dims = {spec.name: spec.dim for spec in _sizes(plain, dataset.schema)[0]}
    earlier = None if before is None else (before[0], before[1].schema)
    return training.table_sizes.with_sizes(run, dataset, dims, earlier, say)


def with_threads(
    run: Run, dataset: Dataset, ranks: int = 1, per_host: int = 1, options: Collection[str] = ()
) -> Run:
    """Returns the run with a number of CPU threads.

    Args:
        run: its settings.
        dataset: the prepared log.
        ranks: how many the job has.
        per_host: how many of them share a host.
        options: what else was asked for, see `Plan`.

    Raises:
        UserError: when memory is too small, see `check_fits`.
    """
    needs = check_fits(run, dataset, ranks, per_host, options)
    return dataclasses.replace(run, threads=run.threads or threads_for(needs, per_host))


def threads_for(needs: Needs, per_host: int = 1) -> int:
    """Returns as many CPU threads as pay in a step: one if it is small, else all this rank's cores.

    The number depends on the step's size alone and not on how long it takes. Sums depend on the
    number of threads, and a run's should not depend on what else the machine does.

    Args:
        needs: what the run will need.
        per_host: how many ranks share a host.
    """
    if needs.flop < SMALL_FLOP and {**needs.host, **needs.device}["a step"] < SMALL_BYTES:
        return 1
    # torchrun gives a rank one
    return min(cores(), torch.get_num_threads()) if per_host == 1 else cores(per_host)


@contextmanager
def within_device(run: Run, schema: Schema) -> Iterator[None]:
    """Turns a GPU's lack of memory during training into an error for people.

    Raises:
        UserError: when the GPU is full. It names the largest table and the smallest changes.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        training.remedies.refuse_device(run, _components(run, schema), error)


@contextmanager
def threads_given_back() -> Iterator[None]:
    """Sets torch's number of threads back at the end. A small run's are too few for what comes next
    in a process.
    """
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fits(needs: Needs, run: Run, per_host: int) -> bool:
    """Returns whether there is memory for what a run needs."""
    return needs.bytes_host <= free_host(needs, per_host) and (
        not needs.device or needs.bytes_device <= free_device(run)
    )


def free_host(needs: Needs, per_host: int) -> float:
    """Returns how many bytes of this rank's host memory are free or hold the program; infinity
    where nothing tells.
    """
    free = available_bytes()
    left = min(math.inf if free is None else free / per_host, limit_bytes())
    return left + needs.host["program"] - _FIRST_STEP


def is_process_limited() -> bool:
    """Returns whether limits of this process leave less memory than the host has."""
    return limit_bytes() < (available_bytes() or math.inf)


def free_device(run: Run) -> float:
    """Returns how many bytes of the run's GPU are free."""
    return float(torch.cuda.mem_get_info(torch.device(run.device))[0])


class Shapes(TorchFunctionMode):
    """What first values are made with, for tensors that have none: torch would import its compiler,
    3 s and 70 MB.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        kwargs = kwargs or {}
        if name in ("mul", "div", "add", "sub"):
            return torch.broadcast_tensors(*(arg for arg in args if isinstance(arg, Tensor)))[0]
        if name.endswith("_") and not name.startswith("_") and name != "requires_grad_":  # in place
            return next(iter((*args, *kwargs.values())))
        return (torch.empty if name in ("randn", "rand") else func)(*args, **kwargs)


def _sizes(run: Run, schema: Schema) -> tuple[list[TableSpec], tuple[int, int]]:
    """Returns what the model's tables are, and the bytes of the dense weights and of their
    optimizer.
    """
    with torch.random.fork_rng(devices=[]), within_memory("cpu"):
        try:
            with torch.device("meta"), Shapes():
                model: Any = untrained(run, schema, UNALLOCATED)
        except (RuntimeError, TypeError):  # a model that computes with its first weights
            model = untrained(run, schema, UNALLOCATED)
    specs = list(itertools.chain.from_iterable(tables.specs for tables in tables_of(model)))
    per_byte, per_tensor = dense_state(run)
    weights = [p.nbytes for p in model.parameters()]
    return specs, (sum(weights), per_byte * sum(weights) + per_tensor * len(weights))


def dense_state(run: Run) -> tuple[int, int]:
    """Returns the bytes that the dense optimizer keeps for each byte of a weight tensor, and for
    the whole tensor.
    """
    # optimizers keep as many numbers as a weight has, some times over, and a few
    sample = nn.Parameter(torch.zeros(2))
    sample.grad = torch.zeros(2)
    optimizer = run.dense.build([sample])
    adapt_optimizer(optimizer, run)
    optimizer.step()
    state = [v for v in optimizer.state[sample].values() if isinstance(v, Tensor)]
    per_byte = math.ceil(sum(v.nbytes for v in state if v.shape == sample.shape) / sample.nbytes)
    return per_byte, sum(v.nbytes for v in state if v.shape != sample.shape)


def _measure_autograd(run: Run, schema: Schema, batch: Batch) -> tuple[float, float, int]:
    """Bytes that autograd keeps of each row, and whatever the batch, from parts of this one that
    grow; and members.

    What a larger part will take is known from the smaller ones: where there is no memory for it,
    they have to do.
    """
    storage_bytes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storage_bytes[storage.data_ptr()] = storage.nbytes()
        # an output would hold the graph that holds it, for ever: no backward frees it
        return tensor.detach()

    free = available_bytes()
    all_rows = batch.batch_size
    per_row = fixed = before = rows_before = 0.0
    members = 1
    with torch.random.fork_rng(devices=[]), within_memory("cpu"):
        model: Any = untrained(run, schema, Placement(store=FoldedStore))
        for rows in sorted({max(all_rows // 8, 1), max(all_rows // 4, 1), all_rows}):
            if free is not None and _STEP * (per_row * rows + fixed) > free:
                break
            part = batch.part(0, rows)
            # else it has the memory of the whole
            part = dataclasses.replace(part, dense_BC=part.dense_BC.clone())
            storage_bytes.clear()
            with (
                torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
                computing(run.precision, torch.device("cpu")),
            ):
                logits = model(part)
                loss = binary_cross_entropy(logits, part)
            members = logits[0, 0].numel()
            for parameter in model.parameters():
                storage_bytes.pop(parameter.untyped_storage().data_ptr(), None)
            now = float(sum(storage_bytes.values()))
            per_row = max(now - before, 0.0) / (rows - rows_before)
            fixed = max(now - per_row * rows, 0.0)
            before = now
            rows_before = rows
            del loss, logits
    return per_row, fixed, members
