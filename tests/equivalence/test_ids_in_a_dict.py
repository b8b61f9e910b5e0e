"""Tables whose ids come and go against a dict: id -> when it was used, its vector and what the rule
keeps of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparrow.core import KeyedJagged, UserError
from sparrow.embeddings import ON_CPU, EmbeddingTables, Feature, Placement, TableSpec
from sparrow.embeddings.spec import Cache
from sparrow.extensions.dynamic_ids.addressing import Dynamic
from sparrow.kernels import philox, row_index
from sparrow.kernels.formats import fp16, fp32, int8, split_bf16
from sparrow.kernels.row_index import Policy
from sparrow.kernels.rules import adagrad, adam, rowwise_adagrad, rowwise_adam

DIM, ROWS, LR, EPS, SEED, SCALE = 3, 4, 0.5, 1e-8, 7, 0.5
SHARED = -2  # stands for all ids that have no row


def tables_of(
    policy: Policy, rule: Any, placement: Placement = ON_CPU, **choices: Any
) -> EmbeddingTables:
    spec = TableSpec(
        name="t", dim=DIM, addressing=Dynamic(policy), rule=rule, init_scale=SCALE, **choices
    )
    return EmbeddingTables(
        [spec], [Feature(name="f", table="t")], seed=SEED, mode="deferred", placement=placement
    )


def batch_of(ids: list[int], time: int | None = None) -> KeyedJagged:
    lengths = torch.ones(len(ids), dtype=torch.int64)
    return KeyedJagged(
        keys=("f",), values_N=torch.tensor(ids, dtype=torch.int64), lengths=lengths, time=time
    )


def first_of(id: int) -> Tensor:
    """What the row of an id begins with."""
    values = torch.empty(1, DIM)
    philox.uniform_(values, philox.key_of(SEED, "t"), SCALE, rows_R=torch.tensor([id]))
    return values[0]


@dataclass
class Held:
    vector: Tensor
    row: int
    time: int = 0
    batch: int = 0
    sum: Tensor = field(default_factory=lambda: torch.zeros(DIM))


class InADict:
    """One bucket under lru, AdaGrad by hand."""

    def __init__(self, ttl: int | None) -> None:
        self.of = {0: Held(first_of(0), 1)}
        self.shared = Held(torch.empty(DIM), 0)
        self.ttl, self.now, self.batch, self.settled = ttl, 0, 0, 0
        self.pending: list[tuple[Held, Tensor]] = []

    def is_old(self, id: int) -> bool:
        return id != 0 and self.ttl is not None and self.now - self.of[id].time > self.ttl

    def is_held(self, id: int) -> bool:
        return self.of[id].batch > self.settled

    def read(self, ids: list[int]) -> list[Held]:
        return [self.of[id] if id in self.of and not self.is_old(id) else self.shared for id in ids]

    def step(self, ids: list[int], grads: Tensor) -> list[Tensor]:
        self.now, self.batch = self.now + len(ids), self.batch + 1
        new = {id for id in ids if id not in self.of or (self.is_old(id) and not self.is_held(id))}
        for id in set(ids) - new:
            self.of[id].time, self.of[id].batch = self.now, self.batch
        for id in sorted(new, key=lambda id: int(row_index.keys_of(torch.tensor([id])))):
            self.of.pop(id, None)
            if (row := self.free()) is not None:
                self.of[id] = Held(first_of(id), row, self.now, self.batch)
        rows = [self.of.get(id, self.shared) for id in ids]
        self.pending += zip(rows, grads, strict=True)
        return [held.vector for held in rows]

    def free(self) -> int | None:
        """Returns a row that nobody has, or takes one from somebody."""
        rows = set(range(2, ROWS + 2))
        if not rows - {held.row for held in self.of.values()}:
            for id in [id for id in self.of if self.is_old(id) and not self.is_held(id)]:
                del self.of[id]
        if not rows - {held.row for held in self.of.values()}:
            least = min(
                (
                    (held.time, held.row, id)
                    for id, held in self.of.items()
                    if id and not self.is_held(id)
                ),
                default=None,
            )
            if least is None:
                return None
            del self.of[least[2]]
        return min(rows - {held.row for held in self.of.values()})

    def learn(self) -> None:
        total: dict[int, tuple[Held, Tensor]] = {}
        for held, grad in self.pending:
            total[id(held)] = held, total[id(held)][1] + grad if id(held) in total else grad
        for held, grad in total.values():
            held.sum = held.sum + grad.square()
            held.vector = held.vector - LR / (held.sum.sqrt() + EPS) * grad
        self.forget()

    def forget(self) -> None:
        self.pending, self.settled = [], self.batch


def same(tables: EmbeddingTables, model: InADict) -> None:
    fields = tables.record("t").fields
    assert {id: row for row, id in enumerate(fields["id"].tolist()) if id >= 0} == {
        id: held.row for id, held in model.of.items()
    }
    for held in [*model.of.values(), model.shared]:
        assert torch.allclose(fields["weight"][held.row], held.vector, rtol=1e-6, atol=1e-7)
        assert torch.allclose(fields["sum"][held.row], held.sum, rtol=1e-6)
        assert held is model.shared or held.row == 1 or int(fields["time"][held.row]) == held.time


ids_of_a_batch = st.lists(st.integers(0, 11), min_size=1, max_size=7)
programs = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "gather", "discard", "read", "save"]), ids_of_a_batch
    ),
    max_size=25,
)


@settings(max_examples=120, deadline=None)
@given(program=programs, ttl=st.sampled_from([None, 9, 20]))
def test_any_program_does_what_a_dict_does(
    program: list[tuple[str, list[int]]], ttl: int | None
) -> None:
    """Batches that learn, wait to learn, never learn, only read; and a checkpoint between any
    two.
    """
    policy, rule = Policy(capacity=ROWS, ttl=ttl), adagrad.Config(lr=LR, eps=EPS)
    tables, model = tables_of(policy, rule), InADict(ttl)
    model.shared.vector = tables.record("t").weight[0].clone()
    for number, (what, ids) in enumerate(program):
        if what in ("step", "gather", "discard"):
            grads = (
                torch.randint(
                    -8, 9, (len(ids), DIM), generator=torch.Generator().manual_seed(number)
                )
                / 8
            )
            out: Any = tables(batch_of(ids))["f"]
            assert torch.allclose(out, torch.stack(model.step(ids, grads)), rtol=1e-6, atol=1e-7)
            out.backward(grads)
            if what == "step":
                tables.update()
                model.learn()
            elif what == "discard":
                tables.discard()
                model.forget()
        elif what == "read":
            tables.eval()
            with torch.no_grad():
                out = tables(batch_of(ids))["f"]
            tables.train()
            assert torch.allclose(
                out, torch.stack([held.vector for held in model.read(ids)]), rtol=1e-6, atol=1e-7
            )
        elif not model.pending:  # what has not learnt is not in a checkpoint
            chunks, passed, tables = (
                list(tables.chunks()),
                tables.exchange.parts[0].passed,
                tables_of(policy, rule),
            )
            for chunk in chunks:
                tables.load_chunk(chunk)
            tables.exchange.parts[0].passed = passed
            model.forget()
    tables.update()
    model.learn()
    same(tables, model)


RULES = {
    "adagrad": adagrad.Config(initial=0.25),
    "adam": adam.Config(),
    "rowwise_adagrad": rowwise_adagrad.Config(),
    "rowwise_adam": rowwise_adam.Config(),
}
STORED: dict[str, dict[str, Any]] = {
    "fp32": {"format": fp32.Config()},
    "state in bf16": {"state": "bf16"},
    "split_bf16": {"format": split_bf16.Config()},
    "int8": {"format": int8.Config()},
    "fp16 with a cache": {"format": fp16.Config(), "cache": Cache(fraction=1.0)},
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_is_given_away_begins_anew(rule: str, stored: str) -> None:
    """As in a table that never saw the id before: values, state, and what learns from there."""
    choices = STORED[stored]
    old, new = (tables_of(Policy(capacity=1), RULES[rule], **choices) for _ in range(2))
    for _ in range(5):
        old(batch_of([5]))["f"].sum().backward()
        old.update()
    assert old.record("t").fields["id"].tolist() == [-2, 0, 5]
    for tables in (old, new):
        out: Any = tables(batch_of([6]))["f"]
        tables.update()  # nothing was learnt
        assert torch.allclose(out[0], first_of(6), atol=5e-3)
    assert old.record("t").fields["id"].tolist() == [-2, 0, 6]
    names = [name for name in old.record("t").fields if name not in ("time", "sightings")]
    state = old.record("t").component.rule.fields(DIM)
    for name in names:
        mine, its = (tables.record("t").fields[name][2] for tables in (old, new))
        assert torch.equal(mine, its), name
        assert name not in state or bool((mine.float() == state[name].first).all()), name
    # else rounded by the number of the update
    if old.record("t").component.format.rounding != "stochastic":
        for tables in (old, new):
            tables.exchange.parts[0].updates = 9  # as many: adam counts
            tables(batch_of([6]))["f"].sum().backward()
            tables.update()
        assert torch.equal(*(tables.record("t").weight[2] for tables in (old, new)))


def test_a_gpu_is_refused_before_there_is_memory() -> None:
    with pytest.raises(UserError, match="table 't': which ids have rows is kept on the CPU alone"):
        tables_of(Policy(capacity=4), adagrad.Config(), Placement(device="cuda"))


def test_a_batch_without_a_time_and_one_before_the_last_are_refused() -> None:
    tables = tables_of(Policy(capacity=4, clock="time"), adagrad.Config())
    with pytest.raises(
        UserError, match="time: the batch has none, and tables ask for it; choose .*clock examples"
    ):
        tables(batch_of([1]))
    tables(batch_of([1], time=100))
    tables(batch_of([2], time=100))
    with pytest.raises(
        UserError, match="time: a batch of 99 comes after one of 100; prepare the log in the order"
    ):
        tables(batch_of([3], time=99))
    assert tables.record("t").id_counts["admitted"] == 2, "nothing was done for what was refused"
    assert tables.exchange.parts[0].passed.time == 100
