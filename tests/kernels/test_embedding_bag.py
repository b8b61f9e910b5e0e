from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparrow.kernels import embedding_bag, missing
from sparrow.kernels.rules import RowRule, rowwise_adagrad, sgd

built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
IMPLS = ["reference", pytest.param("cpp", marks=built)]
RULES = {"sgd": sgd.Config(lr=0.3), "rowwise_adagrad": rowwise_adagrad.Config(lr=0.3, initial=0.1)}


@dataclass
class Case:
    """Arguments of the operators, from a seed."""

    weight_RD: Tensor
    slots_N: Tensor
    offsets_B1: Tensor
    weights_N: Tensor | None
    scale_B: Tensor | None
    grad_BD: Tensor

    @property
    def bags(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.slots_N, self.offsets_B1, self.weights_N, self.scale_B


# rows, lengths of the bags
SHAPES: dict[str, tuple[int, list[int]]] = {
    "empty batch": (7, []),
    "empty bags": (7, [0, 0, 0]),
    "some empty bags": (5, [0, 3, 0, 0, 2, 1, 0]),
    "one bag": (11, [37]),
    "one row": (1, [2, 0, 5]),
    "many duplicates": (3, [5] * 60),
    "unpooled": (50, [1] * 33),
    "odd": (4099, [i % 13 for i in range(307)]),
}


def make(shape: str, dim: int, *, dtype: torch.dtype = torch.int64, weights: bool = True, scale: bool = True) -> Case:
    rows, lengths = SHAPES[shape]
    return case_of(rows, torch.tensor(lengths, dtype=torch.int64), dim, dtype=dtype, weights=weights, scale=scale)


def case_of(
    rows: int,
    lengths_B: Tensor,
    dim: int,
    *,
    dtype: torch.dtype = torch.int64,
    weights: bool = True,
    scale: bool = True,
) -> Case:
    g = torch.Generator().manual_seed(rows * 1000 + dim)
    count, bags = int(lengths_B.sum()), lengths_B.numel()
    return Case(
        weight_RD=torch.randn(rows, dim, generator=g),
        slots_N=torch.randint(0, rows, (count,), generator=g, dtype=dtype),
        offsets_B1=torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)]),
        weights_N=torch.randn(count, generator=g) if weights else None,
        scale_B=torch.rand(bags, generator=g) if scale else None,
        grad_BD=torch.randn(bags, dim, generator=g),
    )


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """What aten leaves uninitialised, for C++ too, is NaN (or the largest integer), so that reading it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_uninitialised_memory_is_poisoned() -> None:
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.ops.aten.empty.memory_format([64], device="cpu").isnan().all()


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        for dim in (1, 3, 16, 64, 129):
            yield make(shape, dim)
    for dim in (3, 16):
        for weights, scale in ((False, False), (True, False), (False, True)):
            yield make("odd", dim, dtype=torch.int32, weights=weights, scale=scale)


def updated(case: Case, rule: RowRule, impl: str, *, fused: bool = True) -> dict[str, Tensor]:
    """Every field of the table after one update."""
    weight_RD = case.weight_RD.clone()
    rows, dim = weight_RD.shape
    state, touched_R = rule.init_state(rows, dim), torch.zeros(rows, dtype=torch.uint8)
    lr = torch.tensor(rule.lr)
    if fused:
        embedding_bag.fused_update(weight_RD, state, touched_R, case.grad_BD, *case.bags, rule, lr, impl=impl)  # type: ignore[arg-type]
    else:
        found = embedding_bag.row_gradients(case.grad_BD, *case.bags, num_rows=rows, impl=impl)  # type: ignore[arg-type]
        embedding_bag.update_rows(weight_RD, state, touched_R, *found, rule, lr, impl=impl)  # type: ignore[arg-type]
    return {"weight": weight_RD, "touched": touched_R, **state}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


# -- the reference against torch and by hand -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_torch_embedding_bag(shape: str) -> None:
    case = make(shape, 5)
    assert case.weights_N is not None
    assert case.scale_B is not None
    weight_RD, weights_N = case.weight_RD.requires_grad_(), case.weights_N.requires_grad_()
    expected_BD = F.embedding_bag(
        case.slots_N, weight_RD, case.offsets_B1, mode="sum", per_sample_weights=weights_N, include_last_offset=True
    )
    expected_BD = expected_BD * case.scale_B[:, None]
    expected_BD.backward(case.grad_BD)
    with torch.no_grad():
        out_BD = embedding_bag.lookup(weight_RD, *case.bags, impl="reference")
        rows_U, grad_UD = embedding_bag.row_gradients(
            case.grad_BD, *case.bags, num_rows=len(weight_RD), impl="reference"
        )
        grad_N = embedding_bag.weight_gradients(
            case.grad_BD, weight_RD, case.slots_N, case.offsets_B1, case.scale_B, impl="reference"
        )
    torch.testing.assert_close(out_BD, expected_BD.detach())
    torch.testing.assert_close(grad_N, weights_N.grad)
    assert rows_U.tolist() == sorted(set(case.slots_N.tolist()))
    assert weight_RD.grad is not None
    torch.testing.assert_close(torch.zeros_like(weight_RD).index_copy_(0, rows_U, grad_UD), weight_RD.grad)


@pytest.mark.parametrize("impl", IMPLS)
def test_mean_and_unpooled_follow_from_scale_and_offsets(impl: str) -> None:
    weight_RD = torch.randn(9, 4)
    slots_N, lengths_B = torch.tensor([3, 3, 8, 0, 1]), torch.tensor([3, 0, 2])
    offsets_B1 = torch.tensor([0, 3, 3, 5])
    mean_BD = embedding_bag.lookup(weight_RD, slots_N, offsets_B1, None, 1 / lengths_B.clamp(min=1), impl=impl)  # type: ignore[arg-type]
    expected_BD = F.embedding_bag(slots_N, weight_RD, offsets_B1, mode="mean", include_last_offset=True)
    torch.testing.assert_close(mean_BD, expected_BD)
    unpooled_ND = embedding_bag.lookup(weight_RD, slots_N, torch.arange(6), impl=impl)  # type: ignore[arg-type]
    assert torch.equal(unpooled_ND, weight_RD[slots_N])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("fused", [True, False])
def test_adagrad_sees_each_row_once_with_its_whole_gradient(impl: str, fused: bool) -> None:
    # row 1 occurs three times, its gradient is (1, 2) + 3 (1, 0) - (0, 4) = (4, -2): the mean square is 10 (the
    # square of the mean is 1); one rule call per duplicate would end with sum 2.5 + 4.5 + 8 = 15
    case = Case(
        weight_RD=torch.zeros(3, 2),
        slots_N=torch.tensor([1, 2, 1, 1]),
        offsets_B1=torch.tensor([0, 1, 3, 4]),
        weights_N=torch.tensor([1.0, 0.5, 3.0, -1.0]),
        scale_B=None,
        grad_BD=torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 4.0]]),
    )
    after = updated(case, rowwise_adagrad.Config(lr=0.5, eps=1.0), impl, fused=fused)
    rate = 0.5 / (10**0.5 + 1)
    other = 0.5 / (0.125**0.5 + 1)
    expected = torch.tensor([[0.0, 0.0], [-4 * rate, 2 * rate], [-0.5 * other, 0.0]])
    torch.testing.assert_close(after["sum"], torch.tensor([0.0, 10.0, 0.125]))
    torch.testing.assert_close(after["weight"], expected)
    assert after["touched"].tolist() == [0, 1, 1]


# -- every implementation against the reference --------------------------------------------------------------------


@built
def test_lookup_has_the_references_bits() -> None:
    for case in cases():
        out_BD = embedding_bag.lookup(case.weight_RD, *case.bags, impl="cpp")
        assert torch.equal(out_BD, embedding_bag.lookup(case.weight_RD, *case.bags, impl="reference"))
        assert out_BD.isfinite().all()


@built
def test_row_gradients_have_the_references_bits() -> None:
    for case in cases():
        num_rows = len(case.weight_RD)
        found = embedding_bag.row_gradients(case.grad_BD, *case.bags, num_rows=num_rows, impl="cpp")
        expected = embedding_bag.row_gradients(case.grad_BD, *case.bags, num_rows=num_rows, impl="reference")
        assert found[0].dtype == torch.int64
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@built
def test_weight_gradients() -> None:
    for case in cases():
        args = (case.grad_BD, case.weight_RD, case.slots_N, case.offsets_B1, case.scale_B)
        expected_N = embedding_bag.weight_gradients(*args, impl="reference")
        torch.testing.assert_close(embedding_bag.weight_gradients(*args, impl="cpp"), expected_N, rtol=1e-5, atol=2e-5)


@built
@pytest.mark.parametrize("rule", RULES)
def test_updates(rule: str) -> None:
    for case in cases():
        expected = updated(case, RULES[rule], "reference")
        for fused in (True, False):
            after = updated(case, RULES[rule], "cpp", fused=fused)
            torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(after["touched"], expected["touched"])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rule", RULES)
def test_untouched_rows_keep_their_bits(impl: str, rule: str) -> None:
    case = make("some empty bags", 3)
    case.slots_N = torch.tensor([4, 0, 4, 4, 0, 0])
    after = updated(case, RULES[rule], impl)
    assert after["touched"].tolist() == [1, 0, 0, 0, 1]
    assert torch.equal(after["weight"][1:4], case.weight_RD[1:4])
    assert (after["weight"][[0, 4]] != case.weight_RD[[0, 4]]).all()
    for name, before_R in RULES[rule].init_state(5, 3).items():
        assert torch.equal(after[name][1:4], before_R[1:4])


@built
@pytest.mark.parametrize("skew", ["spread", "one row"])
def test_many_lookups_have_the_same_bits_on_one_thread_and_on_two(threads: Callable[[int], None], skew: str) -> None:
    lengths_B = torch.tensor([400, 0, 3, 57] * 435)
    case = case_of(70_001, lengths_B, 16)
    assert case.slots_N.numel() >= 200_000
    if skew == "one row":
        case.slots_N.fill_(70_000)
    expected: list[dict[str, Tensor]] = []
    for count in (1, 2, 3):
        threads(count)
        rows_U, grad_UD = embedding_bag.row_gradients(case.grad_BD, *case.bags, num_rows=70_001, impl="cpp")
        found = {
            "out": embedding_bag.lookup(case.weight_RD, *case.bags, impl="cpp"),
            "rows": rows_U,
            "grad": grad_UD,
            **updated(case, RULES["rowwise_adagrad"], "cpp"),
        }
        assert_same(found, (expected or [found])[0])
        assert_same(
            updated(case, RULES["rowwise_adagrad"], "cpp", fused=False), updated(case, RULES["rowwise_adagrad"], "cpp")
        )
        expected = expected or [found]
    threads(2)
    assert torch.equal(expected[0]["out"], embedding_bag.lookup(case.weight_RD, *case.bags, impl="reference"))
    reference = embedding_bag.row_gradients(case.grad_BD, *case.bags, num_rows=70_001, impl="reference")
    assert torch.equal(expected[0]["grad"], reference[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_arguments(impl: str) -> None:
    case = make("odd", 3)
    assert case.weights_N is not None
    strided = [t.repeat_interleave(2, 0)[::2] for t in (case.slots_N, case.weights_N, case.grad_BD)]
    expected = updated(case, RULES["sgd"], "reference")
    case.slots_N, case.weights_N, case.grad_BD = strided
    torch.testing.assert_close(updated(case, RULES["sgd"], impl), expected)


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
def test_slot_outside_the_table(impl: str, dtype: torch.dtype, bad: int) -> None:
    case = case_of(10, torch.tensor([2, 2]), 3, dtype=dtype)
    case.slots_N[2] = bad
    for call in (
        lambda: embedding_bag.lookup(case.weight_RD, *case.bags, impl=impl),  # type: ignore[arg-type]
        lambda: embedding_bag.row_gradients(case.grad_BD, *case.bags, num_rows=10, impl=impl),  # type: ignore[arg-type]
        lambda: updated(case, RULES["sgd"], impl),
    ):
        with pytest.raises(ValueError, match=rf"^slot {bad} at position 2 is outside \[0, 10\)$"):
            call()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 3], [-1, 0, 2, 4]])
def test_offsets_that_do_not_cover_the_slots(impl: str, offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets_B1 must go from 0 to the 4 slots"):
        embedding_bag.lookup(torch.ones(5, 2), torch.arange(4), torch.tensor(offsets), impl=impl)  # type: ignore[arg-type]


@built
@pytest.mark.parametrize("rows", [[1, 1], [2, 1], [0, 5], [-1, 0]])
def test_rows_that_would_race_or_lie_outside(rows: list[int]) -> None:
    weight_RD, touched_R = torch.ones(5, 2), torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(ValueError, match="rows_U must ascend within"):
        embedding_bag.update_rows(
            weight_RD, {}, touched_R, torch.tensor(rows), torch.ones(2, 2), RULES["sgd"], torch.tensor(0.1), impl="cpp"
        )
    assert not touched_R.any()


# -- fake tensors ----------------------------------------------------------------------------------------------------


@built
def test_operators_pass_torchs_own_checks() -> None:
    case = make("odd", 3)
    ops, lr = torch.ops.sparrow, torch.tensor(0.1)
    rows_U, grad_UD = embedding_bag.row_gradients(case.grad_BD, *case.bags, num_rows=4099, impl="cpp")
    table = (case.weight_RD, [torch.zeros(4099)], torch.zeros(4099, dtype=torch.uint8))
    rule = ("rowwise_adagrad", lr, [1e-8])
    for op, args in (
        (ops.lookup, (case.weight_RD, *case.bags)),
        (ops.row_gradients, (case.grad_BD, *case.bags, 4099)),
        (ops.weight_gradients, (case.grad_BD, case.weight_RD, case.slots_N, case.offsets_B1, case.scale_B)),
        (ops.update_rows, (*table, rows_U, grad_UD, *rule)),
        (ops.fused_update, (*table, case.grad_BD, *case.bags, *rule)),
    ):
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


@built
def test_compiles_without_a_graph_break() -> None:
    case = make("odd", 3)
    doubled = torch.compile(lambda *args: embedding_bag.lookup(*args) * 2, fullgraph=True, backend="aot_eager")
    expected_BD = embedding_bag.lookup(case.weight_RD, *case.bags) * 2
    assert torch.equal(doubled(case.weight_RD, *case.bags), expected_BD)
