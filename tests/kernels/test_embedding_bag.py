from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparrow.core.config import Family
from sparrow.kernels import Impl, embedding_bag, missing
from sparrow.kernels.embedding_bag import Bags, Lookup, Lookups, Pooling, Rows, Table, Tables
from sparrow.kernels.rules import Regularization, RowRule, rowwise_adagrad, sgd

built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
IMPLS = ["reference", pytest.param("cpp", marks=built)]
EXTRAS = {
    "plain": Regularization(),
    "l2": Regularization(weight_decay=0.2),
    "decoupled": Regularization(weight_decay=0.2, decay="decoupled"),
    "clip_norm": Regularization(clip_norm=1.5),
    "max_norm": Regularization(max_norm=1.5),
    "all": Regularization(weight_decay=0.2, clip_norm=1.5, max_norm=1.5),
}
FAMILY = Family("sparrow.kernels.rules")
RULES: dict[str, RowRule] = {
    f"{name}, {extra}": FAMILY.config(name)(regularization=numbers)
    for name in FAMILY.names()
    for extra, numbers in EXTRAS.items()
}
DIMS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 48, 50, 63, 64, 65, 80, 100, 128, 129, 200, 256, 257)


def look(pooling: Pooling = "sum", *, table: int = 0, key: int = 0, inverse: int = -1, output: int = 0) -> Lookup:
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
    "shared inverse index": Shape(keys=([1, 0, 2], [4, 1, 1]), lookups=INVERSE, rows=(9, 5), inverses=((8, 3), (5, 3))),
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


@dataclass(frozen=True)
class Call:
    """Arguments of the operators."""

    tables: Tables
    bags: Bags
    grads: list[Tensor]
    lr_T: Tensor

    def copied(self) -> Call:
        """With tables of its own, which an update may change."""
        levels = [
            tuple(
                Rows(weight_RD=x.weight_RD.clone(), touched_R=x.touched_R.clone(), state=_cloned(x)) for x in t.levels
            )
            for t in self.tables
        ]
        return replace(self, tables=Tables(replace(t, levels=x) for t, x in zip(self.tables, levels, strict=True)))

    def content(self) -> dict[str, Tensor]:
        """What is in the tables."""
        found = {}
        for (t, table), name in itertools.product(enumerate(self.tables), ("weight", "touched", "state")):
            for i, level in enumerate(table.levels):
                fields = {"weight": {"": level.weight_RD}, "touched": {"": level.touched_R}, "state": level.state}[name]
                found |= {f"{name} {field} of table {t}, level {i}": tensor for field, tensor in fields.items()}
        return found


def _cloned(rows: Rows) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in rows.state.items()}


def build(
    shape: Shape,
    dims: Sequence[int],
    rule: RowRule,
    *,
    seed: int = 0,
    levels: int = 1,
    dtype: torch.dtype = torch.int64,
    apart: str = "",
) -> Call:
    """Numbers for a shape; apart: "columns" or "rows" for arguments that do not lie together in memory."""
    g = torch.Generator().manual_seed(seed)
    tables = Tables(_table(rows, dim, rule, levels, g) for rows, dim in zip(shape.rows, dims, strict=False))
    bounds = [0, *itertools.accumulate(sum(lengths) for lengths in shape.keys)]
    slots_N = torch.empty(bounds[-1], dtype=dtype)
    columns: dict[int, int] = {}
    lookups = []
    for k in range(len(shape.keys)):
        rows = min((shape.rows[f.table] for f in shape.lookups if f.key == k), default=1)
        slots_N[bounds[k] : bounds[k + 1]] = torch.randint(0, rows, (bounds[k + 1] - bounds[k],), generator=g)
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
        inverses=[torch.randint(0, bags, (samples,), generator=g) for samples, bags in shape.inverses],
    )
    grads = [torch.randn(size, generator=g) for size in bags.outputs(dims)]
    if apart:
        bags = replace(
            bags,
            slots_N=_spread(bags.slots_N),
            offsets_B1=_spread(bags.offsets_B1),
            weights_N=None if bags.weights_N is None else _spread(bags.weights_N),
            inverses=[_spread(inverse) for inverse in bags.inverses],
        )
        wider = [torch.cat([grad[:, :1], grad, grad[:, :1]], dim=1) for grad in grads]
        grads = [wide[:, 1:-1] if apart == "columns" else wide.t().contiguous().t()[:, 1:-1] for wide in wider]
    return Call(tables, bags, grads, torch.rand(len(tables), generator=g) * 0.1 + 0.01)


