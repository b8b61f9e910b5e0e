"""int8 products: the definition against whole numbers, and C++ against the definition on every kind
of processor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sparrow.kernels import missing
from sparrow.kernels.int8_linear import (
    MOST_INPUTS,
    Shared,
    Static,
    Weight,
    linear,
    packed,
    quantised,
    reference,
    sums,
)

pytestmark = pytest.mark.usefixtures("poison")
built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
IMPLS: list[Any] = ["reference", pytest.param("cpp", marks=built)]
each_impl = pytest.mark.parametrize("impl", IMPLS)
PROCESSORS = ("avx512_vnni", "avx_vnni", "avx2", "portable")
STATIC = Static.of(-2.5, 3.0)
INPUTS, OUTPUTS, ROWS = (1, 3, 31, 624, 1025), (1, 7, 64, 624), (0, 1, 5, 500)


@pytest.fixture
def processors() -> Iterator[list[str]]:
    """Those that this machine can be; the best is put back afterwards."""
    here = []
    for name in PROCESSORS:
        with contextlib.suppress(ValueError):
            here.append(torch.ops.sparrow.int8_processor(name))
    yield here
    torch.ops.sparrow.int8_processor("best")


def drawn(rows: int, inputs: int, outputs: int, seed: int = 0) -> tuple[Tensor, Weight, Tensor]:
    """x, a weight and a bias. Some numbers of x are beyond the static range, and some channels are
    zeros.
    """
    random = torch.Generator().manual_seed(seed)
    weight_OI = torch.randn(outputs, inputs, generator=random) * torch.rand(
        outputs, 1, generator=random
    )
    weight_OI[3::5] = 0.0
    return (
        torch.randn(rows, inputs, generator=random),
        quantised(weight_OI),
        torch.randn(outputs, generator=random),
    )


def assert_same(found: Tensor, expected: Tensor, what: object = "") -> None:
    """Bitwise, but any NaN is like any other."""
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan), what
    bits = [torch.where(nan, 0, t).view(torch.int32) for t in (found, expected)]
    assert torch.equal(*bits), what


def assert_cpp_is_the_reference(
    x_BI: Tensor, weight: Weight, bias_O: Tensor | None, processors: list[str]
) -> None:
    """All that the operator offers, on every processor."""
    ours, theirs = (packed(weight, bias_O, impl=impl) for impl in ("cpp", "reference"))
    index_B = torch.arange(len(x_BI)).flip(0) % max(len(x_BI), 1)
    shared = Shared(sums(x_BI, theirs, STATIC), index_B)
    for name in processors:
        assert torch.ops.sparrow.int8_processor(name) == name
        what = (name, x_BI.shape, weight.codes_OI.shape)
        for static, relu, plus in (
            (None, False, None),
            (STATIC, True, None),
            (STATIC, False, shared),
        ):
            expected = linear(x_BI, theirs, static, relu=relu, shared=plus)
            assert_same(
                linear(x_BI, ours, static, relu=relu, shared=plus), expected, (*what, static, relu)
            )
        assert_same(sums(x_BI, ours, STATIC), shared.sums_UO, what)


@built
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_cpp_is_the_reference(inputs: int, outputs: int, processors: list[str]) -> None:
    assert "portable" in processors
    for rows in ROWS:
        x_BI, weight, bias_O = drawn(rows, inputs, outputs, seed=rows)
        # portable takes a second of these
        here = processors if rows < 500 or inputs < 624 else processors[:3]
        assert_cpp_is_the_reference(x_BI, weight, bias_O if rows != 1 else None, here)


@built
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_in_or_out(inputs: int, outputs: int, processors: list[str]) -> None:
    x_BI, weight, bias_O = drawn(3, inputs, outputs)
    assert_cpp_is_the_reference(x_BI, weight, bias_O, processors)
    assert torch.equal(linear(x_BI, packed(weight, bias_O)), bias_O.expand(3, outputs))


@built
@pytest.mark.parametrize("code", [-127, 127])
def test_the_largest_products_do_not_saturate(code: int, processors: list[str]) -> None:
    """Two products of 255 and 127 are more than 16 bits, and all of MOST_INPUTS just fit into
    32.
    """
    weight = Weight(torch.full((17, MOST_INPUTS), code, dtype=torch.int8), torch.ones(17))
    static = Static(scale=1.0, zero=0)
    for inputs in (2, 3, 1024, MOST_INPUTS):
        for name in processors:
            torch.ops.sparrow.int8_processor(name)
            found = sums(
                torch.full((7, inputs), 300.0),
                packed(weight.columns(slice(inputs)), impl="cpp"),
                static,
            )
            assert (found == 255 * code * inputs).all(), (name, inputs)


@each_impl
def test_the_sums_are_those_of_whole_numbers(impl: Any) -> None:
    x_BI, weight, _ = drawn(9, 131, 33)
    codes_BI = (x_BI * (1 / torch.tensor(STATIC.scale))).round().long() + STATIC.zero
    codes_BI = codes_BI.clamp(0, 255) - STATIC.zero
    expected = (codes_BI[:, None, :] * weight.codes_OI.long()).sum(2)
    assert torch.equal(sums(x_BI, packed(weight, impl=impl), STATIC).long(), expected)


@each_impl
def test_rows_that_are_not_finite_are_nan_and_touch_no_others(impl: Any) -> None:
    x_BI, weight, bias_O = drawn(40, 45, 50)
    product = packed(weight, bias_O, impl=impl)
    damaged = x_BI.clone()
    damaged[3, 0], damaged[8, 44], damaged[20, 16] = torch.nan, torch.inf, -torch.inf
    bad = torch.zeros(40, dtype=torch.bool).index_fill_(0, torch.tensor([3, 8, 20]), True)
    for static in (None, STATIC):
        for relu in (False, True):
            found, fine = (linear(x, product, static, relu=relu) for x in (damaged, x_BI))
            assert found[bad].isnan().all()
            assert torch.equal(found[~bad], fine[~bad])
    made = sums(damaged, product, STATIC)
    assert torch.equal(made[~bad], sums(x_BI, product, STATIC)[~bad])
    index_B = torch.arange(40).roll(1)
    found = linear(x_BI, product, STATIC, shared=Shared(made, index_B), relu=True)
    assert torch.equal(found.isnan().any(1), bad[index_B])
    assert torch.equal(found.isnan().all(1), bad[index_B])


@each_impl
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-39, 1e-37, 1e-30, 1e30, 3.2e38])
def test_numbers_of_any_size(size: float, impl: Any, processors: list[str]) -> None:
    """Rows of zeros, of subnormal numbers and of a range beyond float32 have finite codes."""
    x_BI = (
        torch.tensor([[1.0, -1.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -0.25, -1.0]])
        * size
    )
    weight = quantised(torch.eye(4))
    expected = linear(x_BI, packed(weight, impl="reference"))
    for name in processors:
        torch.ops.sparrow.int8_processor(name)
        found = linear(x_BI, packed(weight, impl=impl))
        assert_same(found, expected, name)
        step = max(2 * size / 255, 2.0**-126)
        assert ((found.double() - x_BI.double()).abs() <= 1.01 * step).all()


@each_impl
def test_columns_that_samples_share_are_multiplied_once(impl: Any) -> None:
    """Two users with ten candidates: the same bits as all columns at once."""
    (user_UI, *_), (rest_BI, *_) = drawn(2, 37, 1, seed=1), drawn(10, 50, 1, seed=2)
    _, weight, bias_O = drawn(0, 87, 70)
    index_B = torch.arange(10) % 2
    shared = Shared(sums(user_UI, packed(weight.columns(slice(37)), impl=impl), STATIC), index_B)
    found = linear(
        rest_BI,
        packed(weight.columns(torch.arange(37, 87)), bias_O, impl=impl),
        STATIC,
        shared=shared,
    )
    whole = linear(
        torch.cat([user_UI[index_B], rest_BI], 1), packed(weight, bias_O, impl=impl), STATIC
    )
    assert torch.equal(found, whole)


@each_impl
@pytest.mark.parametrize("static", [None, STATIC])
def test_a_row_is_the_same_in_any_batch(static: Static | None, impl: Any) -> None:
    x_BI, weight, bias_O = drawn(101, 77, 30)
    product = packed(weight, bias_O, impl=impl)
    x_BI[50] *= 1e6  # a scale of the whole batch would feel it
    whole = linear(x_BI, product, static)
    for rows in ([0], [100, 3], list(range(0, 101, 7))):
        assert torch.equal(linear(x_BI[rows], product, static), whole[rows])


@built
# by channels, by rows
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(7, 1500, 2500), (600, 300, 200)])
def test_any_number_of_threads_gives_the_same_bits(
    rows: int, inputs: int, outputs: int, threads: Callable[[int], None]
) -> None:
    x_BI, weight, bias_O = drawn(rows, inputs, outputs)
    expected = linear(x_BI, packed(weight, bias_O, impl="reference"))
    for count in (1, 2, 3, 7):
        threads(count)
        assert torch.equal(linear(x_BI, packed(weight, bias_O, impl="cpp")), expected)


def test_a_weight_in_int8() -> None:
    weight_OI = torch.randn(50, 33) * 10.0 ** torch.arange(-25, 25)[:, None]
    weight_OI[7] = 0.0
    codes_OI, scale_O = quantised(weight_OI)
    assert codes_OI.dtype == torch.int8
    assert codes_OI.min() == -127 or codes_OI.max() == 127
    assert codes_OI.abs().amax(1).tolist() == [0 if row == 7 else 127 for row in range(50)]
    assert ((codes_OI * scale_O[:, None] - weight_OI).abs() <= 0.5001 * scale_O[:, None]).all()


def test_a_scale_of_each_channel_is_closer_than_one_of_all() -> None:
    for seed in range(20):
        weight_OI = torch.randn(40, 60, generator=torch.Generator().manual_seed(seed))
        weight_OI *= torch.logspace(-2, 0, 40)[:, None]
        of_all = quantised(weight_OI.view(1, -1))
        found = [
            quantised(weight_OI),
            Weight(of_all.codes_OI.view(40, 60), of_all.scale_O.expand(40)),
        ]
        errors = [
            (codes * scale[:, None] - weight_OI).double().square().sum(1) for codes, scale in found
        ]
        assert errors[0].sum() < errors[1].sum()
        assert (errors[0] <= errors[1]).double().mean() > 0.9


def test_the_product_is_near_that_of_floats() -> None:
    random = torch.Generator().manual_seed(1)
    x_BI, weight_OI = (
        torch.randn(200, 300, generator=random),
        torch.randn(100, 300, generator=random),
    )
    expected = x_BI @ weight_OI.t()
    for static in (None, Static.of(x_BI.min().item(), x_BI.max().item())):
        error = linear(x_BI, packed(quantised(weight_OI)), static) - expected
        assert error.norm() < 0.015 * expected.norm()


def test_ranges() -> None:
    assert Static.of(0.5, 255.0) == Static(scale=1.0, zero=0)
    assert Static.of(-255.0, -3.0) == Static(scale=1.0, zero=255)
    assert Static.of(0.0, 0.0) == Static(scale=2.0**-126, zero=0)


@each_impl
def test_what_does_not_fit(impl: Any) -> None:
    x_BI, weight, bias_O = drawn(4, 6, 5)
    product = packed(weight, bias_O, impl=impl)
    good = sums(x_BI, product, STATIC)
    for x in (x_BI[:, :5], x_BI.double(), x_BI[0]):
        with pytest.raises(ValueError, match="x: "):
            linear(x, product)
        with pytest.raises(ValueError, match="x: "):
            sums(x, product, STATIC)
    with pytest.raises((ValueError, IndexError)):
        linear(x_BI, product, STATIC, shared=Shared(good, torch.tensor([0, 1, 2, 4])))
    for shared in (
        Shared(good, torch.arange(3)),
        Shared(good[:, :4].contiguous(), torch.arange(4)),
    ):
        with pytest.raises(ValueError, match="rows|fit"):
            linear(x_BI, product, STATIC, shared=shared)
    with pytest.raises(ValueError, match="give `static`"):
        linear(x_BI, product, shared=Shared(good, torch.arange(4)))


def test_what_is_refused() -> None:
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="not finite"):
            quantised(torch.tensor([[1.0, wrong]]))
        with pytest.raises(ValueError, match="scale"):
            Static(scale=wrong, zero=0)
        with pytest.raises(ValueError, match="not finite"):
            Static.of(-1.0, wrong)
    for scale, zero in ((0.0, 0), (-1.0, 0), (1.0, -1), (1.0, 256)):
        with pytest.raises(ValueError, match=r"scale|zero"):
            Static(scale=scale, zero=zero)
    with pytest.raises(ValueError, match="65537 inputs"):
        packed(Weight(torch.zeros(1, MOST_INPUTS + 1, dtype=torch.int8), torch.ones(1)))
    with pytest.raises(ValueError, match="scale and bias"):
        packed(Weight(torch.zeros(2, 2, dtype=torch.int8), torch.ones(2)), torch.ones(3))


@built
def test_a_processor_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="abacus cannot run here"):
        torch.ops.sparrow.int8_processor("abacus")


@built
def test_compilers_know_the_shapes() -> None:
    x_BI, weight, _ = drawn(4, 6, 5)
    product = packed(weight, impl="cpp")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x_BI)
        for made, dtype in (
            (linear(fake, product), torch.float32),
            (sums(fake, product, STATIC), torch.int32),
        ):
            assert made.shape == (4, 5)
            assert made.dtype == dtype


def test_codes_of_a_row_begin_at_its_least_number() -> None:
    codes_BI, scale_B1, zero_B1 = reference.codes(
        torch.tensor([[-1.0, 0.0, 4.1], [3.0, 1.0, 2.0]]), None
    )
    assert codes_BI.tolist() == [[0.0, 50.0, 255.0], [255.0, 85.0, 170.0]]
    assert torch.allclose(scale_B1, torch.tensor([[5.1 / 255], [3.0 / 255]]))
    assert zero_B1.tolist() == [[50.0], [0.0]]
