"""Calls of the operators, their results, and how two implementations are compared."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.core.config import Family
from sparrow.kernels import Impl, embedding_bag, missing, missing_triton
from sparrow.kernels.embedding_bag import (
    Bags,
    Lookup,
    Lookups,
    Pooling,
    Rows,
    Table,
    Tables,
    fp32_table,
    reference,
)
from sparrow.kernels.formats import RowFormat, fp32
from sparrow.kernels.rules import Regularization, RowRule, init_state

built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
no_triton = missing_triton(torch.device("cpu"))
interpreted = pytest.mark.skipif(bool(no_triton), reason=no_triton)
IMPLS = ["reference", pytest.param("cpp", marks=built), pytest.param("triton", marks=interpreted)]
no_gpu = "" if torch.cuda.is_available() else "there is no GPU here"
TRITON = [  # where the Triton kernels run: in the interpreter, and for `pytest -m gpu` on a GPU
    pytest.param("cpu", marks=interpreted, id="interpreted"),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(no_gpu), reason=no_gpu)], id="gpu"
    ),
]
TRITON_BLOCK = 128  # gradients that these kernels sum at a time
EXTRAS = {
    "plain": Regularization(),
    "l2": Regularization(weight_decay=0.2),
    "decoupled": Regularization(weight_decay=0.2, decay="decoupled"),
    "clip_norm": Regularization(clip_norm=1.5),
    "max_norm": Regularization(max_norm=1.5),
    "all": Regularization(weight_decay=0.2, clip_norm=1.5, max_norm=1.5),
}
FP32 = fp32.Config()
FAMILY = Family("sparrow.kernels.rules")
RULES: dict[str, RowRule] = {
    f"{name}, {extra}": FAMILY.config(name)(regularization=numbers)
    for name in FAMILY.names()
    for extra, numbers in EXTRAS.items()
}
DIMS = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    33,
    48,
    50,
    63,
    64,
    65,
    80,
    100,
    128,
    129,
    200,
    256,
    257,
)


def look(
    pooling: Pooling = "sum", *, table: int = 0, key: int = 0, inverse: int = -1, output: int = 0
) -> Lookup:
    """A feature; its column is filled in by `build`."""
    return Lookup(table=table, pooling=pooling, key=key, inverse=inverse, output=output)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A call without its numbers."""

    keys: tuple[Sequence[int], ...]  # lengths of each key's bags
    lookups: tuple[Lookup, ...] = (look(),)
    rows: tuple[int, ...] = (50,)
    weighted: bool = False
    inverses: tuple[tuple[int, int], ...] = ()  # samples, and the bags they choose from


ODD = [i % 7 for i in range(41)]
SHARED = (
    look(),
    look("mean", key=1, output=1),
    look("none", key=2, output=2),
)
INVERSE = (
    look(inverse=0),
    look("mean", table=1, key=1, inverse=0),
    look(key=1, inverse=1, output=1),
)
SHAPES = {
    "empty batch": Shape(keys=([],)),
    "empty bags": Shape(keys=([0, 0, 0],)),
    "sum": Shape(keys=(ODD,)),
    "mean": Shape(keys=(ODD,), lookups=(look("mean"),)),
    "unpooled": Shape(keys=(ODD,), lookups=(look("none"),)),
    "weighted sum": Shape(keys=(ODD,), weighted=True),
    "weighted mean": Shape(keys=(ODD,), lookups=(look("mean"),), weighted=True),
    "weighted unpooled": Shape(keys=(ODD,), lookups=(look("none"),), weighted=True),
    "one row": Shape(keys=([2, 0, 5],), rows=(1,)),
    "many duplicates": Shape(keys=([5] * 40,), rows=(3,)),
    "long bag": Shape(keys=([2, 5000, 0],), rows=(700,)),
    "shared table": Shape(keys=(ODD, [3, 0, 1], [1, 2]), lookups=SHARED, rows=(13,)),
    "shared inverse index": Shape(
        keys=([1, 0, 2], [4, 1, 1]), lookups=INVERSE, rows=(9, 5), inverses=((8, 3), (5, 3))
    ),
    "several tables": Shape(
        keys=([1] * 9, [i % 3 for i in range(9)], [4] * 9),
        lookups=tuple(look("mean" if k else "sum", table=2 - k, key=k) for k in range(3)),
        rows=(4, 300, 7),
    ),
    "many features of a table": Shape(  # as of many ranks; some have no bag
        keys=tuple([1, 0, 2][: k % 4] for k in range(70)),
        lookups=tuple(look("mean" if k % 5 else "sum", key=k, output=k) for k in range(70)),
        rows=(40,),
    ),
    "everything": Shape(
        keys=([3, 0, 2], [1] * 7, [2, 6], []),
        lookups=(*INVERSE, look("none", table=2, key=2, output=2), look(table=1, key=3, output=3)),
        rows=(20, 2, 65),
        weighted=True,
        inverses=((8, 3), (5, 7)),
    ),
}
# enough work that three threads share a table, and that some tables are whole on one thread
BIG = {
    "spread": Shape(keys=([400, 0, 3, 57] * 50,), rows=(70_001,)),
    "one row": Shape(keys=([400, 0, 3, 57] * 20,), rows=(1,), weighted=True),
    "one bag": Shape(keys=([20_000],), rows=(3000,), lookups=(look("mean"),)),
    "one large table and small ones": Shape(
        keys=([9] * 1200, *([i % 3 for i in range(1200)] for _ in range(5))),
        rows=(5000, 40, 3, 900, 1, 12),
        lookups=tuple(look("mean" if k % 2 else "sum", table=k, key=k) for k in range(6)),
        weighted=True,
    ),
    "shared inverse index": Shape(
        keys=([5] * 400, [7] * 400),
        rows=(500, 30),
        inverses=((3000, 400), (777, 400)),
        lookups=INVERSE,
    ),
    "shared table": Shape(keys=([11] * 900, [4] * 700, [2] * 500), lookups=SHARED, rows=(2000,)),
}