def _table(rows: int, dim: int, rule: RowRule, levels: int, g: torch.Generator) -> Table:
    """Random weights, and the state of rows some of which were updated before."""
    weight_RD, state = torch.randn(rows, dim, generator=g), rule.init_state(rows, dim)
    for every in (1, 2):
        some = {name: tensor[::every] for name, tensor in state.items()}
        grad_UD = torch.randn(len(range(0, rows, every)), dim, generator=g)
        _, after = rule.update(weight_RD[::every], some, grad_UD, torch.tensor(0.1))
        for name in state:
            state[name][::every] = after[name]
    cuts = [rows * (i + 1) // (levels + 2) for i in range(levels - 1)]
    parts = [[part.clone() for part in tensor.tensor_split(cuts)] for tensor in (weight_RD, *state.values())]
    return Table(
        levels=tuple(
            Rows(weight_RD=w, touched_R=torch.zeros(len(w), dtype=torch.uint8), state=dict(zip(state, s, strict=True)))
            for w, *s in zip(*parts, strict=True)
        ),
        rule=rule,
    )


def _spread(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2)[::2]


def looked_up(call: Call, impl: Impl) -> dict[str, Tensor]:
    """What an implementation must return to the bit."""
    found = {f"output {i}": out for i, out in enumerate(embedding_bag.lookup(call.tables, call.bags, impl=impl))}
    for t, (rows_U, grad_UD) in enumerate(embedding_bag.row_gradients(call.tables, call.grads, call.bags, impl=impl)):
        found |= {f"rows of table {t}": rows_U, f"gradients of table {t}": grad_UD}
    return found


def updated(call: Call, impl: Impl, *, fused: bool = True) -> dict[str, Tensor]:
    """What is in the tables after an update of a copy; also the gradients of the weights."""
    call = call.copied()
    grad_N = embedding_bag.weight_gradients(call.tables, call.grads, call.bags, impl=impl)
    if fused:
        embedding_bag.fused_update(call.tables, call.grads, call.bags, call.lr_T, impl=impl)
    else:
        found = embedding_bag.row_gradients(call.tables, call.grads, call.bags, impl=impl)
        embedding_bag.update_rows(call.tables, found, call.lr_T, impl=impl)
    return {"gradients of weights_N": grad_N, **call.content()}


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
            found[name], expected[name], rtol=2e-5, atol=atol, msg=lambda m, name=name: f"{what}: {name}: {m}"
        )


