"""`EmbeddingTables`: prepare -> lookup -> update -> release, on tables in plain memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.core.errors import suggest
from sparrow.embeddings.spec import Feature, TableSpec
from sparrow.kernels import Impl, embedding_bag

Mode = Literal["fused", "deferred", "off"]


@dataclass
class RowGradients:
    """Gradients of a table's touched rows: rows_U int64 [U], ascending and unique; grad_UD float32 [U, D]."""

    rows_U: Tensor
    grad_UD: Tensor


@dataclass(frozen=True, eq=False)
class _Bags:
    """One table's share of a batch: the bags of all its features, one after the other."""

    slots_N: Tensor
    offsets_B1: Tensor
    weights_N: Tensor | None
    scale_B: Tensor | None
    counts: tuple[int, ...]  # bags per feature


@dataclass(eq=False)
class Handle:
    """A batch made ready for lookup; its rows stay where they are until `release`."""

    ids: KeyedJagged
    bags: dict[str, _Bags]
    released: bool = False


class RowRecords(nn.Module):
    """The rows of one table: weight [R, D], the rule's state fields, and a touched byte [R]."""

    weight: Tensor
    touched: Tensor

    def __init__(self, spec: TableSpec, features: tuple[Feature, ...], seed: int) -> None:
        super().__init__()
        self.spec, self.features = spec, features
        rows = spec.addressing.rows
        scale = rows**-0.5 if spec.init_scale is None else spec.init_scale
        random = torch.Generator().manual_seed(seed + zlib.crc32(spec.name.encode()))
        # not persistent: a state_dict holds the dense weights, tables travel as chunks
        self.register_buffer("weight", torch.empty(rows, spec.dim).uniform_(-scale, scale, generator=random), False)
        self.register_buffer("touched", torch.zeros(rows, dtype=torch.uint8), False)
        state = spec.rule.init_state(rows, spec.dim)
        for name, tensor in state.items():
            self.register_buffer(name, tensor, False)
        self.state_names = tuple(state)
        self.lr = torch.tensor(spec.rule.lr)
        self.version = 0  # counts updates, so that a backward through rows that have changed is noticed
        self.pending: list[RowGradients] = []

    @property
    def rows(self) -> int:
        """R, the rows of the table."""
        return self.spec.addressing.rows

    @property
    def state(self) -> dict[str, Tensor]:
        """The rule's fields, by name."""
        return {name: self.get_buffer(name) for name in self.state_names}

    @property
    def fields(self) -> dict[str, Tensor]:
        """Every field of the row record, by name."""
        return {"weight": self.weight, **self.state, "touched": self.touched}