@dataclass(frozen=True)
class Call:
    """Arguments of the operators."""

    tables: Tables
    bags: Bags
    grads: list[Tensor]
    lr_T: Tensor

    def copied(self) -> Call:
        """With tables of its own, which an update may change."""
        levels = [tuple(_cloned(x) for x in t.levels) for t in self.tables]
        return replace(
            self,
            tables=Tables(replace(t, levels=x) for t, x in zip(self.tables, levels, strict=True)),
        )

    def to(self, device: str) -> Call:
        """With all tensors on a device; itself if they are there."""
        if self.bags.slots_N.device.type == device:
            return self
        bags = replace(
            self.bags,
            slots_N=self.bags.slots_N.to(device),
            offsets_B1=self.bags.offsets_B1.to(device),
            weights_N=None if self.bags.weights_N is None else self.bags.weights_N.to(device),
            inverses=[inverse.to(device) for inverse in self.bags.inverses],
        )
        levels = [tuple(_cloned(level, device) for level in table.levels) for table in self.tables]
        tables = Tables(replace(t, levels=x) for t, x in zip(self.tables, levels, strict=True))
        return Call(tables, bags, [grad.to(device) for grad in self.grads], self.lr_T.to(device))

    def content(self) -> dict[str, Tensor]:
        """What is in the tables."""
        found = {}
        for (t, table), name in itertools.product(
            enumerate(self.tables), ("weight", "touched", "state")
        ):
            for i, level in enumerate(table.levels):
                fields = {
                    "weight": level.payload,
                    "touched": {"": level.touched_R},
                    "state": level.state,
                }[name]
                found |= {
                    f"{name} {field} of table {t}, level {i}": tensor
                    for field, tensor in fields.items()
                }
        return found


def _cloned(rows: Rows, device: str | None = None) -> Rows:
    payload, state = (
        {k: t.clone().to(device or t.device) for k, t in of.items()}
        for of in (rows.payload, rows.state)
    )
    asked = {n: of for n in ("changed_R", "rows_R") if (of := getattr(rows, n)) is not None}
    given = {
        n: of.clone().to(device or of.device)
        for n, of in {**asked, "touched_R": rows.touched_R}.items()
    }
    return Rows(format=rows.format, payload=payload, state=state, **given)