@pytest.fixture(scope="module", autouse=True)
def poison() -> Iterator[None]:
    """What aten leaves uninitialised, for C++ too, is NaN (or the largest integer), so that reading it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def processors() -> Iterator[list[str]]:
    """Those that this machine can be; the best is put back afterwards."""
    here = []
    for name in ("avx512", "avx2", "portable"):
        with contextlib.suppress(ValueError):
            here.append(torch.ops.sparrow.processor(name))
    torch.ops.sparrow.processor("best")
    yield here
    torch.ops.sparrow.processor("best")


def test_uninitialised_memory_is_poisoned() -> None:
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.ops.aten.empty.memory_format([64], device="cpu").isnan().all()


# -- the matrix: C++ against the reference -----------------------------------------------------------------------------


def check_cell(shape: str, dim: int, rule: str, processors: list[str]) -> None:
    """One cell of the matrix; what is not named in it varies with its number."""
    n = random.Random(f"{shape} {dim} {rule}").randrange(36)
    dims = [DIMS[(DIMS.index(dim) + 5 * t) % len(DIMS)] for t in range(len(SHAPES[shape].rows))]
    levels, dtype, apart = 1 + n % 3, (torch.int64, torch.int32)[n // 3 % 2], ("", "columns", "rows")[n // 6 % 3]
    call = build(SHAPES[shape], dims, RULES[rule], seed=n, levels=levels, dtype=dtype, apart=apart)
    what = f"{shape}, dim {dim}, {rule}, {levels} levels, {dtype}, {apart}"
    exact, close = looked_up(call, "reference"), updated(call, "reference")
    assert all(tensor.isfinite().all() for tensor in (*exact.values(), *close.values())), what
    first: dict[str, Tensor] = {}
    for i, name in enumerate(processors):
        assert torch.ops.sparrow.processor(name) == name
        assert_same(looked_up(call, "cpp"), exact, what)
        after = updated(call, "cpp")
        first = first or after
        assert_same(after, first, f"{what}, {name}")
        if i == n % len(processors):
            assert_same(updated(call, "cpp", fused=False), first, f"{what}, {name}, not fused")
    assert_close(first, close, what)


@built
@pytest.mark.parametrize("rule", RULES)
def test_cpp_is_the_reference(rule: str, processors: list[str]) -> None:
    for i, dim in enumerate(DIMS):  # every pair of rule, dim and shape: see below
        check_cell(list(SHAPES)[(i + list(RULES).index(rule)) % len(SHAPES)], dim, rule, processors)


def test_the_matrix_has_every_pair() -> None:
    cells = {(r, d, (d + r) % len(SHAPES)) for r in range(len(RULES)) for d in range(len(DIMS))}
    assert len({(d, s) for _, d, s in cells}) == len(DIMS) * len(SHAPES)
    assert len({(r, s) for r, _, s in cells}) == len(RULES) * len(SHAPES)


@pytest.mark.slow
@built
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cpp_is_the_reference_in_every_cell(shape: str, rule: str, processors: list[str]) -> None:
    for dim in DIMS:
        check_cell(shape, dim, rule, processors)


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
        keys=([5] * 400, [7] * 400), rows=(500, 30), inverses=((3000, 400), (777, 400)), lookups=INVERSE
    ),
    "shared table": Shape(keys=([11] * 900, [4] * 700, [2] * 500), lookups=SHARED, rows=(2000,)),
}


@built
@pytest.mark.parametrize("shape", BIG)
def test_any_number_of_threads_has_the_same_bits(shape: str, threads: Callable[[int], None]) -> None:
    dims = [16, 8, 33, 4, 100, 1]
    call = build(BIG[shape], dims, RULES["rowwise_adam, all"], levels=2 if shape == "shared table" else 1)
    exact, first = looked_up(call, "reference"), {}
    for count in (1, 2, 3):
        threads(count)
        assert_same(looked_up(call, "cpp"), exact, f"{count} threads")
        for fused in (True, False):
            after = updated(call, "cpp", fused=fused)
            first = first or after
            assert_same(after, first, f"{count} threads, fused: {fused}")
    assert_close(first, updated(call, "reference"), shape)


@pytest.mark.slow
@built
@pytest.mark.parametrize("rows", [2**21 + 5, 2**22 + 1])
def test_millions_of_lookups(rows: int, threads: Callable[[int], None]) -> None:
    shape = Shape(keys=([50, 0, 1, 49] * 50_000,), rows=(rows,))
    assert sum(shape.keys[0]) >= 5_000_000
    call = build(shape, [5], RULES["rowwise_adagrad, plain"], dtype=torch.int32)
    exact, close = looked_up(call, "reference"), updated(call, "reference")
    for count in (1, 2):
        threads(count)
        assert_same(looked_up(call, "cpp"), exact, f"{count} threads")
        assert_close(updated(call, "cpp"), close, f"{count} threads")


# -- programs: C++ follows the reference through any sequence of calls -------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn, rows: tuple[int, ...]) -> Shape:
    """A batch for tables of these sizes."""
    lengths = st.lists(st.integers(0, 6), max_size=6)
    keys = tuple(draw(st.lists(lengths, min_size=1, max_size=4)))
    lookups: list[Lookup] = []
    inverses: list[tuple[int, int]] = []
    for k in range(len(keys)):
        pooling = draw(st.sampled_from(["sum", "mean", "none"]))
        inverse = -1
        if pooling != "none" and keys[k] and draw(st.booleans()):
            inverse = len(inverses)
            inverses.append((draw(st.integers(1, 9)), len(keys[k])))
        table = draw(st.integers(0, len(rows) - 1))
        samples = inverses[inverse][0] if inverse >= 0 else sum(keys[k]) if pooling == "none" else len(keys[k])
        f = look(pooling, table=table, key=k, inverse=inverse, output=lookups[-1].output if lookups else 0)
        before = lookups and _samples(lookups[-1], keys, inverses)
        lookups.append(f if not lookups or before == samples else replace(f, output=f.output + 1))
    return Shape(keys=keys, lookups=tuple(lookups), rows=rows, weighted=draw(st.booleans()), inverses=tuple(inverses))


def _samples(f: Lookup, keys: Sequence[Sequence[int]], inverses: Sequence[tuple[int, int]]) -> int:
    if f.inverse >= 0:
        return inverses[f.inverse][0]
    return sum(keys[f.key]) if f.pooling == "none" else len(keys[f.key])


@built
@settings(max_examples=40)
@given(data=st.data())
def test_programs(data: st.DataObject) -> None:
    rows = tuple(data.draw(st.lists(st.sampled_from([1, 2, 5, 40]), min_size=1, max_size=3)))
    dims = [data.draw(st.sampled_from(DIMS[:17])) for _ in rows]
    rule, levels = RULES[data.draw(st.sampled_from(list(RULES)))], data.draw(st.integers(1, min(rows)))
    tables = build(Shape(keys=([],), rows=rows), dims, rule, levels=levels).tables
    for step in range(data.draw(st.integers(1, 4))):
        shape, apart = data.draw(shapes(rows)), data.draw(st.sampled_from(["", "columns", "rows"]))
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        call = replace(build(shape, dims, rule, seed=step, dtype=dtype, apart=apart), tables=tables)
        assert_same(looked_up(call, "cpp"), looked_up(call, "reference"), "looked up")
        after = updated(call, "reference")
        assert_close(updated(call, "cpp", fused=data.draw(st.booleans())), after, "updated")
        tables = call.copied().tables
        embedding_bag.fused_update(tables, call.grads, call.bags, call.lr_T, impl="reference")


# -- the reference against torch and by hand ---------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reference_is_torchs_embedding_bag(pooling: str, weighted: bool) -> None:
    shape = Shape(keys=(ODD,), weighted=weighted, lookups=(look(pooling),))  # type: ignore[arg-type]
    call = build(shape, [5], RULES["sgd, plain"], levels=3)
    weight_RD = torch.cat(call.tables.weights).requires_grad_()
    slots_N, offsets_B1 = call.bags.slots_N, call.bags.offsets_B1
    weights_N = torch.ones(len(slots_N)) if call.bags.weights_N is None else call.bags.weights_N
    weights_N.requires_grad_()
    if pooling == "none":
        offsets_B1 = torch.arange(len(slots_N) + 1)
    expected_BD = F.embedding_bag(
        slots_N, weight_RD, offsets_B1, mode="sum", per_sample_weights=weights_N, include_last_offset=True
    )
    if pooling == "mean":
        expected_BD = expected_BD / offsets_B1.diff().clamp(min=1)[:, None]
        plain_BD = F.embedding_bag(slots_N, weight_RD, offsets_B1, mode="mean", include_last_offset=True)
        if not weighted:
            torch.testing.assert_close(expected_BD, plain_BD)
    expected_BD.backward(call.grads[0])
    with torch.no_grad():
        found = looked_up(call, "reference")
        grad_N = embedding_bag.weight_gradients(call.tables, call.grads, call.bags, impl="reference")
    rows_U = found["rows of table 0"]
    assert rows_U.tolist() == sorted(set(slots_N.tolist()))
    torch.testing.assert_close(found["output 0"], expected_BD.detach())
    torch.testing.assert_close(grad_N, weights_N.grad)
    assert weight_RD.grad is not None
    grad_RD = torch.zeros_like(weight_RD).index_copy_(0, rows_U, found["gradients of table 0"])
    torch.testing.assert_close(grad_RD, weight_RD.grad)


@pytest.mark.parametrize("impl", IMPLS)
def test_an_inverse_index_is_a_lookup_of_repeated_bags(impl: Impl) -> None:
    bags = Bags(
        slots_N=torch.tensor([3, 1, 1]), offsets_B1=torch.tensor([0, 2, 2, 3]), bags=[3], bounds=[0, 3],
        lookups=Lookups([look(inverse=0)]), inverses=[torch.tensor([2, 0, 0, 1])],
    )  # fmt: skip
    repeated = embedding_bag.bags_of(torch.tensor([1, 3, 1, 3, 1]), torch.tensor([0, 1, 3, 5, 5]))
    tables = embedding_bag.tables_of(torch.randn(4, 3), sgd.Config())
    grads = [torch.randn(4, 3)]
    out = [embedding_bag.lookup(tables, each, impl=impl)[0] for each in (bags, repeated)]
    assert torch.equal(out[0], out[1])
    found = [embedding_bag.row_gradients(tables, grads, each, impl=impl)[0] for each in (bags, repeated)]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("fused", [True, False])
def test_adagrad_sees_each_row_once_with_its_whole_gradient(impl: Impl, fused: bool) -> None:
    # row 1 occurs three times, its gradient is (1, 2) + 3 (1, 0) - (0, 4) = (4, -2): the mean square is 10 (the
    # square of the mean is 1); one rule call per duplicate would end with sum 2.5 + 4.5 + 8 = 15
    tables = embedding_bag.tables_of(torch.zeros(3, 2), rowwise_adagrad.Config(eps=1.0))
    weights_N = torch.tensor([1.0, 0.5, 3.0, -1.0])
    bags = embedding_bag.bags_of(torch.tensor([1, 2, 1, 1]), torch.tensor([0, 1, 3, 4]), weights_N=weights_N)
    call = Call(tables, bags, [torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 4.0]])], torch.tensor([0.5]))
    _, weight_RD, touched_R, sum_R = updated(call, impl, fused=fused).values()
    rate = 0.5 / (10**0.5 + 1)
    other = 0.5 / (0.125**0.5 + 1)
    torch.testing.assert_close(sum_R, torch.tensor([0.0, 10.0, 0.125]))
    torch.testing.assert_close(weight_RD, torch.tensor([[0.0, 0.0], [-4 * rate, 2 * rate], [-0.5 * other, 0.0]]))
    assert touched_R.tolist() == [0, 1, 1]


@pytest.mark.parametrize("impl", IMPLS)
def test_untouched_rows_keep_their_bits(impl: Impl) -> None:
    for rule in RULES.values():
        call = build(Shape(keys=([0, 3, 0, 0, 2, 1, 0],), rows=(5,)), [3], rule)
        call.bags.slots_N.copy_(torch.tensor([4, 0, 4, 4, 0, 0]))
        before, after = call.content(), updated(call, impl)
        assert after["touched  of table 0, level 0"].tolist() == [1, 0, 0, 0, 1]
        for name in before:
            if name != "touched  of table 0, level 0":
                assert torch.equal(after[name][1:4], before[name][1:4]), (rule, name)
                assert (after[name][[0, 4]] != before[name][[0, 4]]).all(), (rule, name)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_learning_rate_is_read_at_every_update(impl: Impl) -> None:
    tables = embedding_bag.tables_of(torch.zeros(1, 2), sgd.Config())
    bags, lr_T = embedding_bag.bags_of(torch.tensor([0]), torch.tensor([0, 1])), torch.tensor([1.0])
    for lr, expected in ((1.0, -1.0), (0.25, -1.25), (0.0, -1.25)):
        lr_T.fill_(lr)
        embedding_bag.fused_update(tables, [torch.ones(1, 2)], bags, lr_T, impl=impl)
        assert tables.weights[0].tolist() == [[expected, expected]]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_count_outside(impl: Impl, dtype: torch.dtype) -> None:
    slots_N = torch.tensor([0, 4, 5, -1, -7, 2**31 - 1, 3, 9], dtype=dtype)
    for slots in (slots_N, _spread(slots_N)):
        counts_K = embedding_bag.count_outside(slots, [0, 4, 4, 6, 8], [5, 1, -1, 4], impl=impl)
        assert counts_K.dtype == torch.int64
        assert counts_K.tolist() == [2, 0, 0, 1]
    assert embedding_bag.count_outside(slots_N[:0], [0], [], impl=impl).tolist() == []


@built
def test_count_outside_on_any_number_of_threads(threads: Callable[[int], None]) -> None:
    slots_N, bounds = torch.randint(-100, 1000, (300_000,)), [0, 5, 5, 150_001, 300_000]
    expected_K = embedding_bag.count_outside(slots_N, bounds, [900, 3, 500, 900], impl="reference")
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(embedding_bag.count_outside(slots_N, bounds, [900, 3, 500, 900], impl="cpp"), expected_K)


# -- mistakes ----------------------------------------------------------------------------------------------------------


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
    yield lambda: embedding_bag.fused_update(call.tables, call.grads, call.bags, call.lr_T, impl=impl)


def assert_refused(call: Call, impl: Impl, match: str, **changes: Any) -> None:
    """All operators, before anything is written."""
    call = replace(call, bags=replace(call.bags, **changes))
    before = call.copied().content()
    for operator in refusals(call, impl):
        with pytest.raises(ValueError, match=match):
            operator()
    assert_same(call.content(), before, "a refused call")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63)])
def test_slot_outside_the_table(impl: Impl, dtype: torch.dtype, bad: int) -> None:
    if abs(bad) <= torch.iinfo(dtype).max:
        call = two_tables(dtype=dtype)
        slots_N = call.bags.slots_N.clone()
        slots_N[6] = slots_N[7] = bad
        match = rf"^slot {bad} at position 2 of feature 1 is outside \[0, 10\) of table 1$"
        assert_refused(call, impl, match, slots_N=slots_N)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_first_slot_outside_is_named_on_any_number_of_threads(impl: Impl, threads: Callable[[int], None]) -> None:
    call = build(BIG["spread"], [16], RULES["sgd, plain"])
    call.bags.slots_N[[3000, 15_000, 22_999]] = torch.tensor([-3, -4, -5])
    for count in (1, 2, 3):
        threads(count)
        assert_refused(call, impl, "^slot -3 at position 3000 of feature 0 is outside")


OFFSETS = {
    "falling": [0, 3, 2, 5, 8],
    "not from 0": [1, 2, 4, 5, 8],
    "not to the end": [0, 2, 4, 5, 7],
    "beyond the end": [0, 2, 4, 5, 9],
    "negative": [0, -2, 4, 5, 8],
    "far away": [0, 2**62, 4, 5, 8],
    "a bag over two keys": [0, 2, 5, 5, 8],
    "one too few": [0, 2, 4, 8],
    "one too many": [0, 2, 4, 5, 8, 8],
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("offsets", OFFSETS)
def test_offsets_that_do_not_cover_the_slots(impl: Impl, offsets: str) -> None:
    message = "offsets_B1 must go from 0 to the 8 slots and never fall"
    assert_refused(two_tables(), impl, message, offsets_B1=torch.tensor(OFFSETS[offsets]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("index", [[0, 2], [-1, 0]])
def test_inverse_outside_the_bags(impl: Impl, index: list[int]) -> None:
    call = two_tables()
    lookups = (replace(call.bags.lookups[0], inverse=0), call.bags.lookups[1])
    match = r"inverse_B: an index is outside \[0, 2\)"
    assert_refused(call, impl, match, lookups=Lookups(lookups), inverses=[torch.tensor(index)])


@built
@pytest.mark.parametrize("change", [{"bags": [2]}, {"bags": [3, 2]}, {"bags": [-1, 5]}, {"bags": [2, 2, 0]},
                                    {"bounds": [0, 8]}, {"bounds": [0, 9, 8]}, {"bounds": [0, 4, 9]},
                                    {"bounds": [-1, 4, 8]}, {"bounds": [0, -(2**63), 8]}])  # fmt: skip
def test_lengths_that_do_not_fit(change: dict[str, Any]) -> None:
    assert_refused(two_tables(), "cpp", "offsets_B1|bags|bounds", **change)


@built
@pytest.mark.parametrize("change", [{"weights_N": torch.ones(7)}, {"weights_N": torch.ones(8).double()},
                                    {"slots_N": torch.ones(8)}, {"slots_N": torch.ones(4, 2).long()},
                                    {"offsets_B1": torch.zeros(5, dtype=torch.int32)}])  # fmt: skip
def test_tensors_of_another_shape_or_dtype(change: dict[str, Any]) -> None:
    call = two_tables()
    with pytest.raises(ValueError, match=f"^{next(iter(change))}: expected"):
        embedding_bag.lookup(call.tables, replace(call.bags, **change), impl="cpp")


@built
@pytest.mark.parametrize("change", [{"table": 2}, {"table": -1}, {"key": 2}, {"key": -1}, {"inverse": 0}])
def test_features_of_what_is_not_there(change: dict[str, int]) -> None:
    call = two_tables()
    lookups = Lookups([call.bags.lookups[0], replace(call.bags.lookups[1], **change)])  # type: ignore[arg-type]
    assert_refused(call, "cpp", "feature 1 names a table, key, inverse or output that is not there", lookups=lookups)


@built
def test_a_processor_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="processor: abacus cannot run here"):
        torch.ops.sparrow.processor("abacus")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("change", [{"column": 2}, {"column": 0}, {"inverse": 0}, {"pooling": "none"}])
def test_outputs_that_do_not_fit_together(impl: Impl, change: dict[str, Any]) -> None:
    call = two_tables()
    lookups = (call.bags.lookups[0], replace(call.bags.lookups[1], **change))
    bags = replace(call.bags, lookups=Lookups(lookups), inverses=[torch.tensor([0, 1, 1])])
    with pytest.raises(ValueError, match="output 0: "):
        embedding_bag.lookup(call.tables, bags, impl=impl)


@built
def test_gradients_that_do_not_fit() -> None:
    call = two_tables()
    for grads in ([], [torch.ones(2, 8)], [torch.ones(3, 7)], [torch.ones(2, 7).double()], [torch.ones(2, 7)] * 2):
        with pytest.raises(ValueError, match=r"grads: expected"):
            embedding_bag.fused_update(call.tables, grads, call.bags, call.lr_T, impl="cpp")


@built
@pytest.mark.parametrize("rows", [[1, 1], [2, 1], [0, 9], [-1, 0], [1, 2**62]])
def test_rows_that_would_race_or_lie_outside(rows: list[int]) -> None:
    call = two_tables()
    before = call.copied().content()
    good, bad = (torch.tensor([0, 1]), torch.ones(2, 4)), (torch.tensor(rows), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"rows_U must ascend within \[0, 9\)"):
        embedding_bag.update_rows(call.tables, [bad, good], call.lr_T, impl="cpp")
    assert_same(call.content(), before, "a refused update")


@built
def test_rules_and_state_that_do_not_fit() -> None:
    class Unknown(sgd.Config):
        def cpp(self) -> tuple[str, dict[str, float]]:
            return "unknown", {}

    call = two_tables()
    weight_RD, touched_R = torch.ones(5, 2), torch.zeros(5, dtype=torch.uint8)
    state = {"sum": torch.zeros(5)}
    for message, level, rule, lr_T in (
        ("rule unknown has no C\\+\\+ row function; use impl='reference'", {}, Unknown(), torch.ones(1)),
        ("field 0 of the state", {"state": {}}, rowwise_adagrad.Config(), torch.ones(1)),
        ("field 0 of the state", {"state": {"sum": torch.zeros(4)}}, rowwise_adagrad.Config(), torch.ones(1)),
        ("state: expected", {"state": {"sum": torch.zeros(5, 1)}}, rowwise_adagrad.Config(), torch.ones(1)),
        ("state: expected", {"state": {"sum": torch.zeros(5).double()}}, rowwise_adagrad.Config(), torch.ones(1)),
        ("more state than", {"state": state}, sgd.Config(), torch.ones(1)),
        ("touched_R: expected 5 rows", {"touched_R": touched_R[:4]}, sgd.Config(), torch.ones(1)),
        ("touched_R: expected", {"touched_R": touched_R.bool()}, sgd.Config(), torch.ones(1)),
        ("weight_RD: expected", {"weight_RD": torch.ones(2, 5).t()}, sgd.Config(), torch.ones(1)),
        ("weight_RD: expected", {"weight_RD": weight_RD.double()}, sgd.Config(), torch.ones(1)),
        ("rules: expected", {}, sgd.Config(), torch.ones(2)),
        ("lr_T: expected", {}, sgd.Config(), torch.ones(1).double()),
    ):
        rows = Rows(**{"weight_RD": weight_RD, "touched_R": touched_R, **level})  # type: ignore[arg-type]
        tables = Tables([Table(levels=(rows,), rule=rule)])
        bags = embedding_bag.bags_of(call.bags.slots_N[:1], torch.tensor([0, 1]))
        for update in (
            lambda tables=tables, lr_T=lr_T: embedding_bag.update_rows(
                tables, [(torch.tensor([0]), torch.ones(1, 2))], lr_T, impl="cpp"
            ),
            lambda tables=tables, lr_T=lr_T, bags=bags: embedding_bag.fused_update(
                tables, [torch.ones(1, 2)], bags, lr_T, impl="cpp"
            ),
        ):
            with pytest.raises(ValueError, match=message):
                update()
    assert not touched_R.any()
    assert weight_RD.eq(1).all()


# -- the operators themselves ------------------------------------------------------------------------------------------


def raw(call: Call) -> dict[str, tuple[Any, ...]]:
    """Every operator's own arguments, as `cpp.py` gives them."""
    bags = (call.bags.slots_N, call.bags.offsets_B1, call.bags.weights_N, list(call.bags.inverses))
    numbers = (call.bags.bags, call.bags.bounds, call.bags.lookups.numbers)
    tables, (names, of_rules) = call.tables, call.tables.rules
    levels = (tables.weights, tables.state, tables.touched, tables.level_counts)
    found = embedding_bag.row_gradients(tables, call.grads, call.bags, impl="reference")
    return {
        "lookup": (tables.weights, tables.level_counts, *bags, *numbers),
        "row_gradients": (call.grads, tables.sizes, *bags, *numbers),
        "weight_gradients": (call.grads, tables.weights, tables.level_counts, *bags[:2], bags[3], *numbers),
        "update_rows": (*levels, [u for u, _ in found], [grad_UD for _, grad_UD in found], names, call.lr_T, of_rules),
        "fused_update": (*levels, call.grads, *bags, *numbers, names, call.lr_T, of_rules),
        "count_outside": (call.bags.slots_N, call.bags.bounds, [tables[0].rows] * len(call.bags.bags)),
    }


