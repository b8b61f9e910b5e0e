"""`ComponentTables`: rows -> vectors, and gradients -> rows, on one process. Rows are known by their numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sparrow.core import Chunk, Jagged, KeyedJagged, UserError
from sparrow.core.batch import split_at
from sparrow.core.errors import suggest
from sparrow.embeddings.autograd import Door
from sparrow.embeddings.records import RowGradients, RowRecords, empty_gradients
from sparrow.embeddings.spec import Feature
from sparrow.embeddings.stores import Flights, MappedStore, RowStore, Saved, ssd_of
from sparrow.kernels import Impl, embedding_bag, row_levels
from sparrow.kernels.embedding_bag import Bags, Lookup, Lookups, Tables
from sparrow.kernels.embedding_bag.arguments import NEVER
from sparrow.kernels.formats import fp32
from sparrow.kernels.row_index import Policy

Mode = Literal["fused", "deferred", "off"]
_ANEW = ("door", "flights", "_mapped", "_of_keys")  # what a copy does not share
_NO_FRAMES: AbstractContextManager[None] = nullcontext()
_NOT_MAPPED: tuple[Callable[[], Bags | None], Bags | None] = (lambda: None, None)


@dataclass(eq=False)
class ComponentHandle:
    """A batch made ready for lookup. Its rows stay where they are until `release`.

    Args:
        ids: the batch.
        bags: its bags of row numbers.
        features: who looks up.
        released: whether `release` was called.
    """

    ids: KeyedJagged
    bags: Bags
    features: tuple[Feature, ...]
    released: bool = False


class Passed(NamedTuple):
    """What training has seen so far: batches, examples, and the log's time, NEVER where nobody asks."""

    batches: int = 0
    examples: int = 0
    time: int = NEVER

    def by(self, policy: Policy) -> int:
        """Returns the time on the clock of a policy."""
        return self.examples if policy.clock == "examples" else self.time