def build(
    shape: Shape,
    dims: Sequence[int],
    rule: RowRule,
    *,
    seed: int = 0,
    levels: int = 1,
    dtype: torch.dtype = torch.int64,
    apart: str = "",
    format: RowFormat = FP32,
    state: torch.dtype = torch.float32,
) -> Call:
    """Numbers for a shape; apart: "columns" or "rows" for arguments that do not lie together in
    memory.
    """
    g = torch.Generator().manual_seed(seed)
    made = [_table(rows, dim, rule, levels, g) for rows, dim in zip(shape.rows, dims, strict=False)]
    tables = Tables(_stored(table, number, format, state) for number, table in enumerate(made))
    bounds = [0, *itertools.accumulate(sum(lengths) for lengths in shape.keys)]
    slots_N = torch.empty(bounds[-1], dtype=dtype)
    columns: dict[int, int] = {}
    lookups = []
    for k in range(len(shape.keys)):
        rows = min((shape.rows[f.table] for f in shape.lookups if f.key == k), default=1)
        slots_N[bounds[k] : bounds[k + 1]] = torch.randint(
            0, rows, (bounds[k + 1] - bounds[k],), generator=g
        )
    for f in shape.lookups:
        lookups.append(replace(f, column=columns.get(f.output, 0)))
        columns[f.output] = columns.get(f.output, 0) + dims[f.table]
    bags = Bags(
        slots_N=slots_N,
        offsets_B1=torch.tensor([0, *itertools.accumulate(itertools.chain(*shape.keys))]),
        bags=[len(lengths) for lengths in shape.keys],
        bounds=bounds,
        lookups=Lookups(lookups),
        weights_N=torch.randn(bounds[-1], generator=g) if shape.weighted else None,
        inverses=[
            torch.randint(0, bags, (samples,), generator=g) for samples, bags in shape.inverses
        ],
    )
    grads = [torch.randn(size, generator=g) for size in bags.outputs(dims)]
    if apart:
        bags = replace(
            bags,
            slots_N=spread(bags.slots_N),
            offsets_B1=spread(bags.offsets_B1),
            weights_N=None if bags.weights_N is None else spread(bags.weights_N),
            inverses=[spread(inverse) for inverse in bags.inverses],
        )
        wider = [torch.cat([grad[:, :1], grad, grad[:, :1]], dim=1) for grad in grads]
        grads = [
            wide[:, 1:-1] if apart == "columns" else wide.t().contiguous().t()[:, 1:-1]
            for wide in wider
        ]
    return Call(tables, bags, grads, torch.rand(len(tables), generator=g) * 0.1 + 0.01)