OPS = ["lookup", "row_gradients", "weight_gradients", "update_rows", "fused_update", "count_outside"]


@built
@pytest.mark.parametrize("op", OPS)
def test_torchs_own_checks(op: str) -> None:
    for shape in ("everything", "several tables"):
        call = build(SHAPES[shape], [3, 16, 5], RULES["adam, all"], levels=2, dtype=torch.int32)
        args = raw(call)[op]
        torch.library.opcheck(
            getattr(torch.ops.sparrow, op).default, args, test_utils=("test_schema", "test_faketensor")
        )


def mutants(value: Any) -> Iterator[Any]:
    """Values near an argument that mostly do not fit the others."""
    if isinstance(value, Tensor):
        yield from (value[:0], value[:-1], torch.cat([value, value]), value[None], value.double(), value.bool())
        yield from (value.new_full((), 1), value.flatten(), torch.stack([value, value], dim=-1)[..., 0])
        if value.numel() and not value.is_floating_point():
            yield from (value + bad for bad in (-1, 1, 2**31 - 1, 2**40 if value.dtype == torch.int64 else 7))
            yield value.flip(0)
    elif isinstance(value, list):
        yield from ([], value[:-1], value + value[-1:], value[::-1])
        for i, each in enumerate(value):
            bad: Iterator[Any] = (
                iter((-each, each - 1, each + 1, -(2**31), 2**62)) if isinstance(each, int) else mutants(each)
            )
            yield from ([*value[:i], x, *value[i + 1 :]] for x in bad)
    elif isinstance(value, str):
        yield from ("", "unknown", "adam", "sgd")


