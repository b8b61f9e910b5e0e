"""The Triton kernels do what the reference does when it sums in the same blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow import kernels
from sparrow.core import UserError
from sparrow.kernels import embedding_bag
from sparrow.kernels.embedding_bag import Rows, Tables, bags_of, reference
from sparrow.kernels.formats import fp32, int8
from sparrow.kernels.rules import adam, rowwise_adagrad, sgd
from tests.kernels.embedding_bag.cases import (
    DIMS,
    RULES,
    SHAPES,
    TRITON,
    TRITON_BLOCK,
    Call,
    Shape,
    assert_same,
    build,
    cell,
    interpreted,
    look,
    looked_up,
    updated,
)
from tests.kernels.embedding_bag.test_formats import FORMATS

on_triton = pytest.mark.parametrize("device", TRITON)
LONG = ("long bag", "many features of a table")  # for the interpreter
QUICK = [  # tests/kernels/formats/test_mx.py has MX rows that are rounded to nearest
    pytest.param(
        of, id=name, marks=pytest.mark.slow if name.startswith("mx") and "nearest" in name else ()
    )
    for name, of in FORMATS.items()
]
NORMS = ("clip_norm", "max_norm", "all")


def check(call: Call, device: str, what: str, *, exact: bool, block: int = TRITON_BLOCK) -> None:
    """exact: the rule adds nothing up over a row, so that rows have the reference's bits."""
    there = call.to(device)
    assert_same(looked_up(there, "triton"), looked_up(call, "reference", block=block), what)
    after, expected = updated(there, "triton", n=3), updated(call, "reference", n=3, block=block)
    assert_same(updated(there, "triton", n=3), after, f"{what}, again")
    assert_same(
        updated(there, "triton", n=torch.tensor(3), fused=False), after, f"{what}, not fused"
    )
    torch.testing.assert_close(
        after.pop("gradients of weights_N"), expected.pop("gradients of weights_N")
    )
    if exact:
        assert_same(after, expected, what)
    for name in expected:
        torch.testing.assert_close(
            after[name],
            expected[name],
            rtol=1e-6,
            atol=1e-6,
            msg=lambda m, name=name: f"{what}: {name}: {m}",
        )


def is_exact(rule: str) -> bool:
    return rule.startswith("sgd") and not rule.endswith(NORMS)


@on_triton
@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=pytest.mark.slow) if s in LONG else s for s in SHAPES]
)
def test_every_shape(shape: str, device: str) -> None:
    number = list(SHAPES).index(shape)
    rule = "sgd, plain" if number % 2 else list(RULES)[number * 2]
    call, what, _ = cell(shape, DIMS[number], rule)
    check(call, device, what, exact=is_exact(rule))


@pytest.mark.slow
@on_triton
@pytest.mark.parametrize("rule", RULES)
def test_every_pair_of_rule_dim_and_shape(rule: str, device: str) -> None:
    for i, dim in enumerate(DIMS):
        shape = list(SHAPES)[(i + list(RULES).index(rule)) % len(SHAPES)]
        if shape != "long bag" or rule == "adam, all":  # the interpreter takes a minute for it
            check(
                cell(shape, dim, rule)[0], device, cell(shape, dim, rule)[1], exact=is_exact(rule)
            )


@on_triton
@pytest.mark.parametrize("format", QUICK)
def test_every_format(format: Any, device: str) -> None:
    """SGD has the reference's bits; the rows of the second level, and of odd dims, among them."""
    shape = Shape(
        keys=([3, 0, 2, 4], [2] * 5),
        lookups=(look(), look("mean", table=1, key=1, output=1)),
        rows=(9, 7),
    )
    check(
        build(shape, [5, 12], sgd.Config(lr=0.1), format=format, levels=2),
        device,
        "two tables",
        exact=True,
    )


@on_triton
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.endswith("plain")])
def test_state_in_fewer_bits(rule: str, device: str) -> None:
    """What is rounded is the same to the last bit of fp32, so few numbers are rounded otherwise,
    and by one step.
    """
    call = build(Shape(keys=([2] * 100,), rows=(70,)), [24], RULES[rule], state=torch.bfloat16)
    found, expected = updated(call.to(device), "triton", n=7), updated(call, "reference", n=7)
    for name in expected:
        if name.startswith("state"):
            torch.testing.assert_close(found[name], expected[name], rtol=2**-7, atol=1e-6)
            assert (found[name] != expected[name]).double().mean() < 0.01, name
            assert found[name].dtype == torch.bfloat16