def _table(rows: int, dim: int, rule: RowRule, levels: int, g: torch.Generator) -> Table:
    """Random weights, and the state of rows some of which were updated before."""
    weight_RD, state = torch.randn(rows, dim, generator=g), init_state(rule, rows, dim)
    for every in (1, 2):
        some = {name: tensor[::every] for name, tensor in state.items()}
        grad_UD = torch.randn(len(range(0, rows, every)), dim, generator=g)
        _, after = rule.update(weight_RD[::every], some, grad_UD, torch.tensor(0.1))
        for name in state:
            state[name][::every] = after[name]
    cuts = [rows * (i + 1) // (levels + 2) for i in range(levels - 1)]
    parts = [
        [part.clone() for part in tensor.tensor_split(cuts)]
        for tensor in (weight_RD, *state.values())
    ]
    made = []
    for w, *s in zip(*parts, strict=True):
        touched_R = torch.zeros(len(w), dtype=torch.uint8)
        made.append(
            Rows(
                format=fp32.Config(),
                payload={"weight": w},
                touched_R=touched_R,
                state=dict(zip(state, s, strict=True)),
            )
        )
    return fp32_table(made, rule)


def _stored(table: Table, number: int, format: RowFormat, state: torch.dtype) -> Table:
    """The table with its rows and their state in other formats."""
    levels = []
    for level in table.levels:
        noise_RD = torch.zeros(level.count, table.dim, dtype=torch.int64) + 2**31
        payload = format.encode(
            level.payload["weight"], noise_RD if format.rounding == "stochastic" else None
        )
        narrow = {name: tensor.to(state) for name, tensor in level.state.items()}
        levels.append(replace(level, format=format, payload=payload, state=narrow))
    return replace(
        table,
        levels=tuple(levels),
        key=0xFEDCBA9876543210 + number,
        place=(1000 * number, 7 * number),
    )


def spread(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2)[::2]


def looked_up(call: Call, impl: Impl, *, block: int | None = None) -> dict[str, Tensor]:
    """What an implementation must return to the bit. block: of the reference's sums."""
    found = {
        f"output {i}": out
        for i, out in enumerate(embedding_bag.lookup(call.tables, call.bags, impl=impl))
    }
    if block is None:
        gradients = embedding_bag.row_gradients(call.tables, call.grads, call.bags, impl=impl)
    else:
        gradients = reference.row_gradients(call.tables, call.grads, call.bags, block)
    for t, (rows_U, grad_UD) in enumerate(gradients):
        found |= {f"rows of table {t}": rows_U, f"gradients of table {t}": grad_UD}
    return {name: tensor.cpu() for name, tensor in found.items()}


def updated(
    call: Call, impl: Impl, *, fused: bool = True, n: int | Tensor = 0, block: int | None = None
) -> dict[str, Tensor]:
    """What is in the tables after an update of a copy; also the gradients of the weights. block: of
    its sums.
    """
    call = call.copied()
    if block is not None:
        grad_N = reference.weight_gradients(call.tables, call.grads, call.bags, block)
        reference.fused_update(call.tables, call.grads, call.bags, call.lr_T, n, block)
    elif fused:
        grad_N = embedding_bag.weight_gradients(call.tables, call.grads, call.bags, impl=impl)
        embedding_bag.fused_update(call.tables, call.grads, call.bags, call.lr_T, n, impl=impl)
    else:
        grad_N = embedding_bag.weight_gradients(call.tables, call.grads, call.bags, impl=impl)
        found = embedding_bag.row_gradients(call.tables, call.grads, call.bags, impl=impl)
        embedding_bag.update_rows(call.tables, found, call.lr_T, n, impl=impl)
    content = {name: tensor.cpu() for name, tensor in call.content().items()}
    return {"gradients of weights_N": grad_N.cpu(), **content}


def cell(shape: str, dim: int, rule: str) -> tuple[Call, str, int]:
    """One cell of the matrix, its name and its number; what is not named in it varies with its
    number.
    """
    n = random.Random(f"{shape} {dim} {rule}").randrange(36)
    dims = [DIMS[(DIMS.index(dim) + 5 * t) % len(DIMS)] for t in range(len(SHAPES[shape].rows))]
    levels, dtype, apart = (
        1 + n % 3,
        (torch.int64, torch.int32)[n // 3 % 2],
        ("", "columns", "rows")[n // 6 % 3],
    )
    call = build(SHAPES[shape], dims, RULES[rule], seed=n, levels=levels, dtype=dtype, apart=apart)
    return call, f"{shape}, dim {dim}, {rule}, {levels} levels, {dtype}, {apart}", n


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype, (what, name)
        assert torch.equal(found[name], expected[name]), (what, name)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        atol = 1e-4 if name == "gradients of weights_N" else 2e-6
        torch.testing.assert_close(
            found[name],
            expected[name],
            rtol=2e-5,
            atol=atol,
            msg=lambda m, name=name: f"{what}: {name}: {m}",
        )


def two_tables(rule: str = "adam, plain", *, dtype: torch.dtype = torch.int64) -> Call:
    """Features of four lookups each, in tables of 9 and 10 rows."""
    lookups = (look(), look(table=1, key=1))
    shape = Shape(keys=([2, 2], [1, 3]), rows=(9, 10), lookups=lookups, weighted=True)
    return build(shape, [3, 4], RULES[rule], levels=2, dtype=dtype)


def refusals(call: Call, impl: Impl) -> Iterator[Callable[[], object]]:
    """Every operator that is given bags."""
    yield lambda: embedding_bag.lookup(call.tables, call.bags, impl=impl)
    yield lambda: embedding_bag.row_gradients(call.tables, call.grads, call.bags, impl=impl)
    yield lambda: embedding_bag.weight_gradients(call.tables, call.grads, call.bags, impl=impl)
    yield lambda: embedding_bag.fused_update(
        call.tables, call.grads, call.bags, call.lr_T, impl=impl
    )


def assert_refused(call: Call, impl: Impl, match: str, **changes: Any) -> None:
    """All operators, before anything is written."""
    call = replace(call, bags=replace(call.bags, **changes))
    before = call.copied().content()
    for operator in refusals(call, impl):
        with pytest.raises(ValueError, match=match):
            operator()
    assert_same(call.content(), before, "a refused call")


OPS = [
    "lookup",
    "row_gradients",
    "weight_gradients",
    "update_rows",
    "fused_update",
    "count_outside",
]


def raw(call: Call) -> dict[str, tuple[Any, ...]]:
    """Every operator's own arguments, as `cpp.py` gives them."""
    import sparrow.kernels.embedding_bag.cpp  # noqa: F401  what it says to torch.compile

    bags = (call.bags.slots_N, call.bags.offsets_B1, call.bags.weights_N, list(call.bags.inverses))
    numbers = (call.bags.bags, call.bags.bounds, call.bags.lookups.numbers)
    products = call.bags.lookups.products
    tables, (names, of_rules) = call.tables, call.tables.rules
    payload = (tables.payload, tables.formats, tables.level_counts, tables.dims)
    rows, rules = (
        (*payload, tables.state, tables.touched, tables.changed, tables.row_numbers),
        (names, call.lr_T, of_rules, tables.rounding_T, 1),
    )
    found = embedding_bag.row_gradients(tables, call.grads, call.bags, impl="reference")
    return {
        "lookup": (*payload, *bags, *numbers, products),
        "row_gradients": (call.grads, tables.sizes, *payload, *bags, *numbers, products),
        "weight_gradients": (call.grads, *payload, *bags[:2], bags[3], *numbers),
        "update_rows": (*rows, [u for u, _ in found], [grad_UD for _, grad_UD in found], *rules),
        "fused_update": (*rows, call.grads, *bags, *numbers, products, *rules),
        "count_outside": (
            call.bags.slots_N,
            call.bags.bounds,
            [tables[0].rows] * len(call.bags.bags),
        ),
    }
