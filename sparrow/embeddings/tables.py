"""`EmbeddingTables`: prepare -> lookup -> update -> release, on tables in plain memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.core.errors import suggest
from sparrow.embeddings import autograd
from sparrow.embeddings.records import RowGradients, RowRecords
from sparrow.embeddings.spec import Feature, TableSpec
from sparrow.kernels import Impl, embedding_bag
from sparrow.kernels.embedding_bag import Bags, Lookup, Lookups, Tables

Mode = Literal["fused", "deferred", "off"]


@dataclass(eq=False)
class Handle:
    """A batch made ready for lookup; its rows stay where they are until `release`."""

    ids: KeyedJagged
    bags: Bags
    released: bool = False


@dataclass(frozen=True)
class Layout:
    """Where features stand in a batch and in the outputs. features: for each key who looks it up, or -1."""

    lookups: Lookups
    features: list[int]


class EmbeddingTables(nn.Module):
    """Embedding tables and the features that look into them.

    specs: the tables. features: who looks into which. seed: of the first rows, see `RowRecords`. mode: "fused" updates
    rows inside backward; "deferred" collects exact unique-row gradients until `update` (accumulation, clipping,
    skipping a step); "off" leaves the tables alone. impl: see `sparrow.kernels`.
    records: rows that were made before, for tables that are parts of others; who looks into them gives `Bags`.
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
        records: Sequence[RowRecords] | None = None,
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
        made = [RowRecords(spec, seed) for spec in specs] if records is None else records
        self.records = nn.ModuleList(made)  # a list, since a module's name may not hold a dot
        self.mode, self.impl, self.seed = mode, impl, seed
        self.lr_T = torch.tensor([record.spec.rule.lr for record in made])
        self.version = 0  # counts changes of rows, so that a backward through rows that have changed is noticed
        self._specs = {feature.name: specs[names.index(feature.table)] for feature in features}
        self._outside: dict[str, Tensor | int] = {}  # feature -> ids outside its table so far
        self._layouts: dict[object, Layout] = {}
        self._begin()

    def _begin(self) -> None:
        """What a copy must have anew."""
        self.anchor = torch.zeros((), requires_grad=True)  # gives autograd a reason to call the tables' backward
        self.number = autograd.register(self)
        self._tables: Tables | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingTables:
        super()._apply(fn, recurse)
        self._tables = None
        return self

    # -- the lifecycle ------------------------------------------------------------------------------------------

    def prepare(self, ids: KeyedJagged) -> Handle:
        """Map ids to rows; may run some batches ahead. UserError names table, feature, position and value."""
        assert ids.offsets is not None and ids.rows is not None
        layout = self._layout(ids)
        bags = Bags(
            slots_N=autograd.slots(self, ids.values_N, ids.bounds, layout.features), offsets_B1=ids.offsets,
            weights_N=ids.weights_N, inverses=tuple(ids.inverse_B.values()), bags=ids.rows, bounds=ids.bounds,
            lookups=layout.lookups,
        )  # fmt: skip
        return Handle(ids, bags)

    def prefetch(self, ids: KeyedJagged) -> None:
        """Begin to get a batch's rows before anyone looks them up; in plain memory they are there."""

    def lookup(self, handle: Handle) -> dict[str, Tensor | Jagged]:
        """Feature -> vectors [B, D], or a Jagged of vectors [N, D] for a feature with pooling "none"."""
        dims = self.dims
        vectors: dict[str, Tensor] = {}
        for number, output in enumerate(self._outputs(handle)):
            names = [f.name for f, at in zip(self.features, handle.bags.lookups, strict=True) if at.output == number]
            widths = [dims[at.table] for at in handle.bags.lookups if at.output == number]
            parts = output.split(widths, 1) if len(names) > 1 else (output,)  # a split costs backward a copy
            vectors |= dict(zip(names, parts, strict=True))
        out: dict[str, Tensor | Jagged] = {}
        for feature in self.features:
            out[feature.name] = vectors[feature.name]
            if feature.pooling == "none":
                ids = handle.ids[feature.name]
                out[feature.name] = Jagged(
                    values_N=vectors[feature.name], offsets_B1=ids.offsets_B1, inverse_B=ids.inverse_B
                )
        return out

    def pooled(self, ids: KeyedJagged) -> Tensor:
        """All features' vectors side by side, [B, sum of dims], in the features' order, without a copy.

        UserError when one is not pooled or has another number of samples.
        """
        handle = self.prepare(ids)
        outputs = self._outputs(handle)
        self.release(handle)
        if len(outputs) != 1:
            raise UserError("pooled: the features differ in samples, or one is not pooled; look them up by name")
        return outputs[0]

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gradients collected in "deferred" mode; nothing to do in the other modes."""
        found = self.gradients()
        if found:
            gradients = []
            for record in self.all_records():
                none = RowGradients(record.touched.new_empty(0, dtype=torch.int64), record.weight[:0])
                mine = found.get(record.name, none)
                gradients.append((mine.rows_U, mine.grad_UD))
            embedding_bag.update_rows(self.kernel_tables, gradients, self.lr_T, impl=self.impl)
            self.version += 1
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
                grad_ND = torch.cat([g.grad_UD for g in record.pending])
                one_each = torch.arange(slots_N.numel() + 1, device=slots_N.device)
                bags = embedding_bag.bags_of(slots_N, one_each)
                merged = embedding_bag.row_gradients(Tables([record.kernel_table]), [grad_ND], bags, impl=self.impl)
                record.pending = [RowGradients(*merged[0])]
        return {record.name: record.pending[0] for record in self.all_records() if record.pending}

    def discard(self) -> None:
        """Forget the collected gradients."""
        for record in self.all_records():
            record.pending = []

    def scale_lr(self, factor: float) -> None:
        """Set every table's learning rate to its rule's times `factor` (a schedule)."""
        self.lr_T.copy_(torch.tensor([record.spec.rule.lr * factor for record in self.all_records()]))

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
            yield from record.chunks(max_bytes)

    def load_chunk(self, chunk: Chunk) -> None:
        """Overwrite the chunk's rows and columns; UserError when table, range or fields do not fit."""
        self.record(chunk.table).load_chunk(chunk)
        self.changed()

    def changed(self) -> None:
        """Rows were written from outside."""
        self.version += 1

    # -- ids that a table does not hold -------------------------------------------------------------------------

    def oov_counts(self) -> dict[str, int]:
        """Feature -> ids sent to its table's `oov_row` so far, for features whose table has one."""
        names = [name for name, spec in self._specs.items() if spec.oov_row is not None]
        return {name: int(self._outside.get(name, 0)) for name in names}

    def raise_bad_ids(self) -> None:
        """Raise what prepare noticed on a GPU, where asking at once would stall it; call at a synchronisation."""
        for name, spec in self._specs.items():
            if spec.oov_row is None and int(count := self._outside.pop(name, 0)):
                raise UserError(f"{_place(name, spec)}: {int(count)} ids are outside {_range(spec)}")

    # -- what `autograd` calls ----------------------------------------------------------------------------------

    @property
    def kernel_tables(self) -> Tables:
        """The rows as the operators take them."""
        if self._tables is None:
            self._tables = Tables([record.kernel_table for record in self.all_records()])
        return self._tables

    @property
    def dims(self) -> list[int]:
        """D of every table."""
        return [record.spec.dim for record in self.all_records()]

    def slots(self, values_N: Tensor, bounds: Sequence[int], features: Sequence[int]) -> Tensor:
        """Rows [N] of a batch's ids. features: who looks up each key, by number; where nobody does (-1) ids pass."""
        specs = [self._specs[self.features[f].name] if f >= 0 else None for f in features]
        slots_N = values_N
        if any(spec is not None and spec.addressing.maps for spec in specs):
            parts = values_N.long().split([high - low for low, high in itertools.pairwise(bounds)])
            mapped = [p if spec is None else spec.addressing.slots(p) for spec, p in zip(specs, parts, strict=True)]
            slots_N = torch.cat(mapped)
        rows = [-1 if spec is None else spec.addressing.rows for spec in specs]
        counts_K = embedding_bag.count_outside(slots_N, bounds, rows, impl=self.impl)
        if not slots_N.is_cuda and not counts_K.any():
            return slots_N
        slots_N = slots_N.clone()
        for k, spec in enumerate(specs):
            part_N = slots_N[bounds[k] : bounds[k + 1]]
            if spec is None or (not part_N.is_cuda and not counts_K[k]):
                continue
            name, bad_N = self.features[features[k]].name, (part_N < 0) | (part_N >= rows[k])
            if spec.oov_row is None and not part_N.is_cuda:
                position = int(bad_N.nonzero()[0])
                value = f"id {int(values_N[bounds[k] + position])} at position {position}"
                raise UserError(
                    f"{_place(name, spec)}: {value} is outside {_range(spec)}; give the table more rows, hashed "
                    "addressing or an oov_row"
                )
            part_N.masked_fill_(bad_N, spec.oov_row or 0)
            self._outside[name] = self._outside.get(name, 0) + counts_K[k]
        return slots_N

    def slot_type(self, ids: torch.dtype, features: Sequence[int]) -> torch.dtype:
        """What `slots` makes of such ids."""
        maps = any(f >= 0 and self._specs[self.features[f].name].addressing.maps for f in features)
        return torch.int64 if maps else ids

    def run_lookup(self, bags: Bags) -> list[Tensor]:
        """The outputs of a batch."""
        return embedding_bag.lookup(self.kernel_tables, bags, impl=self.impl)

    def run_backward(self, grads: Sequence[Tensor], bags: Bags, version: int, needs_weights: bool) -> Tensor | None:
        """Where the tables learn. Gives the gradient of the batch's weights, if needed."""
        if self.mode != "off" and version != self.version:
            raise RuntimeError(
                "the tables changed between this lookup and its backward; look up once per step in 'fused' mode, or "
                "use 'deferred' and update() after the last backward"
            )
        grad_N = None
        if needs_weights:  # before the rows change
            grad_N = embedding_bag.weight_gradients(self.kernel_tables, grads, bags, impl=self.impl)
        if self.mode == "fused":
            embedding_bag.fused_update(self.kernel_tables, grads, bags, self.lr_T, impl=self.impl)
            self.version += 1
        elif self.mode == "deferred":
            found = embedding_bag.row_gradients(self.kernel_tables, grads, bags, impl=self.impl)
            used = {f.table for f in bags.lookups}
            for t, (record, gradients) in enumerate(zip(self.all_records(), found, strict=True)):
                if t in used:
                    record.pending.append(RowGradients(*gradients))
        return grad_N

    # -- inside -------------------------------------------------------------------------------------------------

    def _outputs(self, handle: Handle) -> list[Tensor]:
        if handle.released:
            raise UserError("lookup: this handle was released; prepare the batch again")
        return autograd.lookup(self, handle.bags)

    def _layout(self, ids: KeyedJagged) -> Layout:
        samples = [(f.pooling, ids.samples(f.name)) for f in self.features]
        kind = (ids.keys, tuple(ids.inverse_B), len({count for pooling, count in samples if pooling != "none"}) <= 1)
        if torch.compiler.is_compiling():
            return self._make_layout(*kind)
        if kind not in self._layouts:
            self._layouts[kind] = self._make_layout(*kind)
        return self._layouts[kind]

    def _make_layout(self, keys: tuple[str, ...], groups: tuple[tuple[str, ...], ...], uniform: bool) -> Layout:
        """Pooled features stand side by side in one output if they have as many samples; others have their own."""
        tables = [record.spec.name for record in self.all_records()]
        lookups: list[Lookup] = []
        outputs, together, width = 0, -1, 0
        for f in self.features:
            apart = f.pooling == "none" or not uniform
            if apart or together < 0:
                output, outputs = outputs, outputs + 1
            if not apart and together < 0:
                together = output
            shared = [g for g, group in enumerate(groups) if f.name in group and f.pooling != "none"]
            lookups.append(
                Lookup(
                    table=tables.index(f.table), pooling=f.pooling, key=keys.index(f.name),
                    inverse=shared[0] if shared else -1, output=output if apart else together,
                    column=0 if apart else width,
                )
            )  # fmt: skip
            width += 0 if apart else self._specs[f.name].dim
        names = [f.name for f in self.features]
        return Layout(Lookups(lookups), [names.index(key) if key in names else -1 for key in keys])


def _place(feature: str, spec: TableSpec) -> str:
    return f"table {spec.name!r}, feature {feature!r}"


def _range(spec: TableSpec) -> str:
    return f"[0, {spec.addressing.rows})"