@on_triton
@pytest.mark.parametrize("dim", [3, pytest.param(64, marks=pytest.mark.slow)])
def test_a_row_in_most_lookups(dim: int, device: str) -> None:
    """Its blocks are summed apart, then in order; alone in its table, and between other rows."""
    for rows, hot in ((1, 0), (40, 17)):
        call = build(Shape(keys=([1] * 10_000,), rows=(rows,)), [dim], RULES["sgd, plain"])
        slots_N = call.bags.slots_N
        slots_N[torch.arange(10_000) % 50 != 0] = hot
        blocked, plain = (
            looked_up(call, "reference", block=TRITON_BLOCK),
            looked_up(call, "reference"),
        )
        assert not torch.equal(blocked["gradients of table 0"], plain["gradients of table 0"])
        torch.testing.assert_close(
            blocked["gradients of table 0"], plain["gradients of table 0"], rtol=1e-4, atol=1e-3
        )
        check(call, device, f"{rows} rows", exact=True)


@interpreted
@pytest.mark.parametrize("block", [1, 3])
def test_every_place_of_a_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments begin and end anywhere in the windows, of entries and of samples that share bags."""
    from sparrow.kernels.embedding_bag import triton

    monkeypatch.setattr(triton, "BLOCK", block)
    for shape in ("everything", "shared table"):
        call = build(SHAPES[shape], [3, 4, 3], RULES["sgd, plain"], seed=block)
        check(call, "cpu", shape, exact=True, block=block)
    g = torch.Generator().manual_seed(block)
    for _ in range(3):
        call = build(Shape(keys=([1] * 60,), rows=(40,)), [2], RULES["sgd, plain"])
        call.bags.slots_N.copy_(torch.randint(0, 40, (60,), generator=g) ** 2 // 40)
        check(call, "cpu", "random", exact=True, block=block)


@interpreted
@pytest.mark.parametrize(("tile", "programs"), [(16, 3), (512, 4096)])
def test_bits_do_not_depend_on_tiles_and_programs(
    tile: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a GPU too."""
    from sparrow.kernels.embedding_bag.gpu import entries, launch

    call = build(SHAPES["everything"], [5, 8, 5], RULES["rowwise_adam, all"], levels=2)
    expected = {**looked_up(call, "triton"), **updated(call, "triton")}
    monkeypatch.setattr(launch, "TILE", tile)
    monkeypatch.setattr(entries, "PROGRAMS", programs)
    call = call.copied()
    assert_same(
        {**looked_up(call, "triton"), **updated(call, "triton")}, expected, f"{tile} {programs}"
    )


@on_triton
def test_tables_of_many_kinds_in_one_call(device: str) -> None:
    """Dims, formats and rules differ; tables of a kind lie apart."""
    rules, dims = [sgd.Config(), rowwise_adagrad.Config(), adam.Config()], [8, 5, 8, 16, 5, 8, 1]
    shape = Shape(
        keys=tuple([k % 3] * 6 for k in range(1, 8)),
        rows=tuple(range(3, 10)),
        lookups=tuple(look("mean" if k % 2 else "sum", table=6 - k, key=k) for k in range(7)),
    )
    whole = build(shape, dims, sgd.Config())
    made = [
        build(shape, dims, rules[t % 3], format=int8.Config() if t == 3 else fp32.Config()).tables[
            t
        ]
        for t in range(7)
    ]
    check(replace(whole, tables=Tables(made)), device, "many kinds", exact=False)