class ComponentTables(nn.Module):
    """The row records of some components, and the features that look into them.

    Updates are exact: a row's gradients from the whole batch and all features are summed first, in order of
    occurrence, then the rule runs once (Neo, arXiv 2104.05158, section 4.1).

    Args:
        records: the rows of the components, or parts of them.
        features: who looks into which component. `table` is a component's name, and no other feature looks anything up.
        mode: "fused" updates rows inside backward. "deferred" collects exact unique-row gradients until `update`, for
            accumulation, clipping and skipping a step. "off" leaves the rows alone.
        impl: see `sparrow.kernels`.
    """

    def __init__(
        self, records: Sequence[RowRecords], features: Sequence[Feature], *, mode: Mode = "fused", impl: Impl = "auto"
    ) -> None:
        super().__init__()
        self.features = tuple(features)
        self.records = nn.ModuleList(records)  # a list, since a module's name may not hold a dot
        self.mode = mode
        self.impl = impl
        self.lr_T = torch.tensor([record.component.rule.lr for record in records])
        self.updates = 0  # so far; stochastic rounding depends on it
        self.passed = Passed()
        self._settled = 0  # the number of the last batch from which the rows have learnt
        self._pending: list[list[RowGradients]] = [[] for _ in records]
        self._layouts: dict[object, Lookups] = {}
        self._begin()

    def _begin(self) -> None:
        """What a copy must have anew."""
        dims = [record.dim for record in self.all_records()]
        self.door = Door(self, dims)
        stores = [record.store for record in self.all_records()]
        self._slots_are_rows = all(store.slots_are_rows for store in stores)
        self._are_leveled = all(store.slots_are_rows or isinstance(store, MappedStore) for store in stores)
        self.flights = Flights({n: store for n, store in enumerate(stores) if ssd_of(store)})  # type: ignore[misc]
        self._on_ssd = bool(self.flights.stores)
        self._places = None if self._slots_are_rows else _places(stores)
        known = [(n, r.component.policy) for n, r in enumerate(self.all_records()) if r.store.is_allocated]
        self._policies = {number: policy for number, policy in known if policy is not None}
        self._asks_time = any(policy.clock == "time" for policy in self._policies.values())
        factors = [f.times[0] for f in self.features if f.times is not None]
        self._plain = tuple(replace(f, times=None) for f in self.features)
        self._multiplied = tuple(
            f if f.times is None else replace(f, pooling=f.times[1]) for f in self.features if f.name not in factors
        )
        used = {f.table for f in self.features if f.times is not None or f.name in factors}
        formats = [record.component.format for record in self.all_records() if record.component.name in used]
        exact = all(isinstance(format, fp32.Config) for format in formats)
        self._can_multiply = bool(factors) and exact and self._slots_are_rows
        self._tables: Tables | None = None
        self._mapped = _NOT_MAPPED
        self._of_keys: weakref.WeakKeyDictionary[Bags, Bags] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _ANEW}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ComponentTables:
        super()._apply(fn, recurse)
        self._tables = None
        return self

    # -- the lifecycle ------------------------------------------------------------------------------------------

    def multiplies(self, ids: KeyedJagged) -> bool:
        """Whether vectors of a batch can be multiplied while they are looked up, see `Feature.times`."""
        wants = ids.weights_N is not None and ids.weights_N.requires_grad
        is_here = not ids.values_N.is_cuda and self.impl != "triton" and not torch.compiler.is_compiling()
        return self._can_multiply and is_here and not wants

    def prepare(self, ids: KeyedJagged, rows_N: Tensor, multiply: bool = False) -> ComponentHandle:
        """Returns a handle of a batch that is ready for lookup. It may run some batches ahead.

        Args:
            ids: the batch, of which keys, lengths, weights and groups count. It may have keys that no feature reads.
            rows_N: int32 or int64 [N], the row of each id in the component of its key's feature.
            multiply: whether vectors are multiplied as `Feature.times` says.
        """
        assert ids.offsets is not None and ids.rows is not None
        features = self._multiplied if multiply else self._plain
        bags = Bags(
            slots_N=rows_N,
            offsets_B1=ids.offsets,
            weights_N=ids.weights_N,
            inverses=tuple(ids.inverse_B.values()),
            bags=ids.rows,
            bounds=ids.bounds,
            lookups=self._lookups(ids, features),
            moment=self._moment(ids),
        )
        return ComponentHandle(ids, bags, features)

    def prefetch(self, handle: ComponentHandle) -> None:
        """Begin to read the rows of a batch of training that are on an SSD, some batches ahead.

        Raises:
            UserError: when batches under way have too many rows, see `SsdStore.fetch`.
        """
        self.fetch(handle.bags)

    def fetch(self, bags: Bags) -> None:
        """Do `prefetch` for bags of rows."""
        if self._on_ssd and self.training and self.mode != "off":
            self.flights.fetch(bags)

    def begin(self, handle: ComponentHandle) -> None:
        """Begin the lookup before the model asks for it. One process waits for nothing, so nothing is done."""

    def lookup(self, handle: ComponentHandle) -> dict[str, Tensor | Jagged]:
        """Returns feature -> vectors [B, D], or a Jagged of vectors [N, D] for a feature with pooling "none".

        Raises:
            UserError: when the handle was released.
        """
        dims = self.door.dims
        vectors: dict[str, Tensor] = {}
        for number, output in enumerate(self._outputs(handle)):
            names = [f.name for f, at in zip(handle.features, handle.bags.lookups, strict=True) if at.output == number]
            widths = [dims[at.table] for at in handle.bags.lookups if at.output == number]
            parts = output.split(widths, 1) if len(names) > 1 else (output,)  # a split costs backward a copy
            vectors |= dict(zip(names, parts, strict=True))
        out: dict[str, Tensor | Jagged] = {}
        for feature in handle.features:
            out[feature.name] = vectors[feature.name]
            if feature.pooling == "none":
                ids = handle.ids[feature.name]
                out[feature.name] = Jagged(
                    values_N=vectors[feature.name], offsets_B1=ids.offsets_B1, inverse_B=ids.inverse_B, host=ids.host
                )
        return out

    def pooled(self, handle: ComponentHandle) -> Tensor:
        """Returns what `EmbeddingTables.pooled` does.

        Raises:
            UserError: when the features differ in samples, one is not pooled, or the handle was released.
        """
        outputs = self._outputs(handle)
        if len(outputs) != 1:
            raise UserError("pooled: the features differ in samples, or one is not pooled; look them up by name")
        return outputs[0]

    def release(self, handle: ComponentHandle) -> None:
        """Let go of the batch's rows."""
        handle.released = True
        if self._on_ssd and not torch.compiler.is_compiling():
            self.flights.give_up(handle.bags)

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gradients that were collected in "deferred" mode. In the other modes there is nothing to do."""
        found = self.gradients()
        if found:
            gradients = []
            for record in self.all_records():
                mine = found.get(record.name) or empty_gradients(record)
                rows_U, grad_UD = mine.rows_U, mine.grad_UD
                if not record.store.slots_are_rows:
                    rows_U, order_U = record.store.pinned(rows_U).sort()
                    grad_UD = grad_UD[order_U]
                gradients.append((rows_U, grad_UD))
            embedding_bag.update_rows(self.kernel_tables, gradients, self.lr_T, self.updates + 1, impl=self.impl)
            self.changed()
        self.updates += self.mode == "deferred"  # a batch without ids counts too: other ranks may have had some
        self.discard()

    # -- deferred gradients, learning rate ----------------------------------------------------------------------

    def gradients(self) -> dict[str, RowGradients]:
        """Returns component -> exact unique-row gradients since the last `update` or `discard`, to read or scale."""
        tables = self.kernel_tables
        merging = [number for number, pending in enumerate(self._pending) if len(pending) > 1]
        if merging:  # in one call, since a GPU is waited for in each
            parts = [self._pending[number] for number in merging]
            rows = [torch.cat([g.rows_U for g in pending]) for pending in parts]
            grads = [torch.cat([g.grad_UD for g in pending]) for pending in parts]
            counts = [len(rows_N) for rows_N in rows]
            bags = Bags(
                slots_N=torch.cat(rows),
                offsets_B1=torch.arange(sum(counts) + 1, device=rows[0].device),
                bags=counts,
                bounds=[0, *accumulate(counts)],
                lookups=Lookups(Lookup(table=i, pooling="sum", key=i, output=i) for i in range(len(merging))),
            )
            of = Tables([tables[number] for number in merging])
            for number, found in zip(
                merging, embedding_bag.row_gradients(of, grads, bags, impl=self.impl), strict=True
            ):
                self._pending[number] = [RowGradients(*found)]
        names = [record.name for record in self.all_records()]
        return {name: pending[0] for name, pending in zip(names, self._pending, strict=True) if pending}

    def collect(self, number: int, gradients: RowGradients) -> None:
        """Add gradients to those that are collected.

        Args:
            number: of the record whose rows they are for.
            gradients: of its rows.
        """
        self._pending[number].append(gradients)

    def discard(self) -> None:
        """Forget the collected gradients."""
        self._settle()
        self._pending = [[] for _ in self._pending]

    def scale_lr(self, factor: float) -> None:
        """Set the learning rate of every component to its rule's times `factor`, as a schedule says."""
        self.lr_T.copy_(torch.tensor([record.component.rule.lr * factor for record in self.all_records()]))

    @property
    def mode(self) -> Mode:
        """How gradients reach the table rows. It may be changed between steps."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in ("fused", "deferred", "off"):
            raise UserError(f"mode: {mode!r} is not one of 'fused', 'deferred', 'off'")
        self._mode = mode

    # -- rows in and out ----------------------------------------------------------------------------------------

    def all_records(self) -> Iterator[RowRecords]:
        """Returns the rows of every component."""
        for record in self.records:
            assert isinstance(record, RowRecords)
            yield record

    def record(self, name: str) -> RowRecords:
        """Returns the rows of a component.

        Raises:
            UserError: when there is no such component.
        """
        found = next((r for r in self.all_records() if r.component.name == name), None)
        if found is None:
            raise UserError(f"no table {name!r}{suggest(name, [r.component.name for r in self.all_records()])}")
        return found

    def chunks(self, max_bytes: int = 64 << 20) -> Iterator[Chunk]:
        """Returns every row record, in chunks of at most about `max_bytes`. The tensors are views."""
        for record in self.all_records():
            yield from record.chunks(max_bytes)

    def saved(self) -> Iterator[Chunk | Saved]:
        """Returns every row record as a checkpoint has it, see `RowRecords.saved`. What takes longest comes first."""
        for record in sorted(self.all_records(), key=lambda record: ssd_of(record.store) is None):
            yield from record.saved()

    def changed(self) -> None:
        """Call it after rows were written from outside, so that a backward through older rows is noticed."""
        self.door.version += 1

    # -- what `autograd` calls ----------------------------------------------------------------------------------

    @property
    def kernel_tables(self) -> Tables:
        """The rows as the operators take them."""
        if self._tables is None:
            self._tables = Tables([record.kernel_table for record in self.all_records()])
        return self._tables

    def run_lookup(self, bags: Bags) -> list[Tensor]:
        """Returns the outputs of a batch. In training its ids get rows first, and its rows enter their caches."""
        self._mapped = _NOT_MAPPED
        if self._policies:
            self._of_keys.pop(bags, None)
        is_batch = self.training and self.mode != "off"
        if is_batch:
            self.advance(bags.moment)
        with self._frames(bags, is_batch) if self._on_ssd else _NO_FRAMES:
            slots = self.in_slots(bags, is_batch)
            return embedding_bag.lookup(self.kernel_tables, slots, impl=self.impl)

    def run_backward(self, grads: Sequence[Tensor], bags: Bags, version: int, needs_weights: bool) -> Tensor | None:
        """Returns the gradient of the batch's weights, or None if it is not needed. This is where the rows learn.

        Args:
            grads: the gradients of the outputs.
            bags: of row numbers, as they were looked up.
            version: of the rows that were looked up, see `Door`.
            needs_weights: whether the gradient of the weights is needed.

        Raises:
            RuntimeError: when the rows have changed since that lookup.
        """
        if self.mode != "off" and version != self.door.version:
            raise RuntimeError(
                "the tables changed between this lookup and its backward; look up once per step in 'fused' mode, or "
                "use 'deferred' and update() after the last backward"
            )
        grad_N = None
        if needs_weights:  # before the rows change
            with self._frames(bags) if self._on_ssd else _NO_FRAMES:
                slots = self.in_slots(bags)
                grad_N = embedding_bag.weight_gradients(self.kernel_tables, grads, slots, impl=self.impl)
        if self.mode == "fused":
            self.updates += 1
            slots = self.in_slots(bags, learns=True)
            embedding_bag.fused_update(self.kernel_tables, grads, slots, self.lr_T, self.updates, impl=self.impl)
            self._settle()
            self.changed()
        elif self.mode == "deferred":
            rows = self._in_rows(bags)
            found = embedding_bag.row_gradients(self.kernel_tables, grads, rows, impl=self.impl)
            used = {f.table for f in bags.lookups} | {f.by for f in bags.lookups}
            for number, gradients in enumerate(found):
                if number in used:
                    self.collect(number, RowGradients(*gradients))
        return grad_N

    def advance(self, moment: tuple[int, int]) -> None:
        """Let time pass: a batch of training begins. Every rank hears of each batch, whatever is looked up there.

        moment: how many samples the batches of all ranks have, 0 where no ids come and go, and when the last one was,
            NEVER where nobody knows.

        Raises:
            UserError: when an earlier batch was later, or this one has no time and a table asks for it.
        """
        samples, time = moment
        if not samples:
            return
        if time == NEVER and self._asks_time:
            raise UserError("time: the batch has none, and tables ask for it; choose tables.addressing.clock examples")
        if NEVER < time < self.passed.time:
            remedy = "prepare the log in the order of time, or choose tables.addressing.clock examples"
            raise UserError(f"time: a batch of {time} comes after one of {self.passed.time}; {remedy}")
        self.passed = Passed(self.passed.batches + 1, self.passed.examples + samples, max(self.passed.time, time))

    # -- inside -------------------------------------------------------------------------------------------------

    def _moment(self, ids: KeyedJagged) -> tuple[int, int]:
        if not self._policies:
            return 0, NEVER
        return ids.batch_size, ids.time if self._asks_time and ids.time is not None else NEVER

    def _outputs(self, handle: ComponentHandle) -> list[Tensor]:
        if handle.released:
            raise UserError("lookup: this handle was released; prepare the batch again")
        return self.door(handle.bags)

    @contextmanager
    def _frames(self, bags: Bags, is_batch: bool = False) -> Iterator[None]:
        """Rows of tables on an SSD have slots in this context. Where no batch of training begins, some borrow them."""
        if is_batch:
            self.flights.begin(bags)
            yield
            return
        self.flights.land()
        try:
            self._mapped, self._tables = _NOT_MAPPED, None
            yield
        finally:
            self._mapped, self._tables = _NOT_MAPPED, None
            for store in self.flights.stores.values():
                store.give_back()

    def in_slots(self, bags: Bags, is_batch: bool = False, learns: bool = False) -> Bags:
        """Returns the same bags with slots in the place of rows. Backward asks for those of the last lookup again.

        is_batch: whether a batch of training begins, whose rows enter their caches first. learns: whether its rows
        change now.
        """
        if self._slots_are_rows:
            return self._in_rows(bags, is_batch)
        if (
            self._places is not None and self._are_leveled and not is_batch
        ):  # in one call: a call a table slows small batches
            rows = self._in_rows(bags)
            tables = [rows.lookups.table_of.get(key, -1) for key in range(len(rows.bags))]
            places_W2, begins, below = self._places
            of_tables = [begins[n] for n in tables], [below[n] for n in tables]
            slots_N = row_levels.slots_of(rows.slots_N, rows.bounds, places_W2, *of_tables)
            return replace(rows, slots_N=slots_N)
        of, mapped = self._mapped
        if of() is bags and mapped is not None:
            return mapped
        stores = [record.store for record in self.all_records()]

        def slots_of(number: int, rows_N: Tensor) -> Tensor:
            if is_batch:
                return stores[number].admit(rows_N, self.kernel_tables[number])
            return (stores[number].pinned if learns else stores[number].slots_of)(rows_N)

        those = [number for number, store in enumerate(stores) if not store.slots_are_rows]
        mapped = _replaced(self._in_rows(bags, is_batch), those, slots_of)
        self._mapped = weakref.ref(bags), mapped
        return mapped

    def _in_rows(self, bags: Bags, is_batch: bool = False) -> Bags:
        """Returns the same bags with rows in the place of ids' keys, where ids come and go. is_batch: as there."""
        if not self._policies:
            return bags
        if not is_batch and bags in self._of_keys:
            return self._of_keys[bags]  # as they were looked up: who has a row may have changed since
        records = list(self.all_records())

        def rows_of(number: int, keys_N: Tensor) -> Tensor:
            now = self.passed.by(self._policies[number])
            if not is_batch:
                return records[number].rows_of(keys_N, now)
            settled = min(self._settled, self.passed.batches - 1)  # it may be of before a checkpoint was loaded
            return records[number].admit(keys_N, now, self.passed.batches, settled)

        mapped = self._of_keys[bags] = _replaced(bags, self._policies, rows_of)
        return mapped

    def _settle(self) -> None:
        self._settled = self.passed.batches
        self.flights.settle()
        if not self._slots_are_rows:
            for record in self.all_records():
                record.store.settle()

    def _lookups(self, ids: KeyedJagged, features: tuple[Feature, ...]) -> Lookups:
        uniform = not ids.inverse_B and len(set(ids.rows or ())) <= 1
        if not uniform:
            uniform = len({ids.samples(f.name) for f in features if f.pooling != "none"}) <= 1
        shape = (ids.keys, tuple(ids.inverse_B), uniform)
        if torch.compiler.is_compiling():
            return self._make_lookups(*shape, features)
        kind = (*shape, features is self._multiplied)
        if kind not in self._layouts:
            self._layouts[kind] = self._make_lookups(*shape, features)
        return self._layouts[kind]

    def _make_lookups(
        self,
        keys: tuple[str, ...],
        groups: tuple[tuple[str, ...], ...],
        uniform: bool,
        features: tuple[Feature, ...],
    ) -> Lookups:
        """Pooled features stand side by side in one output if they have as many samples; others have their own."""
        for f in features:
            if f.name not in keys:
                raise UserError(f"KeyedJagged: no feature {f.name!r}{suggest(f.name, keys)}")
        tables = [record.component.name for record in self.all_records()]
        table_of = {f.name: tables.index(f.table) for f in self.features}
        lookups: list[Lookup] = []
        outputs = 0
        together = -1
        width = 0
        for f in features:
            apart = f.pooling == "none" or not uniform
            if apart or together < 0:
                output, outputs = outputs, outputs + 1
            if not apart and together < 0:
                together = output
            shared = [g for g, group in enumerate(groups) if f.name in group and f.pooling != "none"]
            times = None if f.times is None else f.times[0]
            lookups.append(
                Lookup(
                    table=table_of[f.name],
                    pooling=f.pooling,
                    key=keys.index(f.name),
                    inverse=shared[0] if shared else -1,
                    output=output if apart else together,
                    column=0 if apart else width,
                    by=-1 if times is None else table_of[times],
                    by_key=-1 if times is None else keys.index(times),
                )
            )
            width += 0 if apart else self.door.dims[table_of[f.name]]
        return Lookups(lookups)


