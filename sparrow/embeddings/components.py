"""`ComponentTables`: rows -> vectors, and gradients -> rows. Rows are known by their numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from sparrow.core import UserError
from sparrow.core.batch import split_at
from sparrow.embeddings.addressing import Policy
from sparrow.embeddings.autograd import Door
from sparrow.embeddings.records import RowGradients, RowRecords, empty_gradients
from sparrow.embeddings.stores import InTransit, RowStore
from sparrow.kernels import Impl, embedding_bag, row_levels
from sparrow.kernels.embedding_bag import Bags, Lookup, Lookups, Tables
from sparrow.kernels.embedding_bag.arguments import NEVER

Mode = Literal["fused", "deferred", "off"]
MODES: tuple[Mode, ...] = get_args(Mode)
_ANEW = ("door", "transit", "_mapped", "_bags_of_keys")  # what a copy does not share
_NO_FRAMES: AbstractContextManager[None] = nullcontext()
_NOT_MAPPED: tuple[Callable[[], Bags | None], Bags | None] = (lambda: None, None)


class Passed(NamedTuple):
    """What training has seen so far: batches, examples, and the log's time, NEVER where nobody
    asks.
    """

    batches: int = 0
    examples: int = 0
    time: int = NEVER

    def by(self, policy: Policy) -> int:
        """Returns the time on the clock of a policy."""
        return self.examples if policy.clock == "examples" else self.time


class ComponentTables(nn.Module):
    """The row records of some components that are on this process: how they are looked up, and how
    they learn.

    Updates are exact: a row's gradients from the whole batch and all features are summed first, in
    order of occurrence, then the rule runs once (Neo, arXiv 2104.05158, section 4.1).

    Args:
        records: the rows of the components, or parts of them.
        is_copied: whether every rank has these rows. Then they learn in `update` and never within
            backward, from the gradients of all.
        mode: "fused" updates rows inside backward. "deferred" collects exact unique-row gradients
            until `update`, for accumulation, clipping and skipping a step. "off" leaves the rows
            alone.
        impl: see `sparrow.kernels`.
    """

    def __init__(
        self,
        records: Sequence[RowRecords],
        *,
        is_copied: bool = False,
        mode: Mode = "fused",
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        self.is_copied = is_copied
        self.records = nn.ModuleList(records)  # a list, since a module's name may not hold a dot
        self.mode = mode  # how gradients reach the rows; it may be changed between steps
        self.impl = impl
        self.lr_T = torch.tensor([record.component.rule.lr for record in records])
        self.updates = 0  # so far; stochastic rounding depends on it
        self.passed = Passed()
        self._settled = 0  # the number of the last batch from which the rows have learnt
        self._pending: list[list[RowGradients]] = [[] for _ in records]
        self._begin()

    def _begin(self) -> None:
        """What a copy must have anew."""
        dims = [record.dim for record in self.all_records()]
        self.door = Door(self, dims)
        stores = [record.store for record in self.all_records()]
        self.slots_are_rows = all(store.slots_are_rows for store in stores)
        self._are_leveled = all(
            store.slots_are_rows or store.second_level is not None for store in stores
        )
        self.transit = _in_transit(stores)
        self._places = None if self.slots_are_rows else _places(stores)
        known = [
            (n, r.component.policy)
            for n, r in enumerate(self.all_records())
            if r.store.is_allocated
        ]
        self.policies = {number: policy for number, policy in known if policy is not None}
        self.asks_time = any(policy.clock == "time" for policy in self.policies.values())
        self._tables: Tables | None = None
        self._mapped = _NOT_MAPPED
        self._bags_of_keys: weakref.WeakKeyDictionary[Bags, Bags] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _ANEW}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ComponentTables:
        super()._apply(fn, recurse)
        self._tables = None
        return self

    # -- the lifecycle -----------------------------------------------------------------------------

    def fetch(self, bags: Bags) -> None:
        """Begin to read the rows of a batch of training that are out of memory, some batches ahead.

        Raises:
            UserError: when batches under way have too many rows.
        """
        if self.transit is not None and self.training and self.mode != "off":
            self.transit.fetch(bags)

    def give_up(self, bags: Bags) -> None:
        """Let go of a batch's rows."""
        if self.transit is not None and not torch.compiler.is_compiling():
            self.transit.give_up(bags)

    @torch.no_grad()
    def update(self) -> None:
        """Apply the gradients that were collected in "deferred" mode. In the other modes there is
        nothing to do.
        """
        by_name = self.gradients()
        if by_name:
            gradients = []
            for record in self.all_records():
                row_gradients = by_name.get(record.name) or empty_gradients(record)
                rows_U = row_gradients.rows_U
                grad_UD = row_gradients.grad_UD
                if not record.store.slots_are_rows:
                    rows_U, order_U = record.store.pinned(rows_U).sort()
                    grad_UD = grad_UD[order_U]
                gradients.append((rows_U, grad_UD))
            embedding_bag.update_rows(
                self.kernel_tables, gradients, self.lr_T, self.updates + 1, impl=self.impl
            )
            self.changed()
        # a batch without ids counts too: other ranks may have had some
        self.updates += self.mode == "deferred"
        self.discard()

    # -- deferred gradients ------------------------------------------------------------------------

    def gradients(self) -> dict[str, RowGradients]:
        """Returns component -> exact unique-row gradients since the last `update` or `discard`, to
        read or scale.
        """
        tables = self.kernel_tables
        merging = [number for number, pending in enumerate(self._pending) if len(pending) > 1]
        if merging:  # in one call, since a GPU is waited for in each
            rows = []
            grads = []
            for number in merging:
                pending = self._pending[number]
                rows.append(torch.cat([gradients.rows_U for gradients in pending]))
                grads.append(torch.cat([gradients.grad_UD for gradients in pending]))
            counts = [len(rows_N) for rows_N in rows]
            bags = Bags(
                slots_N=torch.cat(rows),
                offsets_B1=torch.arange(sum(counts) + 1, device=rows[0].device),
                bags=counts,
                bounds=[0, *accumulate(counts)],
                lookups=Lookups(
                    Lookup(table=i, pooling="sum", key=i, output=i) for i in range(len(merging))
                ),
            )
            merging_tables = Tables([tables[number] for number in merging])
            sums = embedding_bag.row_gradients(merging_tables, grads, bags, impl=self.impl)
            for number, merged in zip(merging, sums, strict=True):
                self._pending[number] = [RowGradients(*merged)]
        names = [record.name for record in self.all_records()]
        return {
            name: pending[0] for name, pending in zip(names, self._pending, strict=True) if pending
        }

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

    # -- rows in and out ---------------------------------------------------------------------------

    def all_records(self) -> Iterator[RowRecords]:
        """Returns the rows of every component."""
        for record in self.records:
            assert isinstance(record, RowRecords)
            yield record

    def changed(self) -> None:
        """Call it after rows were written from outside, so that a backward through older rows is
        noticed.
        """
        self.door.version += 1

    # -- what `autograd` calls ---------------------------------------------------------------------

    @property
    def kernel_tables(self) -> Tables:
        """The rows as the operators take them."""
        if self._tables is None:
            self._tables = Tables([record.kernel_table for record in self.all_records()])
        return self._tables

    def run_lookup(self, bags: Bags) -> list[Tensor]:
        """Returns the outputs of a batch. In training its ids get rows first, and its rows enter
        their caches.
        """
        self._mapped = _NOT_MAPPED
        if self.policies:
            self._bags_of_keys.pop(bags, None)
        is_batch = self.training and self.mode != "off"
        if is_batch:
            self.advance(bags.moment)
        with self._frames(self.transit, bags, is_batch):
            slots = self.in_slots(bags, is_batch)
            return embedding_bag.lookup(self.kernel_tables, slots, impl=self.impl)

    def run_backward(
        self, grads: Sequence[Tensor], bags: Bags, version: int, needs_weights: bool
    ) -> Tensor | None:
        """Returns the gradient of the batch's weights, or None if it is not needed. This is where
        the rows learn.

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
                "the tables changed between this lookup and its backward; look up once per step in"
                " 'fused' mode, or use 'deferred' and update() after the last backward"
            )
        grad_N = None
        if needs_weights:  # before the rows change
            with self._frames(self.transit, bags):
                slots = self.in_slots(bags)
                grad_N = embedding_bag.weight_gradients(
                    self.kernel_tables, grads, slots, impl=self.impl
                )
        if self.mode == "fused":
            self.updates += 1
            slots = self.in_slots(bags, learns=True)
            embedding_bag.fused_update(
                self.kernel_tables, grads, slots, self.lr_T, self.updates, impl=self.impl
            )
            self._settle()
            self.changed()
        elif self.mode == "deferred":
            rows = self._in_rows(bags)
            by_table = embedding_bag.row_gradients(self.kernel_tables, grads, rows, impl=self.impl)
            used = {f.table for f in bags.lookups} | {f.by for f in bags.lookups}
            for number, gradients in enumerate(by_table):
                if number in used:
                    self.collect(number, RowGradients(*gradients))
        return grad_N

    def advance(self, moment: tuple[int, int]) -> None:
        """Let time pass: a batch of training begins. Every rank hears of each batch, whatever is
        looked up there.

        moment: how many samples the batches of all ranks have, 0 where no ids come and go, and when
            the last one was, NEVER where nobody knows.

        Raises:
            UserError: when an earlier batch was later, or this one has no time and a table asks for
                it.
        """
        samples, time = moment
        if not samples:
            return
        if time == NEVER and self.asks_time:
            raise UserError(
                "time: the batch has none, and tables ask for it; choose tables.addressing.clock"
                " examples"
            )
        if NEVER < time < self.passed.time:
            remedy = (
                "prepare the log in the order of time, or choose tables.addressing.clock examples"
            )
            raise UserError(
                f"time: a batch of {time} comes after one of {self.passed.time}; {remedy}"
            )
        self.passed = Passed(
            self.passed.batches + 1, self.passed.examples + samples, max(self.passed.time, time)
        )

    # -- inside ------------------------------------------------------------------------------------

    def _frames(
        self, transit: InTransit | None, bags: Bags, is_batch: bool = False
    ) -> AbstractContextManager[None]:
        """Rows that are out of memory have slots in this context. Where no batch begins, some
        borrow them.
        """
        if transit is None:
            return _NO_FRAMES
        if is_batch:
            transit.begin(bags)
            return _NO_FRAMES
        return self._borrowed(transit)

    @contextmanager
    def _borrowed(self, transit: InTransit) -> Iterator[None]:
        transit.land()
        try:
            self._mapped = _NOT_MAPPED
            self._tables = None
            yield
        finally:
            self._mapped = _NOT_MAPPED
            self._tables = None
            for store in transit.stores.values():
                store.give_back()

    def in_slots(self, bags: Bags, is_batch: bool = False, learns: bool = False) -> Bags:
        """Returns the same bags with slots in the place of rows. Backward asks for those of the
        last lookup again.

        is_batch: whether a batch of training begins, whose rows enter their caches first. learns:
        whether its rows change now.
        """
        if self.slots_are_rows:
            return self._in_rows(bags, is_batch)
        # in one call: a call a table slows small batches
        if self._places is not None and self._are_leveled and not is_batch:
            rows = self._in_rows(bags)
            tables = [rows.lookups.table_of.get(key, -1) for key in range(len(rows.bags))]
            places_W2, begins, below = self._places
            table_levels = [begins[n] for n in tables], [below[n] for n in tables]
            slots_N = row_levels.slots_of(rows.slots_N, rows.bounds, places_W2, *table_levels)
            return replace(rows, slots_N=slots_N)
        last_bags, mapped = self._mapped
        if last_bags() is bags and mapped is not None:
            return mapped
        stores = [record.store for record in self.all_records()]

        def slots_of(number: int, rows_N: Tensor) -> Tensor:
            if is_batch:
                return stores[number].admit(rows_N, self.kernel_tables[number])
            return (stores[number].pinned if learns else stores[number].slots_of)(rows_N)

        numbers = [number for number, store in enumerate(stores) if not store.slots_are_rows]
        mapped = _replaced(self._in_rows(bags, is_batch), numbers, slots_of)
        self._mapped = weakref.ref(bags), mapped
        return mapped

    def _in_rows(self, bags: Bags, is_batch: bool = False) -> Bags:
        """Returns the same bags with rows in the place of ids' keys, where ids come and go.
        is_batch: as there.
        """
        if not self.policies:
            return bags
        if not is_batch and bags in self._bags_of_keys:
            # as they were looked up: who has a row may have changed since
            return self._bags_of_keys[bags]
        records = list(self.all_records())

        def rows_of(number: int, keys_N: Tensor) -> Tensor:
            now = self.passed.by(self.policies[number])
            if not is_batch:
                return records[number].rows_of(keys_N, now)
            # it may be of before a checkpoint was loaded
            settled = min(self._settled, self.passed.batches - 1)
            return records[number].admit(keys_N, now, self.passed.batches, settled)

        mapped = self._bags_of_keys[bags] = _replaced(bags, self.policies, rows_of)
        return mapped

    def _settle(self) -> None:
        self._settled = self.passed.batches
        if self.transit is not None:
            self.transit.settle()
        if not self.slots_are_rows:
            for record in self.all_records():
                record.store.settle()


def _in_transit(stores: Sequence[RowStore]) -> InTransit | None:
    """Returns what brings the rows of stores that wait for some; None where none does."""
    waiting = {number: store for number, store in enumerate(stores) if store.transit is not None}
    make = next((store.transit for store in waiting.values()), None)
    return None if make is None else make(waiting)


def _places(stores: Sequence[RowStore]) -> tuple[Tensor, list[int], list[int]]:
    """Returns the places of tables with rows on a second level, as `row_levels.slots_of` takes
    them. The last table has none.
    """
    words = [torch.zeros(0, 2, dtype=torch.int64)]
    begins = [-1] * (len(stores) + 1)
    below = [0] * (len(stores) + 1)
    for number, store in enumerate(stores):
        if (second := store.second_level) is not None:
            places, below[number] = second
            begins[number] = sum(map(len, words))
            words.append(places)
    return torch.cat(words), begins, below


def _replaced(bags: Bags, tables: Collection[int], change: Callable[[int, Tensor], Tensor]) -> Bags:
    """Returns the same bags, with what `change` makes of a table's number and slots for some
    tables.
    """
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
