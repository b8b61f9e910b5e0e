"""What a run will need of memory, found before it needs it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparrow import sharding
from sparrow.core import Batch, UserError
from sparrow.core.cores import cores
from sparrow.core.errors import listed
from sparrow.core.memory import available_bytes, gb, let_go, resident_bytes
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import LogTable, Numbering, TableChoices, TableSpec, stored_in, unallocated
from sparrow.embeddings.spec import Component, in_memory
from sparrow.embeddings.stores.folded import FoldedStore
from sparrow.features.schema import Schema
from sparrow.features.transforms import Transforms
from sparrow.layers import computing
from sparrow.layers.precision import AUTO
from sparrow.losses import binary_cross_entropy
from sparrow.optimizers import FewBits
from sparrow.sharding.plan import Grid, tiers_of
from sparrow.trained.build import tables_of, untrained, within_memory
from sparrow.trained.calibrate import check_valid
from sparrow.trained.run import Run
from sparrow.training.disk import bytes_of_checkpoints, check_disks
from sparrow.training.dropout import default_shares
from sparrow.training.probe import NEED, bytes_of
from sparrow.training.reuse import on_ssd

PROBE_ROWS = 256
_FEWER = "prepare with a larger min_count or fewer rows, or choose a smaller --tables.format.name, such as int8"
_ON_SSD = ", or keep it on an SSD with few frames in memory (--ssd, --tables.tier.name ssd)"
DENSE = "dense weights, gradients and optimizer"
# measured on DCNv2 and DLRM of several sizes, with which the sum was within a seventh of what runs took
_STEP = 2.2  # bytes a step needs for each byte that autograd keeps: what flows backward, and the allocator's gaps
_FIRST_STEP = 60_000_000  # bytes of operators that load at their first call, and of metrics
SMALL_FLOP, SMALL_BYTES = 1e9, 64e6  # of a step, which a second thread would take longer to join than to do


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes that a run will have at once, by what they are for.

    Args:
        host: what it is for -> bytes of the host.
        device: what it is for -> bytes of the device, where that is a GPU.
        largest: the table that takes most, with its bytes.
        flop: floating-point operations of a step's products with dense weights, at least, forward and backward.
    """

    host: dict[str, int]
    device: dict[str, int]
    largest: tuple[str, int]
    flop: float

    @property
    def bytes_host(self) -> int:
        """Bytes that the host has to hold."""
        return sum(self.host.values())

    @property
    def bytes_device(self) -> int:
        """Bytes that the device has to hold."""
        return sum(self.device.values())