@built
@pytest.mark.parametrize("op", OPS)
def test_arguments_that_do_not_fit_never_crash(op: str, threads: Callable[[int], None]) -> None:
    threads(2)
    operator, refused, fences = getattr(torch.ops.sparrow, op), 0, []

    def fenced(tensor: Tensor) -> Tensor:
        fence = tensor.new_full((9, *tensor.shape[1:]), 7)
        fences.append(torch.cat([fence, tensor, fence]))
        return fences[-1][9:-9]

    for shape in ("everything", "several tables"):
        template = build(SHAPES[shape], [3, 16, 5], RULES["adam, all"], levels=2)
        for place, value in enumerate(raw(template)[op]):
            for bad in mutants(value):
                args, fences = list(raw(template)[op]), []
                for i in range(3 if op in ("update_rows", "fused_update") else 0):
                    args[i] = [fenced(tensor) for tensor in args[i]]
                args[place] = bad
                try:
                    operator(*args)
                except (ValueError, RuntimeError):
                    refused += 1
                assert all((wide[:9] == 7).all() and (wide[-9:] == 7).all() for wide in fences), (place, bad)
    assert refused > 20


@built
def test_compiles_without_a_graph_break() -> None:
    call = build(SHAPES["everything"], [3, 16, 5], RULES["sgd, plain"])
    args = raw(call)["lookup"]
    doubled = torch.compile(
        lambda *tensors: [out * 2 for out in torch.ops.sparrow.lookup(*tensors)], fullgraph=True, backend="aot_eager"
    )
    for out, expected in zip(doubled(*args), embedding_bag.lookup(call.tables, call.bags), strict=True):
        assert torch.equal(out, expected * 2)