class EmbeddingTables(nn.Module):
    """Embedding tables and the features that look into them.

    specs: the tables. features: who looks into which. seed: of the initial rows; a table's depend on its name and
    the seed alone. mode: "fused" updates rows inside backward; "deferred" collects exact unique-row gradients until
    `update` (accumulation, clipping, skipping a step); "off" leaves the tables alone. impl: see `sparrow.kernels`.
    Updates are exact: a row's gradients from the whole batch and all features are summed first, in order of
    occurrence, then the rule runs once (Neo, arXiv 2104.05158, section 4.1). Raises UserError for tables or features
    that do not fit together. Calling the module does prepare, lookup and release.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        features: Sequence[Feature],
        *,
        seed: int = 0,
        mode: Mode = "fused",
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        names = [spec.name for spec in specs]
        for kind, repeated in (("table", names), ("feature", [f.name for f in features])):
            if len(set(repeated)) != len(repeated):
                raise UserError(f"{kind}s {repeated}: a name occurs twice; name each once")
        for feature in features:
            if feature.table not in names:
                raise UserError(f"feature {feature.name!r}: no table {feature.table!r}{suggest(feature.table, names)}")
        self.features = tuple(features)
        self.records = nn.ModuleList(  # a list: a module's name may not hold a dot, nor be a method's
            RowRecords(spec, tuple(f for f in features if f.table == spec.name), seed) for spec in specs
        )
        self.mode, self.impl = mode, impl
        self._anchor = torch.zeros((), requires_grad=True)  # gives autograd a reason to call the tables' backward
        self._bad_ids: list[tuple[RowRecords, Feature, Tensor]] = []

    # -- the lifecycle ------------------------------------------------------------------------------------------

    def prepare(self, ids: KeyedJagged) -> Handle:
        """Map ids to rows; may run some batches ahead. UserError names table, feature, position and value."""
        return Handle(ids, {r.spec.name: self._bags(r, ids) for r in self.all_records() if r.features})

    def lookup(self, handle: Handle) -> dict[str, Tensor | Jagged]:
        """Feature -> vectors [B, D], or a Jagged of vectors [N, D] for a feature with pooling "none"."""
        if handle.released:
            raise UserError("lookup: this handle was released; prepare the batch again")
        out: dict[str, Tensor | Jagged] = {}
        for record in self.all_records():
            if record.features:
                bags = handle.bags[record.spec.name]
                vectors: Tensor = _Lookup.apply(self._anchor, bags.weights_N, bags, record, self)
                for feature, part in zip(record.features, vectors.split(bags.counts), strict=True):
                    out[feature.name] = self._shape(feature, part, handle.ids[feature.name])
        return {f.name: out[f.name] for f in self.features}

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gradients collected in "deferred" mode; nothing to do in the other modes."""
        for name, gradients in self.gradients().items():
            record = self.record(name)
            embedding_bag.update_rows(
                record.weight, record.state, record.touched, gradients.rows_U, gradients.grad_UD,
                record.spec.rule, record.lr, impl=self.impl,
            )  # fmt: skip
            record.version += 1
        self.discard()

    def release(self, handle: Handle) -> None:
        """Let go of the batch's rows; tables in plain memory have nothing to unpin."""
        handle.released = True

    def forward(self, ids: KeyedJagged) -> dict[str, Tensor | Jagged]:
        """Prepare, lookup, release."""
        handle = self.prepare(ids)
        out = self.lookup(handle)
        self.release(handle)
        return out

    # -- deferred gradients, learning rate ----------------------------------------------------------------------

    def gradients(self) -> dict[str, RowGradients]:
        """Table -> exact unique-row gradients collected since the last `update` or `discard`, to read or scale."""
        for record in self.all_records():
            if len(record.pending) > 1:
                slots_N = torch.cat([g.rows_U for g in record.pending])
                grad_BD = torch.cat([g.grad_UD for g in record.pending])
                offsets_B1 = torch.arange(slots_N.numel() + 1, device=slots_N.device)
                merged = embedding_bag.row_gradients(grad_BD, slots_N, offsets_B1, num_rows=record.rows, impl=self.impl)
                record.pending = [RowGradients(*merged)]
        return {record.spec.name: record.pending[0] for record in self.all_records() if record.pending}

    def discard(self) -> None:
        """Forget the collected gradients."""
        for record in self.all_records():
            record.pending = []

    def scale_lr(self, factor: float) -> None:
        """Set every table's learning rate to its rule's times `factor` (a schedule)."""
        for record in self.all_records():
            record.lr.fill_(record.spec.rule.lr * factor)

    @property
    def mode(self) -> Mode:
        """How gradients reach the rows; may be changed between steps."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in ("fused", "deferred", "off"):
            raise UserError(f"mode: {mode!r} is not one of 'fused', 'deferred', 'off'")
        self._mode = mode

    # -- rows in and out ----------------------------------------------------------------------------------------

    def all_records(self) -> Iterator[RowRecords]:
        """The rows of every table."""
        for record in self.records:
            assert isinstance(record, RowRecords)
            yield record

    def record(self, table: str) -> RowRecords:
        """The rows of `table`."""
        found = next((r for r in self.all_records() if r.spec.name == table), None)
        if found is None:
            raise UserError(f"no table {table!r}{suggest(table, [r.spec.name for r in self.all_records()])}")
        return found

    def chunks(self, max_bytes: int = 64 << 20) -> Iterator[Chunk]:
        """Every row record, in blocks of at most about `max_bytes`; the tensors are views."""
        for record in self.all_records():
            rows, dim = record.weight.shape
            row_bytes = sum(t[:1].numel() * t.element_size() for t in record.fields.values())
            step = max(1, max_bytes // row_bytes)
            for first in range(0, rows, step):
                last = min(first + step, rows)
                fields = {name: tensor[first:last] for name, tensor in record.fields.items()}
                yield Chunk(table=record.spec.name, rows=(first, last), columns=(0, dim), fields=fields)

    @torch.no_grad()
    def load_chunk(self, chunk: Chunk) -> None:
        """Overwrite the chunk's rows and columns; UserError when table, range or fields do not fit."""
        record = self.record(chunk.table)
        rows, dim = record.weight.shape
        if set(chunk.fields) != set(record.fields):
            raise UserError(
                f"table {chunk.table!r}: fields {sorted(chunk.fields)} where {sorted(record.fields)} are kept; "
                "use the rule they were saved with"
            )
        if not (0 <= chunk.rows[0] <= chunk.rows[1] <= rows and 0 <= chunk.columns[0] <= chunk.columns[1] <= dim):
            place = f"table {chunk.table!r}: chunk {chunk.rows} x {chunk.columns}"
            raise UserError(f"{place} lies outside {rows} x {dim}; cut it to the table")
        for name, tensor in record.fields.items():
            part = tensor[slice(*chunk.rows)]
            (part[:, slice(*chunk.columns)] if part.dim() > 1 else part).copy_(chunk.fields[name])

    def raise_bad_ids(self) -> None:
        """Raise what prepare noticed on a GPU, where asking at once would stall it; call at a synchronisation."""
        noticed, self._bad_ids = self._bad_ids, []
        for record, feature, count in noticed:
            if int(count):
                raise UserError(
                    f"table {record.spec.name!r}, feature {feature.name!r}: {int(count)} ids outside "
                    f"[0, {record.rows}); give the table more rows or hashed addressing"
                )

    # -- inside -------------------------------------------------------------------------------------------------

    def _bags(self, record: RowRecords, ids: KeyedJagged) -> _Bags:
        slots, lengths, weights, scales = [], [], [], []
        for feature in record.features:
            jagged = ids[feature.name]
            slots.append(self._check(record, feature, jagged.values_N, record.spec.addressing.slots(jagged.values_N)))
            each = (
                jagged.lengths_B if feature.pooling != "none" else torch.ones_like(jagged.values_N, dtype=torch.int64)
            )
            lengths.append(each)
            scales.append(
                1.0 / each.clamp(min=1) if feature.pooling == "mean" else torch.ones_like(each, dtype=torch.float32)
            )
            if jagged.weights_N is not None:
                weights.append(jagged.weights_N)
        slots_N, lengths_B = torch.cat(slots), torch.cat(lengths)
        if len({s.dtype for s in slots}) > 1:
            slots_N = slots_N.long()
        return _Bags(
            slots_N=slots_N,
            offsets_B1=torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0)]),
            weights_N=torch.cat(weights) if weights else None,
            scale_B=torch.cat(scales) if any(f.pooling == "mean" for f in record.features) else None,
            counts=tuple(each.numel() for each in lengths),
        )

    def _check(self, record: RowRecords, feature: Feature, ids_N: Tensor, slots_N: Tensor) -> Tensor:
        rows = record.rows
        if not slots_N.numel():
            return slots_N
        if slots_N.is_cuda:
            self._bad_ids.append((record, feature, ((slots_N < 0) | (slots_N >= rows)).sum()))
            return slots_N.clamp(0, rows - 1)
        low, high = torch.aminmax(slots_N)
        if int(low) < 0 or int(high) >= rows:
            position = int(((slots_N < 0) | (slots_N >= rows)).nonzero()[0])
            raise UserError(
                f"table {record.spec.name!r}, feature {feature.name!r}: id {int(ids_N[position])} at position "
                f"{position} is outside [0, {rows}); give the table more rows or hashed addressing"
            )
        return slots_N

    def _shape(self, feature: Feature, vectors: Tensor, ids: Jagged) -> Tensor | Jagged:
        if feature.pooling == "none":
            return Jagged(values_N=vectors, offsets_B1=ids.offsets_B1, inverse_B=ids.inverse_B)
        return vectors if ids.inverse_B is None else vectors.index_select(0, ids.inverse_B)


