"""What every operator refuses, before it writes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.kernels import Impl
from sparrow.kernels.embedding_bag import Lookups
from sparrow.kernels.formats import fp32, int4
from tests.kernels.embedding_bag.cases import (
    BIG,
    IMPLS,
    OPS,
    RULES,
    SHAPES,
    Shape,
    assert_refused,
    build,
    built,
    look,
    raw,
    two_tables,
)


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
def test_the_first_slot_outside_is_named_on_any_number_of_threads(
    impl: Impl, threads: Callable[[int], None]
) -> None:
    call = build(BIG["spread"], [16], RULES["sgd, plain"])
    call.bags.slots_N[[3000, 15_000, 22_999]] = torch.tensor([-3, -4, -5])
    for count in (1, 2, 3):
        threads(count)
        assert_refused(call, impl, "^slot -3 at position 3000 of feature 0 is outside")


@pytest.mark.parametrize("impl", IMPLS)
def test_the_first_feature_with_a_slot_outside_is_named(impl: Impl) -> None:
    shape = Shape(
        keys=([1], [1]), rows=(10, 5), lookups=(look(key=1), look(key=0), look(table=1, key=0))
    )
    call = build(shape, [3, 3], RULES["sgd, plain"])
    slots_N = call.bags.slots_N
    assert_refused(
        call,
        impl,
        r"^slot 7 at position 0 of feature 2 is outside \[0, 5\) of table 1$",
        slots_N=torch.tensor([7, 1]),
        weights_N=None,
    )
    slots_N[:] = torch.tensor([-1, -2])
    assert_refused(
        call, impl, r"^slot -2 at position 0 of feature 0 is outside \[0, 10\) of table 0$"
    )


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


@pytest.mark.parametrize("impl", IMPLS)
def test_slots_of_a_key_without_bags(impl: Impl) -> None:
    changes: list[dict[str, Any]] = [{"bags": [0, 2], "offsets_B1": torch.tensor([4, 5, 8])},
                                     {"bags": [2, 0], "offsets_B1": torch.tensor([0, 2, 4])}]  # fmt: skip
    for change in changes:
        call = two_tables()
        grads = [torch.ones(change["bags"][0], 3), torch.ones(change["bags"][1], 4)]
        lookups = Lookups([call.bags.lookups[0], replace(call.bags.lookups[1], output=1, column=0)])
        assert_refused(
            replace(call, grads=grads), impl, "offsets_B1 must go from 0", lookups=lookups, **change
        )


@built
def test_bags_whose_sum_overflows() -> None:
    bags = [2**62, 2**62, 2**62, 2**62 - 10**9, 10**9 + 1]
    lookups = Lookups([look(key=4, inverse=0)])
    call = two_tables()
    assert_refused(
        replace(call, grads=[torch.ones(1, 3)]),
        "cpp",
        "bags",
        bags=bags,
        bounds=[0, 0, 0, 0, 0, 1],
        slots_N=torch.zeros(1, dtype=torch.int64),
        offsets_B1=torch.tensor([0, 1]),
        weights_N=None,
        lookups=lookups,
        inverses=[torch.zeros(1, dtype=torch.int64)],
    )


@built
@pytest.mark.parametrize(
    "change", [{"table": 2}, {"table": -1}, {"key": 2}, {"key": -1}, {"inverse": 0}]
)
def test_features_of_what_is_not_there(change: dict[str, int]) -> None:
    call = two_tables()
    lookups = Lookups([call.bags.lookups[0], replace(call.bags.lookups[1], **change)])  # type: ignore[arg-type]
    assert_refused(
        call,
        "cpp",
        "feature 1 names a table, key, inverse or output that is not there",
        lookups=lookups,
    )


def mutants(value: Any) -> Iterator[Any]:
    """Values near an argument that mostly do not fit the others."""
    if isinstance(value, Tensor):
        yield from (
            value[:0],
            value[:-1],
            torch.cat([value, value]),
            value[None],
            value.double(),
            value.bool(),
        )
        yield from (
            value.new_full((), 1),
            value.flatten(),
            torch.stack([value, value], dim=-1)[..., 0],
        )
        if value.numel() and not value.is_floating_point():
            yield from (
                value + bad
                for bad in (-1, 1, 2**31 - 1, 2**40 if value.dtype == torch.int64 else 7)
            )
            yield value.flip(0)
    elif isinstance(value, list):
        yield from ([], value[:-1], value + value[-1:], value[::-1])
        for i, each in enumerate(value):
            bad: Iterator[Any] = (
                iter((-each, each - 1, each + 1, -(2**31), 2**62))
                if isinstance(each, int)
                else mutants(each)
            )
            yield from ([*value[:i], x, *value[i + 1 :]] for x in bad)
    elif isinstance(value, str):
        yield from ("", "unknown", "adam", "sgd", "fp16", "int8", "split_bf16")


@built
@pytest.mark.parametrize("op", OPS)
def test_arguments_that_do_not_fit_never_crash(op: str, threads: Callable[[int], None]) -> None:
    threads(2)
    operator, refused, fences = getattr(torch.ops.sparrow, op), 0, []

    def fenced(tensor: Tensor) -> Tensor:
        fence = tensor.new_full((9, *tensor.shape[1:]), 7)
        fences.append(torch.cat([fence, tensor, fence]))
        return fences[-1][9:-9]

    fp32_rows = {"format": fp32.Config()}
    narrow_rows = {"format": int4.Config(), "state": torch.bfloat16}
    for shape, rows in (
        ("everything", fp32_rows),
        ("several tables", fp32_rows),
        ("several tables", narrow_rows),
    ):
        template = build(SHAPES[shape], [3, 16, 5], RULES["adam, all"], levels=2, **rows)  # type: ignore[arg-type]
        for place, value in enumerate(raw(template)[op]):
            for bad in mutants(value):
                args, fences = list(raw(template)[op]), []
                # payload, state, touched
                for i in (0, 4, 5) if op in ("update_rows", "fused_update") else ():
                    args[i] = [fenced(tensor) for tensor in args[i]]
                args[place] = bad
                try:
                    operator(*args)
                except (ValueError, RuntimeError):
                    refused += 1
                assert all((wide[:9] == 7).all() and (wide[-9:] == 7).all() for wide in fences), (
                    place,
                    bad,
                )
    assert refused > 20