def _places(stores: Sequence[RowStore]) -> tuple[Tensor, list[int], list[int]]:
    """Returns what `row_levels.slots_of` asks of tables with rows on a second level. The last table has none."""
    words, begins, below = [torch.zeros(0, 2, dtype=torch.int64)], [-1] * (len(stores) + 1), [0] * (len(stores) + 1)
    for number, store in enumerate(stores):
        if isinstance(store, MappedStore) and not store.slots_are_rows:
            begins[number], below[number] = sum(map(len, words)), store.rows.below
            words.append(store.rows.places)
    return torch.cat(words), begins, below


def _replaced(bags: Bags, tables: Collection[int], change: Callable[[int, Tensor], Tensor]) -> Bags:
    """Returns the same bags, with what `change` makes of a table's number and slots for some tables."""
    parts = split_at(bags.slots_N.long(), bags.bounds)
    for number in tables:
        keys = sorted({f.key for f in bags.lookups if f.table == number})
        if len(keys) == 1:
            parts[keys[0]] = change(number, parts[keys[0]])
        elif keys:
            changed_N = change(number, torch.cat([parts[k] for k in keys]))
            for k, part_N in zip(keys, changed_N.split([len(parts[k]) for k in keys]), strict=True):
                parts[k] = part_N
    return replace(bags, slots_N=torch.cat(parts) if len(parts) > 1 else parts[0])
