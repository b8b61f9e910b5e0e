from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from sparrow.core import KeyedJagged
from sparrow.embeddings import Direct, EmbeddingTables, Feature, RowRecords, TableSpec
from sparrow.embeddings.components import ComponentTables
from sparrow.embeddings.exchange import LocalExchange
from sparrow.kernels.rules import sgd

SPEC = TableSpec(name="t", dim=4, addressing=Direct(30), rule=sgd.Config(lr=0.5))
FEATURE = Feature(name="f", table="t")


class Copied(LocalExchange):
    """All rows are copies that another rank has too, whose gradients are as large."""

    def __init__(self) -> None:
        super().__init__(
            ComponentTables([RowRecords(*SPEC.components, 1)], is_copied=True), [FEATURE]
        )
        self.saved_parts = ()
        self.shared = 0

    @override
    def share_gradients(self) -> None:
        self.shared += 1
        for gradients in self.rows.gradients().values():
            gradients.grad_UD *= 2


def batch(seed: int) -> KeyedJagged:
    values_N = torch.randint(0, 30, (16,), generator=torch.Generator().manual_seed(seed))
    return KeyedJagged(keys=("f",), values_N=values_N, lengths=torch.full((8,), 2))


def backward(tables: EmbeddingTables, seed: int, scale: float = 1.0) -> Tensor:
    vectors: Any = tables(batch(seed))["f"]
    (vectors * scale).sum().backward()
    found: Tensor = vectors.detach()
    return found


def made(mode: Any = "fused") -> EmbeddingTables:
    return EmbeddingTables([SPEC], [FEATURE], seed=1, mode=mode)


@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_rows_that_every_rank_has_learn_from_the_gradients_of_all(mode: Any) -> None:
    """They learn in `update` and not in backward, whoever has read the gradients before."""
    plain, tables, exchange = made("deferred"), made(mode), Copied()
    tables.use(exchange)
    for step in range(4):
        before = next(tables.all_records()).weight.clone()
        assert torch.equal(backward(tables, step), backward(plain, step, 2.0))
        assert torch.equal(next(tables.all_records()).weight, before)
        if step % 2:
            (read,) = tables.gradients().values()
            assert torch.equal(read.grad_UD, plain.gradients()["t"].grad_UD)
        if step == 2:
            tables.discard()
            plain.discard()
        tables.update()
        plain.update()
        assert torch.equal(next(tables.all_records()).weight, plain.record("t").weight)
    assert exchange.shared == 4
    assert list(tables.chunks()) == list(tables.saved()) == []
    assert int(tables.get_extra_state()[0]) == 4


def test_what_is_off_is_never_shared() -> None:
    tables, exchange = made(), Copied()
    tables.use(exchange)
    tables.mode = "off"
    before = next(tables.all_records()).weight.clone()
    backward(tables, 0)
    tables.update()
    assert tables.gradients() == {} and exchange.shared == 0
    assert torch.equal(next(tables.all_records()).weight, before)
    assert exchange.rows.mode == "off"
    tables.mode = "fused"
    assert exchange.rows.mode == "deferred"


def test_mode_implementation_and_rates_reach_the_rows_that_an_exchange_brings() -> None:
    tables = EmbeddingTables([SPEC], [FEATURE], mode="deferred", impl="reference")
    tables.use(LocalExchange(ComponentTables([RowRecords(*SPEC.components, 1)]), [FEATURE]))
    (rows,) = tables.exchange.parts
    assert (rows.mode, rows.impl) == ("deferred", "reference")
    tables.scale_lr(0.5)
    assert rows.lr_T.tolist() == [0.25]
    assert list(tables.parts) == [rows], "it moves and trains with the model"


def test_a_copy_has_rows_of_its_own() -> None:
    tables = made()
    backward(tables, 0)
    other = copy.deepcopy(tables)
    before = tables.record("t").weight.clone()
    backward(other, 1)
    assert torch.equal(tables.record("t").weight, before)
    assert not torch.equal(other.record("t").weight, before)
    assert list(other.parts) == list(other.exchange.parts)
    backward(tables, 1)
    assert torch.equal(tables.record("t").weight, other.record("t").weight)