def estimate(run: Run, dataset: Dataset, ranks: int = 1, per_host: int = 1, probe: bool = False) -> Needs:
    """Returns what one rank of the run will need. It is found with the same model over tables of a few rows.

    Tables count as rows times the bytes of a row with its optimizer state, where the run's plan puts them. The figure
    is for a rank of the host that has most, or for the GPU that has most. Dense weights count with gradients and
    optimizer state. A step counts with what autograd keeps, and with gradients of as many table rows as a batch can
    touch. Pairs that the loss compares count as in the log's first batch. A model that is too large even without a step
    is never built, and what autograd keeps is then left out, and so are pairs and what a probe learns.

    Args:
        run: its settings.
        dataset: the prepared log.
        ranks: how many the job has.
        per_host: how many of them share a host.
        probe: whether it is probed.
    """
    program = resident_bytes()
    batch = dataset.first(min(PROBE_ROWS, run.data.batch_size))
    schema = dataset.schema
    specs, (weights, state) = _sizes(run, schema)
    components = [component for spec in specs for component in spec.components]
    each = {component.name: component.bytes_of(component.rows, component.dim) for component in components}
    grid = Grid(ranks // per_host, per_host)
    of_ranks = held(run, specs, grid)
    scale = run.data.batch_size / ranks / batch.batch_size
    ids = dict.fromkeys((spec.name for spec in specs), 0.0)
    for feature in dataset.schema.sparse:
        table = dataset.schema.columns[feature].table
        assert table is not None
        ids[table] += batch.ids[feature].values_N.numel() * scale
    gradients = sum(2 * 4 * c.dim * min(ids[spec.name], c.rows) for spec in specs for c in spec.components)
    valid = (12 + 8 * len(dataset.schema.labels)) * dataset.rows("valid") // ranks
    loader = dataset.loader(run.data.batch_size, shuffle=bool(run.data.shuffle), ranks=ranks).bytes_ahead()
    saving = weights + state + bytes_of_checkpoints(components, run.checkpoint.keep)
    here = {"program": program + _FIRST_STEP, "loader": loader, "evaluation": valid, "a checkpoint": saving}
    here["rows beneath frames"] = max(held(run, specs, grid, lambda c, *part: c.tier.beneath_bytes(c, *part)))
    largest = max(each.items(), key=lambda item: item[1], default=("", 0))
    flop = 6.0 * weights / 4 * run.data.batch_size / ranks

    def needs(kept: float, compared: int = 0) -> Needs:
        step = int(_STEP * kept + gradients)
        model = {"tables": max(of_ranks), DENSE: 2 * weights + state, "a step": step, "pairs": compared}
        if torch.device(run.device).type == "cuda":
            return Needs(host=here, device=model, largest=largest, flop=flop)
        hosts = [sum(of_ranks[first : first + per_host]) // per_host for first in range(0, ranks, per_host)]
        return Needs(host={**here, **model, "tables": max(hosts)}, device={}, largest=largest, flop=flop)

    if not _fits(needs(0), run, per_host):
        return needs(0)
    row, fixed, members = _kept(run, schema, batch)
    here[NEED] = bytes_of(run, schema, batch) if probe else 0
    let_go()  # else what was tried here is missing where the answer, or another, is judged
    has_pairs = run.loss.compares and schema.role("group") is not None
    compared = run.loss.bytes_of(dataset.first(run.data.batch_size), members) // ranks if has_pairs else 0
    return needs(row * run.data.batch_size / ranks + fixed, compared)


def held(run: Run, specs: Sequence[TableSpec], grid: Grid, of: Callable[..., int] = Component.bytes_of) -> list[int]:
    """Returns the bytes of memory of tables on every rank, as the run's plan puts them.

    Args:
        run: its settings.
        specs: of all tables.
        grid: the ranks.
        of: (component, rows, columns) -> bytes of such a part. With the default, maps of ids count too.

    Raises:
        UserError: when the plan is not for these tables, or not for so many ranks.
    """
    components = [component for spec in specs for component in spec.components]
    maps = sum(spec.addressing.traits.bytes_map for spec in specs) if of is Component.bytes_of else 0
    found, copies = [maps] * grid.size, 1 + run.checkpoint.background
    plan = sharding.plan(run.sharding.plan if grid.size > 1 else "data_parallel", components, grid)
    for component in components:
        layout = plan[component.name]
        layout.check(component.name, grid.size, grid.local_size)
        for shard in layout.shards(component.name, component.rows, component.dim, component.policy):
            rows, columns = shard.rows[1] - shard.rows[0], shard.columns[1] - shard.columns[0]
            found[shard.rank] += copies * of(component, rows, columns) if rows else 0
        if layout.is_replicated:
            found = [already + copies * of(component, component.rows, component.dim) for already in found]
    return found


def check_fits(run: Run, dataset: Dataset, ranks: int = 1, per_host: int = 1, probe: bool = False) -> Needs:
    """Returns what `estimate` finds.

    Args:
        run: its settings.
        dataset: the prepared log.
        ranks: how many the job has.
        per_host: how many of them share a host's memory.
        probe: whether it is probed.

    Raises:
        UserError: when memory is too small. It names the sum, and the smallest change that would do. Also when a disk
            is, where tables are on an SSD.
    """
    if run.ssd is not None:
        specs, _ = _sizes(run, dataset.schema)
        check_disks(run, [component for spec in specs for component in spec.components], dataset, ranks // per_host)
    needs = estimate(run, dataset, ranks, per_host, probe)
    if _fits(needs, run, per_host):
        return needs
    place, parts, size, free = "memory", needs.host, needs.bytes_host, _free_host(needs, per_host)
    if needs.device and size <= free:
        place, parts, size, free = f"memory of {run.device}", needs.device, needs.bytes_device, _free_device(run)
    told = ", ".join(f"{name} {gb(of)}" for name, of in sorted(parts.items(), key=lambda item: -item[1]) if of)
    remedy = _remedy(run, needs, dataset, ranks, per_host) + _on_ssd(run, needs, dataset, ranks, per_host)
    raise UserError(f"{place}: the run needs {gb(size)} and {gb(free)} are there ({told}); {remedy}")


def check_settings(run: Run, dataset: Dataset, probe: bool = False) -> None:
    """Check that the run can judge itself as it is to, and that nothing is left that it cannot choose by itself.

    Args:
        run: its settings.
        dataset: the prepared log.
        probe: whether it is probed.

    Raises:
        UserError: when it cannot.
    """
    if run.precision.name == AUTO:
        remedy = "give Python what analysis.numerics.auto.settled returns"
        raise UserError(f"precision: 'auto' is decided by `sparrow train`; {remedy}")
    if probe and run.compile:
        raise UserError("probe: not of compiled models; leave --probe or compile out")
    if run.loop.monitor == "gauc" and dataset.schema.role("group") is None:
        raise UserError("loop.monitor: 'gauc' needs a column of kind group; declare one, or monitor 'ne'")
    if run.loop.patience is not None and not dataset.rows("valid"):
        remedy = "nothing to be patient with, the valid part is empty; prepare with --valid 0.1"
        raise UserError(f"loop.patience: {remedy}")
    if run.calibrate != "none":
        check_valid(dataset)


def resolved(
    run: Run,
    dataset: Dataset,
    before: tuple[Run, Transforms] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Run:
    """Returns the run with every automatic choice made for this log but `threads`.

    Args:
        run: its settings.
        dataset: the prepared log.
        before: the run that it goes on with, and how its log was prepared.
        say: is told what takes long, and of overrides of tables that are for none.

    Raises:
        UserError: for settings of tables that do not fit each other or the log.
    """
    schema = dataset.schema
    rows = {name: table.rows or 0 for name, table in schema.encodings.items()}
    for line in run.tables.unused(rows):
        say(line)
    tiers = tiers_of(run.sharding.plan, list(rows))
    run = dataclasses.replace(run, tables=run.tables.placed(tiers, rows))
    for line in _without_effect(run, rows):
        say(line)
    run = run.resolved(dataset.rows("train"), schema.split.by == "time")
    if run.data.id_dropout is None:
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, id_dropout=default_shares(dataset)))
    return dataclasses.replace(run, tables=_with_sizes(run, dataset, before, say))


def _without_effect(run: Run, rows: Mapping[str, int]) -> Iterator[str]:
    """Yields a line for each setting of tiers that does nothing in this run. rows: of each table.

    Raises:
        UserError: when tables are to be on an SSD, and no folder is named.
    """
    tiers = {name: run.tables.of(name, count).tier for name, count in rows.items()}
    is_on = any(tier.is_on for tier in tiers.values())
    on_ssd = [name for name, tier in tiers.items() if tier.has_folder]
    if on_ssd and run.ssd is None:
        told = f"is {tiers[on_ssd[0]].name} for {listed(on_ssd)}"
        raise UserError(f"tables.tier: {told}, and no folder on an SSD is named; give --ssd DIR")
    for told in sorted({tier.advice(torch.device(run.device).type) for tier in tiers.values()} - {""}):
        yield f"tables.tier: {told}"
    if run.ssd is not None and not on_ssd:
        yield "ssd: no table is on it; name some with --tables.tier.name ssd, or with a plan of `sparrow plan`"
    if not is_on and any(not tier.has_folder and tier != in_memory() for tier in tiers.values()):
        yield "tables.tier: it says nothing while tables are in memory; --tables.tier.name ssd puts them on --ssd"
    if is_on and run.compile:
        yield "loop.ahead: rows without frames are not read ahead with --compile"


def _with_sizes(
    run: Run, dataset: Dataset, before: tuple[Run, Transforms] | None, say: Callable[[str], None]
) -> TableChoices:
    """Returns the choices of tables with the sizes of their addressings settled."""
    ids = {name: Numbering.of(table) for name, table in dataset.schema.encodings.items()}
    if before is None and all(run.tables.of(name, of.rows).addressing is None for name, of in ids.items()):
        return run.tables
    plain = dataclasses.replace(run, tables=run.tables.unaddressed)
    dims = {spec.name: spec.dim for spec in _sizes(plain, dataset.schema)[0]}
    counted = Counts(dataset, say)
    tables = {name: LogTable(of, dims[name], partial(counted, name)) for name, of in ids.items() if name in dims}
    were = {}
    if before is not None:
        were = {name: Numbering.of(table) for name, table in before[1].schema.encodings.items()}
    return run.tables.settled(tables, run.tables if before is None else before[0].tables, were)


class Counts:
    """How often the training part of a log has each id. It is read when somebody asks first."""

    def __init__(self, dataset: Dataset, say: Callable[[str], None] = lambda text: None) -> None:
        self._dataset = dataset
        self._say = say
        self._counts: dict[str, Tensor] = {}

    def __call__(self, table: str) -> Tensor:
        """Returns how often training rows have each id of a table, see `LogTable`."""
        if not self._counts:
            self._count()
        return self._counts[table]

    def _count(self) -> None:
        schema = self._dataset.schema
        self._say("tables.addressing: counting the ids of the training part, which settles sizes")
        for name, of in schema.encodings.items():
            self._counts[name] = torch.zeros((of.rows or 0) if of.is_numbered else 1, dtype=torch.int64)
        for batch in self._dataset.loader(1 << 14, split="train", dedup="off"):
            for feature in schema.sparse:
                table, values_N = str(schema.columns[feature].table), batch.ids[feature].values_N.long()
                counts = self._counts[table]
                counts += torch.bincount(values_N if len(counts) > 1 else values_N * 0, minlength=len(counts))


def with_threads(run: Run, dataset: Dataset, ranks: int = 1, per_host: int = 1, probe: bool = False) -> Run:
    """Returns the run with a number of CPU threads.

    Args:
        run: its settings.
        dataset: the prepared log.
        ranks: how many the job has.
        per_host: how many of them share a host.
        probe: whether it is probed.

    Raises:
        UserError: when memory is too small, see `check_fits`.
    """
    needs = check_fits(run, dataset, ranks, per_host, probe)
    return dataclasses.replace(run, threads=run.threads or threads_for(needs, per_host))


def threads_for(needs: Needs, per_host: int = 1) -> int:
    """Returns as many CPU threads as pay in a step: one if it is small, else all this rank's cores.

    The number depends on the step's size alone and not on how long it takes. Sums depend on the number of threads, and
    a run's should not depend on what else the machine does.

    Args:
        needs: what the run will need.
        per_host: how many ranks share a host.
    """
    if needs.flop < SMALL_FLOP and {**needs.host, **needs.device}["a step"] < SMALL_BYTES:
        return 1
    return min(cores(), torch.get_num_threads()) if per_host == 1 else cores(per_host)  # torchrun gives a rank one


@contextmanager
def within_device(run: Run, schema: Schema) -> Iterator[None]:
    """Turns a GPU's lack of memory during training into an error for people.

    Raises:
        UserError: when the GPU is full. It names the largest table and the smallest changes.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        specs, _ = _sizes(run, schema)
        components = [component for spec in specs for component in spec.components]
        each = {component.name: component.bytes_of(component.rows, component.dim) for component in components}
        table, size = max(each.items(), key=lambda item: item[1], default=("none", 0))
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        what = f"memory of {run.device}: it is full" + (f", and {asked[1]} more were asked for" if asked else "")
        remedy = f"lower --data.batch_size from {run.data.batch_size}, train on more GPUs, or {_FEWER}"
        raise UserError(f"{what}; the largest table, {table!r}, takes {gb(size)}: {remedy}") from None


@contextmanager
def threads_given_back() -> Iterator[None]:
    """Sets torch's number of threads back at the end. A small run's are too few for what comes next in a process."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _remedy(run: Run, needs: Needs, dataset: Dataset, ranks: int, per_host: int) -> str:
    """Returns the first of smaller batches and smaller sizes of the model with which it fits, else what is largest.

    A probe that it would fit without comes before them.
    """
    if _fits(dataclasses.replace(needs, host=needs.host | {NEED: 0}), run, per_host):
        return "leave --probe out, or name a precision in the place of auto"
    for part, name, value in _smaller(run):
        try:
            changed: Any = dataclasses.replace(getattr(run, part), **{name: value})
            smaller = dataclasses.replace(run, **{part: changed})
            if _fits(estimate(smaller, dataset, ranks, per_host, bool(needs.host.get(NEED))), smaller, per_host):
                return f"--{part}.{name} {value if isinstance(value, int) else repr(str(list(value)))} fits"
        except UserError:  # a size that has to divide another
            continue
    table, size = needs.largest
    remedies = {
        "tables": f"its largest table, {table!r}, takes {gb(size)}: {_FEWER}{'' if needs.device else _ON_SSD}",
        DENSE: "its weights are what is large: lower several of the model's sizes",
        "evaluation": "its valid part is what is large: prepare with a smaller one",
    }
    parts = {**needs.host, **needs.device}
    return remedies[max(remedies, key=lambda part: parts[part])]


def _on_ssd(run: Run, needs: Needs, dataset: Dataset, ranks: int, per_host: int) -> str:
    """Returns what an SSD would do, where tables are most of what the run needs; "" where it would not help."""
    if 2 * needs.host.get("tables", 0) < needs.bytes_host:
        return ""
    if ranks > 1:  # a plan may have copies, which have no tier
        run = dataclasses.replace(run, sharding=dataclasses.replace(run.sharding, plan="auto"))
    told = on_ssd(run, dataset, lambda other: _fits(estimate(other, dataset, ranks, per_host), other, per_host))
    if told and ranks > 1:
        told = f"--sharding.plan auto {told} in one process"
    return told and f"; or tables on an SSD fit: {told}; `sparrow plan RUN --ssd DIR` divides memory better"


def _smaller(run: Run) -> Iterator[tuple[str, str, Any]]:
    """Yields (data or model, setting, value): ever smaller batches, then sizes of the model, set ones first."""
    size = run.data.batch_size
    while (size := size // 2) >= 64:
        yield "data", "batch_size", size
    fields: Any = dataclasses.fields(run.model)  # type: ignore[arg-type]
    for f in sorted(fields, key=lambda f: getattr(run.model, f.name) == f.default):
        value = getattr(run.model, f.name)
        sizes = value if isinstance(value, tuple) else (value,)
        if not sizes or any(type(size) is not int for size in sizes):
            continue
        while min(sizes := tuple(size // 2 for size in sizes)) >= 1:
            yield "model", f.name, sizes if isinstance(value, tuple) else sizes[0]


def _fits(needs: Needs, run: Run, per_host: int) -> bool:
    return needs.bytes_host <= _free_host(needs, per_host) and (
        not needs.device or needs.bytes_device <= _free_device(run)
    )


def _free_host(needs: Needs, per_host: int) -> float:
    """Returns how many bytes of this rank's host memory are free or hold the program; infinity where nothing tells."""
    free = available_bytes()
    return math.inf if free is None else free / per_host + needs.host["program"] - _FIRST_STEP


def _free_device(run: Run) -> float:
    return float(torch.cuda.mem_get_info(torch.device(run.device))[0])


class Shapes(TorchFunctionMode):
    """What first values are made with, for tensors that have none: torch would import its compiler, 3 s and 70 MB."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name in ("mul", "div", "add", "sub"):
            return torch.broadcast_tensors(*(arg for arg in args if isinstance(arg, Tensor)))[0]
        if name.endswith("_") and not name.startswith("_") and name != "requires_grad_":  # in place
            return next(iter((*args, *kwargs.values())))
        return (torch.empty if name in ("randn", "rand") else func)(*args, **kwargs)


def _sizes(run: Run, schema: Schema) -> tuple[list[TableSpec], tuple[int, int]]:
    """Returns what the model's tables are, and the bytes of the dense weights and of their optimizer."""
    with torch.random.fork_rng(devices=[]), within_memory("cpu"):
        try:
            with torch.device("meta"), Shapes(), unallocated():
                model: Any = untrained(run, schema)
        except (RuntimeError, TypeError):  # a model that computes with its first weights
            with unallocated():
                model = untrained(run, schema)
    specs = [spec for tables in tables_of(model) for spec in tables.specs]
    each, few = dense_state(run)
    weights = [p.nbytes for p in model.parameters()]
    return specs, (sum(weights), each * sum(weights) + few * len(weights))


def dense_state(run: Run) -> tuple[int, int]:
    """Returns the bytes that the dense optimizer keeps for each byte of a weight tensor, and for the whole tensor."""
    sample = nn.Parameter(torch.zeros(2))  # optimizers keep as many numbers as a weight has, some times over, and a few
    sample.grad = torch.zeros(2)
    optimizer = run.dense.build([sample])
    FewBits(optimizer, run.precision.weights, run.seed)
    optimizer.step()
    state = [v for v in optimizer.state[sample].values() if isinstance(v, Tensor)]
    each = math.ceil(sum(v.nbytes for v in state if v.shape == sample.shape) / sample.nbytes)
    return each, sum(v.nbytes for v in state if v.shape != sample.shape)


def _kept(run: Run, schema: Schema, batch: Batch) -> tuple[float, float, int]:
    """Bytes that autograd keeps of each row, and whatever the batch, from parts of this one that grow; and members.

    What a larger part will take is known from the smaller ones: where there is no memory for it, they have to do.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output would hold the graph that holds it, for ever: no backward frees it

    free, whole = available_bytes(), batch.batch_size
    each = fixed = before = rows_before = 0.0
    members = 1
    with torch.random.fork_rng(devices=[]), within_memory("cpu"), stored_in(FoldedStore):
        model: Any = untrained(run, schema)
        for rows in sorted({max(whole // 8, 1), max(whole // 4, 1), whole}):
            if free is not None and _STEP * (each * rows + fixed) > free:
                break
            part = batch.part(0, rows)
            part = dataclasses.replace(part, dense_BC=part.dense_BC.clone())  # else it has the memory of the whole
            kept.clear()
            with (
                torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
                computing(run.precision, torch.device("cpu")),
            ):
                logits = model(part)
                loss = binary_cross_entropy(logits, part)
            members = logits[0, 0].numel()
            for parameter in model.parameters():
                kept.pop(parameter.untyped_storage().data_ptr(), None)
            now = float(sum(kept.values()))
            each = max(now - before, 0.0) / (rows - rows_before)
            fixed = max(now - each * rows, 0.0)
            before, rows_before = now, rows
            del loss, logits
    return each, fixed, members