# -- what once went wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_an_inverse_index_without_samples(impl: Impl) -> None:
    call = build(Shape(keys=([1, 1],), lookups=(look(inverse=0),), inverses=((0, 2),)), [3], RULES["sgd, plain"])
    assert_close(looked_up(call, impl), looked_up(call, "reference"), "no samples")
    assert_close(updated(call, impl), updated(call, "reference"), "no samples")


@pytest.mark.parametrize("impl", IMPLS)
def test_slots_of_a_key_without_bags(impl: Impl) -> None:
    changes: list[dict[str, Any]] = [{"bags": [0, 2], "offsets_B1": torch.tensor([4, 5, 8])},
                                     {"bags": [2, 0], "offsets_B1": torch.tensor([0, 2, 4])}]  # fmt: skip
    for change in changes:
        call = two_tables()
        grads = [torch.ones(change["bags"][0], 3), torch.ones(change["bags"][1], 4)]
        lookups = Lookups([call.bags.lookups[0], replace(call.bags.lookups[1], output=1, column=0)])
        assert_refused(replace(call, grads=grads), impl, "offsets_B1 must go from 0", lookups=lookups, **change)


@built
def test_bags_whose_sum_overflows() -> None:
    bags = [2**62, 2**62, 2**62, 2**62 - 10**9, 10**9 + 1]
    lookups = Lookups([look(key=4, inverse=0)])
    call = two_tables()
    assert_refused(replace(call, grads=[torch.ones(1, 3)]), "cpp", "bags", bags=bags, bounds=[0, 0, 0, 0, 0, 1],
                   slots_N=torch.zeros(1, dtype=torch.int64), offsets_B1=torch.tensor([0, 1]), weights_N=None,
                   lookups=lookups, inverses=[torch.zeros(1, dtype=torch.int64)])  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
