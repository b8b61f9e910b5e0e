"""Rows of every format through every operator: both kernels do what the formats say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.core.config import Family
from sparrow.kernels import embedding_bag
from sparrow.kernels.embedding_bag import Rows, Tables, bags_of
from sparrow.kernels.formats import RowFormat, fp32, int4, int8
from sparrow.kernels.rules import adam, rowwise_adagrad, sgd
from tests.kernels.embedding_bag.cases import (
    DIMS,
    IMPLS,
    RULES,
    SHAPES,
    Shape,
    assert_same,
    build,
    built,
    interpreted,
    looked_up,
    updated,
)
from tests.kernels.formats.test_mx import left

FAMILY = Family("sparrow.kernels.formats")


def every_format() -> dict[str, RowFormat]:
    found = {}
    for name in FAMILY.names():
        config: Any = FAMILY.config(name)
        found[name] = config()
        if config().rounding == "stochastic":
            found[f"{name}, nearest"] = config(rounding="nearest")
    return found


FORMATS = every_format()
# of rows of normal numbers
STEPS = {"fp16": 2**-9, "bf16": 2**-6, "split_bf16": 2**-6, "int8": 0.05, "int4": 0.8}
STEPS |= {"mxint8": 0.07, "mxfp8": 0.5, "mxfp6": 0.5, "mxfp4": 2.0}
FAST = [  # test_triton.py has the quick tests of the latter
    pytest.param("cpp", marks=built),
    pytest.param("triton", marks=[interpreted, pytest.mark.slow]),
]
each_fast = pytest.mark.parametrize("impl", FAST)
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))


@each_fast
@each_format
@pytest.mark.parametrize(
    "dim",
    [
        (
            dim
            if dim in (1, 2, 5, 8, 17, 33, 64, 129, 256)
            else pytest.param(dim, marks=pytest.mark.slow)
        )
        for dim in DIMS
    ],
)
def test_every_dim(dim: int, format: RowFormat, impl: Any) -> None:
    call = build(SHAPES["everything"], [dim] * 3, sgd.Config(lr=0.1), format=format, levels=2)
    assert_same(looked_up(call, impl), looked_up(call, "reference"), f"dim {dim}")
    for fused in (True, False):
        found, expected = updated(call, impl, fused=fused), updated(call, "reference", fused=fused)
        torch.testing.assert_close(
            found.pop("gradients of weights_N"), expected.pop("gradients of weights_N")
        )
        assert_same(found, expected, f"dim {dim}")


@each_fast
@each_format
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape: str, format: RowFormat, impl: Any) -> None:
    call = build(SHAPES[shape], [6, 20, 5], sgd.Config(lr=0.1), format=format)
    assert_same(looked_up(call, impl), looked_up(call, "reference"), shape)


@pytest.mark.parametrize("impl", IMPLS)
def test_state_of_no_row(impl: Any) -> None:
    """As of a table that a batch does not use."""
    call = build(SHAPES["empty batch"], [6], adam.Config(), state=torch.bfloat16)
    before = call.copied().content()
    assert_same(
        {k: v for k, v in updated(call, impl).items() if k in before},
        before,
        "nothing was looked up",
    )


@each_fast
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rule",
    [
        rule if rule.endswith(("plain", "all")) else pytest.param(rule, marks=pytest.mark.slow)
        for rule in RULES
    ],
)
@each_format
def test_every_rule(format: RowFormat, rule: str, state: torch.dtype, impl: Any) -> None:
    """The kernels differ in the last bit before they round, so that a number in some thousands is
    rounded otherwise.
    """
    call = build(
        Shape(keys=([2] * 300,), rows=(200,)), [24], RULES[rule], format=format, state=state
    )
    found, expected = (updated(call, which) for which in (impl, "reference"))
    step = STEPS.get(format.cpp() or "", 1e-5)
    for t, table in enumerate(call.tables):
        for values in (found, expected):
            for field in table.levels[0].payload:
                table.levels[0].payload[field].copy_(
                    values[f"weight {field} of table {t}, level 0"]
                )
            values["decoded"] = format.exact(table.levels[0].payload, table.dim)
    apart = (found["decoded"] - expected["decoded"]).abs()
    assert apart.max() <= step and (apart > 1e-4).double().mean() < 0.02
    for name in expected:
        if name.startswith("state"):
            torch.testing.assert_close(
                found[name],
                expected[name],
                rtol=2**-7 if state == torch.bfloat16 else 2e-5,
                atol=1e-6,
            )
        if name.startswith("touched"):
            assert torch.equal(found[name], expected[name])


@built
@each_format
@pytest.mark.parametrize("processor", ["avx2", "portable"])
def test_every_processor(processor: str, format: RowFormat) -> None:
    from sparrow.kernels.embedding_bag import cpp

    calls = [
        build(SHAPES["everything"], [dim] * 3, rule, format=format, state=state)
        for dim in (1, 5, 16, 31, 130)
        for rule in (rowwise_adagrad.Config(), adam.Config())
        for state in (torch.float32, torch.bfloat16)
    ]
    best = [(looked_up(call, "cpp"), updated(call, "cpp")) for call in calls]
    try:
        cpp.processor(processor)
    except ValueError:
        pytest.skip(f"no {processor} here")
    try:
        for call, (out, after) in zip(calls, best, strict=True):
            assert_same(looked_up(call, "cpp"), out, processor)
            assert_same(updated(call, "cpp"), after, processor)
    finally:
        cpp.processor("best")


@each_format
@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_that_does_not_learn_keeps_its_bytes(impl: Any, format: RowFormat) -> None:
    call = build(Shape(keys=([1] * 4,), rows=(4,)), [9], sgd.Config(lr=0.1), format=format)
    grad_UD = torch.full((4, 9), 50.0)  # far enough for every format
    grad_UD[1, 3], grad_UD[2, 0] = torch.nan, 1e30
    before = call.copied().content()
    rows_U = torch.arange(4)
    embedding_bag.update_rows(call.tables, [(rows_U, grad_UD)], call.lr_T, 3, impl=impl)
    after = call.content()
    for name in after:
        if name.startswith("weight"):
            assert torch.equal(after[name][1:3], before[name][1:3])
            assert (
                not torch.equal(after[name][0], before[name][0]) or "weight" not in name.split()[1]
            )
        if name.startswith("touched"):
            assert after[name].tolist() == [1, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of numpy, with which Triton is interpreted
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("format", [int8.Config(), int8.Config(rounding="nearest"), int4.Config()])
def test_a_row_with_a_nan_reads_as_nan(impl: Any, format: RowFormat) -> None:
    """Wherever it is in the row, where no comparison is true of it. Rows beside it have the
    reference's bytes.
    """
    for dim in (1, 5, 16, 20, 33):
        values_RD = torch.randn(2 * dim, dim, generator=torch.Generator().manual_seed(dim))
        values_RD[torch.arange(dim), torch.arange(dim)] = torch.nan
        bytes_RB, expected = left(format, values_RD, impl), left(format, values_RD, "reference")
        read_RD = format.decode({"weight": bytes_RB}, dim)
        assert read_RD[:dim].isnan().all() and read_RD[dim:].isfinite().all(), dim
        assert torch.equal(bytes_RB[dim:], expected[dim:])


@pytest.mark.parametrize("impl", IMPLS)
def test_split_bf16_trains_as_fp32(impl: Any) -> None:
    """For equal gradients; what is looked up is the truncated half."""
    whole = build(SHAPES["several tables"], [16, 5, 40], rowwise_adagrad.Config(lr=0.1))
    split = replace(
        whole,
        tables=build(
            SHAPES["several tables"],
            [16, 5, 40],
            rowwise_adagrad.Config(lr=0.1),
            format=FORMATS["split_bf16"],
        ).tables,
    )
    for n in range(3):
        for call in (whole, split):
            embedding_bag.fused_update(call.tables, call.grads, call.bags, call.lr_T, n, impl=impl)
    for one, other in zip(whole.tables, split.tables, strict=True):
        level = other.levels[0]
        exact_RD = one.levels[0].payload["weight"]
        assert torch.equal(level.format.exact(level.payload, other.dim), exact_RD)
        high_RD = (exact_RD.view(torch.int32) & ~0xFFFF).view(torch.float32)
        assert torch.equal(level.format.decode(level.payload, other.dim), high_RD)
        bags = bags_of(torch.arange(other.rows), torch.arange(other.rows + 1))
        assert torch.equal(embedding_bag.lookup(Tables([other]), bags, impl=impl)[0], high_RD)


@built
@each_format
def test_bits_depend_on_update_table_row_and_column_alone(format: RowFormat) -> None:
    """A part of a table, cut by rows, is updated as the whole is; another update has other bits."""
    call = build(Shape(keys=([1] * 40,), rows=(40,)), [24], sgd.Config(lr=0.1), format=format)
    whole = call.tables[0]
    grad_UD = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
    found = []
    for n in (5, 5, 6):
        tables = call.copied().tables
        embedding_bag.update_rows(tables, [(torch.arange(40), grad_UD)], call.lr_T, n)
        found.append(tables[0].levels[0].payload["weight"])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]) == (format.rounding == "nearest")
    level = call.copied().tables[0].levels[0]
    part = replace(
        level,
        payload={name: t[10:25] for name, t in level.payload.items()},
        touched_R=level.touched_R[10:25],
    )
    table = replace(whole, levels=(part,), rows=15, place=(whole.place[0] + 10, whole.place[1]))
    embedding_bag.update_rows(Tables([table]), [(torch.arange(15), grad_UD[10:25])], call.lr_T, 5)
    assert torch.equal(part.payload["weight"], found[0][10:25])


@pytest.mark.parametrize("impl", IMPLS)
def test_columns_have_numbers_of_their_own(impl: Any) -> None:
    """A part that is cut by columns takes those of its columns."""
    for name in ("fp16", "bf16", "mxfp8", "mxfp6", "mxfp4"):
        format = FORMATS[name]
        call = build(Shape(keys=([1] * 40,), rows=(40,)), [72], sgd.Config(lr=0.1), format=format)
        whole, level = call.tables[0], call.copied().tables[0].levels[0]
        grad_UD, field = (
            torch.randn(40, 72, generator=torch.Generator().manual_seed(1)),
            format.fields(72)["weight"],
        )
        cut = slice(32, 72)
        part = replace(
            level, payload={"weight": field.part(level.payload["weight"], cut, 72).contiguous()}
        )
        table = replace(whole, levels=(part,), dim=40, place=(whole.place[0], whole.place[1] + 32))
        embedding_bag.update_rows(
            Tables([table]), [(torch.arange(40), grad_UD[:, cut])], call.lr_T, 5, impl=impl
        )
        embedding_bag.update_rows(
            call.tables, [(torch.arange(40), grad_UD)], call.lr_T, 5, impl=impl
        )
        assert torch.equal(
            part.payload["weight"], field.part(whole.levels[0].payload["weight"], cut, 72)
        )


@built
def test_wrong_rows_are_refused() -> None:
    call = build(SHAPES["sum"], [16], sgd.Config(), format=FORMATS["int8"])
    table = call.tables[0]
    level = replace(
        table.levels[0], payload={"weight": table.levels[0].payload["weight"][:, :20].contiguous()}
    )
    with pytest.raises(ValueError, match="rows of 20 entries, expected 24 for 16 columns"):
        embedding_bag.lookup(Tables([replace(table, levels=(level,))]), call.bags, impl="cpp")
    level = replace(table.levels[0], format=fp32.Config())
    with pytest.raises(ValueError, match="weight_RD: expected a contiguous tensor"):
        embedding_bag.lookup(Tables([replace(table, levels=(level,))]), call.bags, impl="cpp")


@built
@each_format
@pytest.mark.parametrize("dim", [1, 5, 16, 31, 64])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_rows_that_enter_and_leave_frames(state: torch.dtype, dim: int, format: RowFormat) -> None:
    """A row that leaves is rounded with the number of its own last update; a clean one is not
    written.
    """
    for rule in (rowwise_adagrad.Config(), adam.Config()):
        call = build(Shape(keys=([1] * 40,), rows=(200,)), [dim], rule, format=format, state=state)
        (table,) = call.tables
        random = torch.Generator().manual_seed(5)
        frames = Rows(
            format=fp32.Config(),
            payload={"weight": torch.randn(64, dim, generator=random)},
            state={
                n: torch.rand(64, *t.shape[1:], generator=random)
                for n, t in table.levels[0].state.items()
            },
            touched_R=torch.randint(0, 2, (64,), dtype=torch.uint8, generator=random),
            changed_R=torch.randint(0, 4, (64,), dtype=torch.int32, generator=random),
        )
        frames_L, rows_L = (
            torch.randperm(64, generator=random)[:40],
            torch.randperm(200, generator=random)[:40],
        )
        others = torch.tensor(sorted(set(range(200)) - set(rows_L.tolist())))
        old_L = torch.where(
            torch.arange(40) % 5 > 0, others[torch.randperm(160, generator=random)[:40]], -1
        )
        found = []
        for impl in ("cpp", "reference"):
            levels = tuple(copied(level) for level in (frames, *table.levels))
            made = Tables([replace(table, levels=levels)])
            embedding_bag.replace_rows(made, frames_L, rows_L, old_L, impl=impl)  # type: ignore[arg-type]
            found.append(levels)
        for mine, its, before in zip(*found, (frames, *table.levels), strict=True):
            for name, tensor in all_of(mine).items():
                assert torch.equal(tensor, all_of(its)[name]), (name, rule)
            assert not torch.equal(mine.touched_R, before.touched_R)
        clean_R = old_L[(old_L >= 0) & (frames.changed_R[frames_L] == 0)]  # type: ignore[index]
        assert len(clean_R)
        for name, tensor in found[0][1].payload.items():
            assert torch.equal(tensor[clean_R], table.levels[0].payload[name][clean_R])


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@each_format
def test_bits_do_not_depend_on_where_a_row_lies(
    format: RowFormat, state: torch.dtype, impl: Any
) -> None:
    """Rows in any order, which say their numbers, learn what rows in order do. So do rows that
    leave frames.
    """
    call = build(
        Shape(keys=([3] * 20,), rows=(40,)), [19], adam.Config(lr=0.1), format=format, state=state
    )
    (table,), random = call.tables, torch.Generator().manual_seed(2)
    table, order_R = replace(table, place=(1000, 3)), torch.randperm(40, generator=random)
    mixed = replace(taken(table.levels[0], order_R), rows_R=order_R.int())
    frames = Rows(
        format=fp32.Config(),
        payload={"weight": torch.randn(8, 19, generator=random)},
        state={
            n: torch.rand(8, *t.shape[1:], generator=random)
            for n, t in table.levels[0].state.items()
        },
        touched_R=torch.ones(8, dtype=torch.uint8),
        changed_R=torch.full((8,), 3, dtype=torch.int32),
    )
    found = []
    for level, places_R in ((table.levels[0], torch.arange(40)), (mixed, order_R.argsort())):
        made = [copied(level), copied(level)]
        one = Tables([replace(table, levels=(made[0],))])
        two = Tables([replace(table, levels=(copied(frames), made[1]))])
        bags = replace(call.bags, slots_N=places_R[call.bags.slots_N.long()])
        embedding_bag.fused_update(one, call.grads, bags, call.lr_T, 5, impl=impl)
        slots_U, grad_UD = places_R[7:11].sort()[0], torch.ones(4, 19)
        embedding_bag.update_rows(one, [(slots_U, grad_UD)], call.lr_T, 6, impl=impl)
        embedding_bag.replace_rows(two, torch.arange(4), places_R[20:24], places_R[:4], impl=impl)
        found.append([taken(of, places_R) for of in made])
    for mine, its in zip(*found, strict=True):
        for name, tensor in all_of(mine).items():
            assert torch.equal(tensor, all_of(its)[name]), name


def taken(level: Rows, at_U: Tensor) -> Rows:
    payload, state = ({n: t[at_U] for n, t in of.items()} for of in (level.payload, level.state))
    return Rows(format=level.format, payload=payload, state=state, touched_R=level.touched_R[at_U])


def all_of(level: Rows) -> dict[str, Tensor]:
    found = {**level.payload, **level.state, "touched": level.touched_R}
    return found if level.changed_R is None else {**found, "changed": level.changed_R}


def copied(level: Rows) -> Rows:
    own = {
        name: {n: t.clone() for n, t in getattr(level, name).items()}
        for name in ("payload", "state")
    }
    changed_R = None if level.changed_R is None else level.changed_R.clone()
    return replace(level, **own, touched_R=level.touched_R.clone(), changed_R=changed_R)
