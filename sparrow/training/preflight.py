"""What a run will need of memory, found before it needs it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparrow.core import Batch, UserError
from sparrow.core.memory import available_bytes, let_go, resident_bytes
from sparrow.data import Dataset
from sparrow.data.schema import Schema, Table
from sparrow.layers import computing
from sparrow.losses import binary_cross_entropy
from sparrow.training.restore import tables_of
from sparrow.training.run import Run

PROBE_ROWS = 256
# measured on DCNv2 and DLRM of several sizes, with which the sum was within a seventh of what runs took
_STEP = 2.2  # bytes a step needs for each byte that autograd keeps: what flows backward, and the allocator's gaps
_FIRST_STEP = 60_000_000  # bytes of operators that load at their first call, and of metrics


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes that a run will have at once, by what they are for; device: those of the device where that is a GPU.

    largest: the table that takes most, with its bytes.
    """

    host: dict[str, int]
    device: dict[str, int]
    largest: tuple[str, int]

    @property
    def bytes_host(self) -> int:
        """All that the host has to hold."""
        return sum(self.host.values())

    @property
    def bytes_device(self) -> int:
        """All that the device has to hold."""
        return sum(self.device.values())


def estimate(run: Run, dataset: Dataset, ranks: int = 1) -> Needs:
    """What the run will need, from one step of the same model over tables of a few rows; of its `ranks`, one.

    Tables: rows times the bytes of a row with its optimizer state. Dense weights: with gradients and optimizer state.
    A step: what autograd keeps, found with two batches, and gradients of as many table rows as a batch can touch.
    """
    program = resident_bytes()
    batch = dataset.first(min(PROBE_ROWS, run.data.batch_size))
    tables, (weights, state), kept = _probe(run, dataset.schema, batch)
    half = dataset.first(batch.batch_size // 2)
    fixed = max(2 * _probe(run, dataset.schema, half)[2] - kept, 0) if half.batch_size else 0  # whatever the batch
    rows = {name: table.rows or 0 for name, table in dataset.schema.tables.items()}
    each = {name: row_bytes * rows[name] for name, (row_bytes, _) in tables.items()}
    scale = run.data.batch_size / ranks / batch.batch_size
    ids = dict.fromkeys(tables, 0.0)
    for feature in dataset.schema.sparse:
        table = dataset.schema.columns[feature].table
        assert table is not None
        ids[table] += batch.ids[feature].values_N.numel() * scale
    gradients = sum(2 * 4 * dim * min(ids[name], rows[name]) for name, (_, dim) in tables.items())
    model = {
        "tables": sum(each.values()) // ranks,
        "dense weights, gradients and optimizer": 2 * weights + state,
        "a step": int(_STEP * ((kept - fixed) * scale + fixed) + gradients),
    }
    valid = (12 + 8 * len(dataset.schema.labels)) * dataset.rows("valid")
    loader = {"loader": dataset.loader(run.data.batch_size, shuffle=bool(run.data.shuffle)).bytes_ahead()}
    here = {"program": program + _FIRST_STEP, **loader, "evaluation": valid, "a checkpoint": weights + state}
    largest = max(each.items(), key=lambda item: item[1], default=("", 0))
    if torch.device(run.device).type == "cuda":
        return Needs(host=here, device=model, largest=largest)
    return Needs(host={**here, **model}, device={}, largest=largest)


def check_fits(run: Run, dataset: Dataset, ranks: int = 1, per_host: int = 1) -> None:
    """UserError with the sum of `estimate` and the smallest change that would do when there is not enough memory.

    ranks, per_host: of the job, and those that share a host's memory.
    """
    needs = estimate(run, dataset, ranks)
    let_go()
    if _fits(needs, run, per_host):
        return
    host, free = needs.bytes_host, _free_host(needs, per_host)
    short, place, parts = host > free, "memory", needs.host
    if not short:
        host, free, place, parts = needs.bytes_device, _free_device(run), f"memory of {run.device}", needs.device
    told = ", ".join(f"{name} {_gb(size)}" for name, size in sorted(parts.items(), key=lambda item: -item[1]) if size)
    remedy = _remedy(run, dataset, ranks, per_host)
    raise UserError(f"{place}: the run needs {_gb(host)} and {_gb(free)} are there ({told}); {remedy}")


def _remedy(run: Run, dataset: Dataset, ranks: int, per_host: int) -> str:
    """The first of smaller batches, smaller vectors and a smaller largest table with which it fits."""
    size = run.data.batch_size
    while (size := size // 2) >= 64:
        smaller = dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=size))
        if _fits(estimate(smaller, dataset, ranks), smaller, per_host):
            return f"--data.batch_size {size} fits"
    dim = next((f.name for f in dataclasses.fields(run.model) if f.name == "dim"), None)  # type: ignore[arg-type]
    width = getattr(run.model, dim) if dim else 0
    while (width := width // 2) >= 1:
        smaller = dataclasses.replace(run, model=dataclasses.replace(run.model, dim=width))  # type: ignore[type-var]
        if _fits(estimate(smaller, dataset, ranks), smaller, per_host):
            return f"--model.dim {width} fits"
    name, size = estimate(run, dataset).largest
    return f"its largest table, {name!r}, takes {_gb(size)}: raise its min_count, or hash it to fewer rows, and prepare"


def _fits(needs: Needs, run: Run, per_host: int) -> bool:
    return needs.bytes_host <= _free_host(needs, per_host) and (
        not needs.device or needs.bytes_device <= _free_device(run)
    )


def _free_host(needs: Needs, per_host: int) -> float:
    free = available_bytes()
    return (
        math.inf if free is None else free / per_host + needs.host["program"] - _FIRST_STEP
    )  # which has its memory already


def _free_device(run: Run) -> float:
    return float(torch.cuda.mem_get_info(torch.device(run.device))[0])


def _probe(run: Run, schema: Schema, batch: Batch) -> tuple[dict[str, tuple[int, int]], tuple[int, int], int]:
    """Of each table bytes a row and dim; bytes of the dense weights and of their optimizer; what autograd keeps."""
    small = dataclasses.replace(schema, tables={name: Table(encoding="hash", rows=16) for name in schema.tables})
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng(devices=[]):
        model: Any = run.model.build(small, run.tables, run.seed)
        optimizer = run.dense.build(model.parameters())
        tables = tables_of(model)
        for one in tables:
            one.mode = "deferred"
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), computing(run.precision, torch.device("cpu")):
            loss = binary_cross_entropy(model(batch), batch)
        for parameter in model.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        loss.backward()
        optimizer.step()
    found = {}
    for record in (r for one in tables for r in one.all_records()):
        found[record.spec.name] = (sum(t[:1].nbytes for t in record.fields.values()), record.spec.dim)
    state = [v for s in optimizer.state_dict()["state"].values() for v in s.values() if isinstance(v, Tensor)]
    dense = sum(p.nbytes for p in model.parameters())
    return found, (dense, sum(t.nbytes for t in state)), sum(kept.values())


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