def test_levels_without_rows(impl: Impl) -> None:
    rule = RULES["adam, plain"]
    for sizes in ((0, 4), (2, 0, 2), (4, 0), (0,)):
        levels = tuple(embedding_bag.tables_of(torch.ones(rows, 3), rule)[0].levels[0] for rows in sizes)
        bags = embedding_bag.bags_of(torch.arange(sum(sizes)), torch.tensor([0, sum(sizes)]))
        call = Call(Tables([Table(levels=levels, rule=rule)]), bags, [torch.ones(1, 3)], torch.ones(1))
        assert_close(updated(call, impl), updated(call, "reference"), str(sizes))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_first_feature_with_a_slot_outside_is_named(impl: Impl) -> None:
    shape = Shape(keys=([1], [1]), rows=(10, 5), lookups=(look(key=1), look(key=0), look(table=1, key=0)))
    call = build(shape, [3, 3], RULES["sgd, plain"])
    slots_N = call.bags.slots_N
    assert_refused(call, impl, r"^slot 7 at position 0 of feature 2 is outside \[0, 5\) of table 1$",
                   slots_N=torch.tensor([7, 1]), weights_N=None)  # fmt: skip
    slots_N[:] = torch.tensor([-1, -2])
    assert_refused(call, impl, r"^slot -2 at position 0 of feature 0 is outside \[0, 10\) of table 0$")