class _Lookup(torch.autograd.Function):
    """The lookup of one table; its backward is where the table learns."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights_N: Tensor | None, bags: _Bags, record: RowRecords, tables: EmbeddingTables
    ) -> Tensor:
        ctx.bags, ctx.record, ctx.tables, ctx.version = bags, record, tables, record.version
        return embedding_bag.lookup(
            record.weight, bags.slots_N, bags.offsets_B1, weights_N, bags.scale_B, impl=tables.impl
        )

    @staticmethod
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Tensor | None, ...]:
        bags, record, tables = ctx.bags, ctx.record, ctx.tables
        if tables.mode != "off" and record.version != ctx.version:
            raise RuntimeError(
                f"table {record.spec.name!r} changed between this lookup and its backward; look up once per step in "
                "'fused' mode, or use 'deferred' and update() after the last backward"
            )
        grad_BD = grad_BD.contiguous()
        grad_N = None
        if ctx.needs_input_grad[1]:  # before the rows change
            grad_N = embedding_bag.weight_gradients(
                grad_BD, record.weight, bags.slots_N, bags.offsets_B1, bags.scale_B, impl=tables.impl
            )
        if tables.mode == "fused":
            embedding_bag.fused_update(
                record.weight, record.state, record.touched, grad_BD, bags.slots_N, bags.offsets_B1, bags.weights_N,
                bags.scale_B, record.spec.rule, record.lr, impl=tables.impl,
            )  # fmt: skip
            record.version += 1
        elif tables.mode == "deferred":
            found = embedding_bag.row_gradients(
                grad_BD,
                bags.slots_N,
                bags.offsets_B1,
                bags.weights_N,
                bags.scale_B,
                num_rows=record.rows,
                impl=tables.impl,
            )
            record.pending.append(RowGradients(*found))
        return None, grad_N, None, None, None