@on_triton
def test_what_is_not_finite_stays_where_it_is(device: str) -> None:
    """In rows, in gradients and in weights: whoever does not look it up does not see it."""
    call = build(
        Shape(keys=([1, 2, 1, 3],), rows=(6,), weighted=True), [5], RULES["rowwise_adagrad, plain"]
    )
    call.bags.slots_N.copy_(torch.tensor([0, 1, 2, 3, 4, 5, 4]))
    call.tables[0].levels[0].payload["weight"][0, 2] = torch.nan
    call.grads[0][2, 1] = torch.inf
    assert call.bags.weights_N is not None
    call.bags.weights_N[4] = torch.nan
    out, expected = looked_up(call.to(device), "triton"), looked_up(call, "reference")
    for name in out:
        torch.testing.assert_close(out[name], expected[name], rtol=0, atol=0, equal_nan=True)
    found, expected = updated(call.to(device), "triton"), updated(call, "reference")
    for name in found:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-6, atol=1e-6, equal_nan=True
        )
    assert expected["touched  of table 0, level 0"].tolist() == [1] * 6


@on_triton
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_outside_are_left_out_where_nobody_waits(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they cannot be refused at once: they must read and write nothing, and the others go
    on.
    """
    monkeypatch.setattr(reference, "check", lambda *_: None)
    shape = Shape(
        keys=([3, 0, 2], [4, 4]),
        lookups=(look(inverse=0), look("none", table=1, key=1, output=1)),
        rows=(9, 5),
        inverses=((4, 3),),
    )
    good = build(shape, [5, 4], RULES["rowwise_adagrad, plain"], levels=2, dtype=dtype)
    slots_N = good.bags.slots_N.clone()
    worst = torch.iinfo(dtype).max
    slots_N[[1, 6, 9]] = torch.tensor([-1, worst, 5], dtype=dtype)
    inverse_B = good.bags.inverses[0].clone()
    inverse_B[2] = 3
    call = replace(good, bags=replace(good.bags, slots_N=slots_N, inverses=[inverse_B]))
    found = {**looked_up(call.to(device), "triton"), **updated(call.to(device), "triton")}

    out = embedding_bag.lookup(good.tables, good.bags, impl="reference")
    assert found["output 1"][[1, 4]].eq(0).all()
    assert torch.equal(found["output 1"][[0, 2, 3, 5, 6, 7]], out[1][[0, 2, 3, 5, 6, 7]])
    assert found["output 0"][2].eq(0).all()
    kept = {int(n) for n in slots_N[5:] if 0 <= int(n) < 5}
    assert found["rows of table 1"].tolist() == sorted(kept)
    touched = torch.cat([found[f"touched  of table 1, level {i}"] for i in range(2)])
    assert set(touched.nonzero()[:, 0].tolist()) == kept
    used = (
        torch.cat([found[f"touched  of table 0, level {i}"] for i in range(2)])
        .nonzero()[:, 0]
        .tolist()
    )
    assert set(used) == {int(slots_N[n]) for n in (0, 2, 3, 4)}
    assert all(tensor.isfinite().all() for tensor in found.values())


@on_triton
def test_offsets_that_do_not_fit_read_nothing_outside(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "check", lambda *_: None)
    for offsets in ([0, -5, 4, 9], [7, 3, 2**62, 0], [0, 0, 0, 0], [-(2**62), 2, 1, 2**40]):
        call = build(
            Shape(keys=([2, 2, 5],), lookups=(look("mean"),), rows=(9,), weighted=True),
            [3],
            adam.Config(),
        )
        call = replace(call, bags=replace(call.bags, offsets_B1=torch.tensor(offsets)))
        found = {**looked_up(call.to(device), "triton"), **updated(call.to(device), "triton")}
        assert all(tensor.isfinite().all() for tensor in found.values()), offsets


@on_triton
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_replace_rows(state: torch.dtype, device: str) -> None:
    """Rows in fewer bits enter frames; those that were updated there leave with the number of their
    last update.
    """
    call = build(
        Shape(keys=([1],), rows=(16,)),
        [7],
        adam.Config(),
        levels=2,
        format=int8.Config(),
        state=state,
    )
    (table,) = call.tables
    frames, beneath = table.levels
    values_FD = frames.format.decode(frames.payload, table.dim) * 1.01
    changed_F = torch.tensor([4, 0, 9, 2])
    frames = Rows(
        format=fp32.Config(),
        payload={"weight": values_FD},
        touched_R=torch.tensor([1, 0, 1, 1]).byte(),
        state={name: tensor.float() for name, tensor in frames.state.items()},
        changed_R=changed_F.int(),
    )
    call = replace(call, tables=Tables([replace(table, levels=(frames, beneath))]))
    frames_L, rows_L, old_L = (
        torch.tensor([1, 2, 3]),
        torch.tensor([0, 5, 8]),
        torch.tensor([3, 7, -1]),
    )
    found = []
    for impl, where in (("triton", device), ("reference", "cpu")):
        mine = call.copied().to(where)
        moves = [moved.to(where) for moved in (frames_L, rows_L, old_L)]
        embedding_bag.replace_rows(mine.tables, *moves, impl=impl)  # type: ignore[arg-type]
        changed = {"changed": mine.tables[0].levels[0].changed_R}
        found.append({name: tensor.cpu() for name, tensor in {**mine.content(), **changed}.items()})
    assert_same(found[0], found[1], "replaced")
    assert found[0]["changed"].tolist() == [4, 0, 0, 0]


@on_triton
def test_the_number_of_an_update_may_be_on_the_device(device: str) -> None:
    """And so may learning rates: a captured graph reads them again."""
    call = build(Shape(keys=([2] * 9,), rows=(7,)), [6], sgd.Config(), format=int8.Config()).to(
        device
    )
    n, lr_T = torch.zeros((), dtype=torch.int64, device=device), torch.ones(1, device=device)
    for number, lr in ((1, 0.5), (2, 0.25)):
        n.fill_(number)
        lr_T.fill_(lr)
        found = updated(replace(call, lr_T=lr_T), "triton", n=n)
        expected = updated(replace(call.to("cpu"), lr_T=torch.tensor([lr])), "reference", n=number)
        assert_same({"weight": found["weight weight of table 0, level 0"]},
                    {"weight": expected["weight weight of table 0, level 0"]}, f"update {number}")  # fmt: skip


@interpreted
def test_a_table_without_features() -> None:
    tables = build(Shape(keys=([2],), rows=(5, 4)), [3, 3], sgd.Config()).tables
    bags, grads = bags_of(torch.tensor([1, 2]), torch.tensor([0, 2])), [torch.ones(1, 3)]
    found = embedding_bag.row_gradients(tables, grads, bags, impl="triton")
    assert [tuple(grad_UD.shape) for _, grad_UD in found] == [(2, 3), (0, 3)]
    before: Tensor = tables[1].levels[0].payload["weight"].clone()
    embedding_bag.fused_update(tables, grads, bags, torch.ones(2), impl="triton")
    assert torch.equal(tables[1].levels[0].payload["weight"], before)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_for_gpus(capability: str) -> None:
    """As far as a machine without one can tell: to machine code."""
    place = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.embedding_bag.compile_for_gpus", capability]
    done = subprocess.run(
        command, env=place, capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 40


@interpreted
def test_rules_without_triton() -> None:
    class UnknownRule(sgd.Config):
        def cpp(self) -> tuple[str, dict[str, float]]:
            return "unknown", {}

    call = build(SHAPES["sum"], [3], UnknownRule())
    with pytest.raises(
        UserError, match="rule unknown has no Triton row function; use impl='reference'"
    ):
        updated(call, "triton")


class Unknown(fp32.Config):
    """A format that has a codec elsewhere."""

    def cpp(self) -> str:
        """Its name there."""
        return "unknown"


@interpreted
def test_a_format_without_triton_runs_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody asks for Triton."""
    call = build(
        SHAPES["everything"], [40, 3, 64], rowwise_adagrad.Config(lr=0.1), format=Unknown()
    )
    with pytest.raises(
        UserError, match="row format unknown has no Triton codec; use impl=.reference."
    ):
        looked_up(call, "triton")
    expected = looked_up(call, "reference"), updated(call, "reference")
    monkeypatch.setattr(kernels, "resolve", lambda *_, **__: "triton")
    outputs = {
        name: out for name, out in looked_up(call, "auto").items() if name.startswith("output")
    }
    assert_same(outputs, {name: expected[0][name] for name in outputs}, "lookup")
    assert_same(updated(call, "auto"), expected[1], "update")