@pytest.mark.parametrize("impl", IMPLS)
def test_weights_that_several_features_use_have_all_their_gradients(impl: Impl) -> None:
    call = build(Shape(keys=([1, 2],), lookups=(look(), look("mean")), weighted=True), [3], RULES["sgd, plain"])
    each = [replace(call.bags, lookups=Lookups([replace(f, column=0)])) for f in call.bags.lookups]
    parts = [
        embedding_bag.weight_gradients(call.tables, [call.grads[0][:, i * 3 : i * 3 + 3]], bags, impl=impl)
        for i, bags in enumerate(each)
    ]
    grad_N = embedding_bag.weight_gradients(call.tables, call.grads, call.bags, impl=impl)
    torch.testing.assert_close(grad_N, parts[0] + parts[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_outputs_out_of_order(impl: Impl) -> None:
    call = build(Shape(keys=([1], [1]), lookups=(look(), look(key=1, output=1))), [3], RULES["sgd, plain"])
    for lookups in (Lookups(call.bags.lookups[::-1]), Lookups([call.bags.lookups[0], look(key=1, output=3)])):
        with pytest.raises(ValueError, match="output"):
            embedding_bag.lookup(call.tables, replace(call.bags, lookups=lookups), impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_unpooled_with_an_inverse_index(impl: Impl) -> None:
    lookups = Lookups([look("none", inverse=0)])
    call = build(Shape(keys=([2],)), [3], RULES["sgd, plain"])
    bags = replace(call.bags, lookups=lookups, inverses=[torch.tensor([0, 0])])
    with pytest.raises(ValueError, match="inverse"):
        embedding_bag.lookup(call.tables, bags, impl=impl)


@built
def test_state_of_the_other_orientation() -> None:
    call = two_tables("adagrad, plain")
    for level in call.tables.levels:
        level.state["sum"] = level.state["sum"].t().contiguous()
    with pytest.raises(ValueError, match="state"):
        embedding_bag.fused_update(call.tables, call.grads, call.bags, call.lr_T, impl="cpp")


@built
@pytest.mark.parametrize("sizes", [[2**33, 3], [-1, 3], [50, 3, 5]])
def test_row_gradients_of_impossible_sizes(sizes: list[int]) -> None:
    args = list(raw(build(Shape(keys=([1],)), [3], RULES["sgd, plain"]))["row_gradients"])
    args[1] = sizes
    with pytest.raises(ValueError, match="rows|sizes"):
        torch.ops.sparrow.row_gradients(*args)


@built
def test_half_a_feature() -> None:
    args = list(raw(build(Shape(keys=([1],)), [3], RULES["sgd, plain"]))["lookup"])
    args[-1] = args[-1][:5]
    with pytest.raises(ValueError, match="features"):
        torch.ops.sparrow.lookup(*args)
