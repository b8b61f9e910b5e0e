from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.kernels import Impl, dense, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
ops = torch.ops.sparrow
F32, BF16 = torch.float32, torch.bfloat16
WIDTHS = (1, 15, 16, 17, 624)
ROWS = (0, 1, 127, 129, 1000)
SHAPES = [*itertools.product(ROWS, WIDTHS[:-1]), (0, 624), (129, 624)]
M, V = torch.ones(3, 5), torch.ones(5)
LARGE = (1 << 20) // 4  # floats from which a tensor's memory is a block

Operator = Callable[[torch.dtype, int, int, Impl], tuple[Tensor, ...]]


def random(rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bias_of(width: int) -> Tensor:
    return random(1, width, F32, 9)[0]


def _cross(dtype: torch.dtype, rows: int, width: int, impl: Impl) -> tuple[Tensor, ...]:
    x0, x, product = (random(rows, width, dtype, s) for s in range(3))
    return (dense.cross(x0, x, product, bias_of(width), impl=impl),)


def _cross_backward(dtype: torch.dtype, rows: int, width: int, impl: Impl) -> tuple[Tensor, ...]:
    out: list[Tensor] = []
    for first, last in itertools.product([False, True], repeat=2):
        grad, x0, product, grad_x0 = (random(rows, width, dtype, s) for s in range(4))
        if last:
            grad_x0.fill_(float("nan"))  # is not read
        both = dense.cross_backward(
            grad, x0, product, bias_of(width), grad_x0, first=first, last=last, impl=impl
        )  # fmt: skip
        out += [*both, grad_x0]
        assert torch.equal(grad, random(rows, width, dtype, 0))
    return tuple(out)


def _bias_relu(dtype: torch.dtype, rows: int, width: int, impl: Impl) -> tuple[Tensor, ...]:
    y = random(rows, width, dtype, 0)
    dense.bias_relu_(y, bias_of(width), impl=impl)
    return (y,)


def _relu_backward(dtype: torch.dtype, rows: int, width: int, impl: Impl) -> tuple[Tensor, ...]:
    return dense.relu_backward(
        random(rows, width, dtype, 0), random(rows, width, dtype, 1).relu(), impl=impl
    )


def _beside(
    dtype: torch.dtype, rows: int, width: int, impl: Impl, others: int = 19
) -> tuple[Tensor, ...]:
    numbers, rest = random(rows, 13, F32, 0), random(rows, others, F32, 2)
    return dense.beside(numbers, random(13, width, F32, 1), rest, dtype, impl=impl)


def _beside_columns(dtype: torch.dtype, rows: int, width: int, impl: Impl) -> tuple[Tensor, ...]:
    numbers, rest = random(rows, width, F32, 0), random(rows, 3, F32, 2)
    return dense.beside(numbers, random(width, 4, F32, 1), rest, dtype, impl=impl)


def _beside_backward(dtype: torch.dtype, rows: int, width: int, impl: Impl) -> tuple[Tensor, ...]:
    wide, narrow = random(rows, 13 * width + 19, dtype, 0), random(rows, 16 + 19, dtype, 1)
    return dense.beside_backward(wide, narrow, random(rows, 13, F32, 2), width, impl=impl)


def _beside_columns_backward(
    dtype: torch.dtype, rows: int, width: int, impl: Impl
) -> tuple[Tensor, ...]:
    # no further input
    wide, narrow = random(rows, width * 4, dtype, 0), random(rows, -(-width // 16) * 16, dtype, 1)
    return dense.beside_backward(wide, narrow, random(rows, width, F32, 2), 4, impl=impl)


def _product(dtype: torch.dtype, rows: int, width: int, impl: Impl) -> tuple[Tensor, ...]:
    a, b, plus = (
        random(rows, width, dtype, 0),
        random(7, width, dtype, 1).t(),
        random(rows, 7, dtype, 2),
    )
    return dense.product(a, b, impl=impl), dense.product(a, b, plus, impl=impl)


def _weight_gradient(dtype: torch.dtype, rows: int, width: int, impl: Impl) -> tuple[Tensor, ...]:
    return (
        dense.weight_gradient(random(rows, width, dtype, 0), random(rows, 33, dtype, 1), impl=impl),
    )


OPERATORS: dict[str, Operator] = {
    "cross": _cross,
    "cross_backward": _cross_backward,
    "bias_relu_": _bias_relu,
    "relu_backward": _relu_backward,
    "beside": _beside,
    "beside, many columns": _beside_columns,
    "beside_backward": _beside_backward,
    "beside_backward, many columns": _beside_columns_backward,
    "product": _product,
    "weight_gradient": _weight_gradient,
}


def assert_near(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Matrices differ by a rounding at most, sums over rows by their order too."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        rtol, atol = (1e-5, 2e-5) if a.dtype == F32 else (0.01, 1e-3)
        if a.ndim == 1:
            atol *= 5
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_is_the_reference(name: str, dtype: torch.dtype) -> None:
    for rows, width in SHAPES:
        call = OPERATORS[name]
        assert_near(call(dtype, rows, width, "cpp"), call(dtype, rows, width, "reference"))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("width", [504, 506])  # whose rows do and do not allow it
@pytest.mark.parametrize("name", ["cross", "cross_backward", "relu_backward"])
def test_matrices_that_are_stored_past_the_caches(
    name: str, width: int, dtype: torch.dtype
) -> None:
    rows = (8 << 20) // (width * dtype.itemsize) + 1
    assert_near(
        OPERATORS[name](dtype, rows, width, "cpp"), OPERATORS[name](dtype, rows, width, "reference")
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_what_is_computed_number_by_number_is_the_same_bits(dtype: torch.dtype) -> None:
    """Nothing is summed: not even the order can differ."""
    for rows, width in [(129, 17), (3, 624)]:
        for call in (_cross, _bias_relu, _beside):
            for a, b in zip(
                call(dtype, rows, width, "cpp"), call(dtype, rows, width, "reference"), strict=True
            ):
                assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
# torch's
@pytest.mark.parametrize("name", [n for n in OPERATORS if n not in ("product", "weight_gradient")])
def test_any_number_of_threads_gives_the_same_bits(name: str, dtype: torch.dtype, threads) -> None:
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append(OPERATORS[name](dtype, 1000, 200, "cpp"))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.skipif(
    bool(missing()) or not torch.backends.mkldnn.is_available(),
    reason="no compiled kernels or oneDNN",
)
@pytest.mark.parametrize("in_onednn", [False, True])
def test_large_products_of_both_libraries(in_onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matrices, transposed ones and parts. A row with NaN spoils no other. A second time gives
    the same bits.
    """
    from sparrow.kernels.dense import cpp

    monkeypatch.setattr(cpp, "_has_slow_mm", lambda: in_onednn)
    a, b, plus = random(300, 128, F32, 0), random(96, 128, F32, 1).t(), random(300, 96, F32, 2)
    assert cpp._is_for_onednn(a, b) is in_onednn
    a[7] = torch.nan
    wide = random(300, 300, F32, 3)
    for x, y in ((a, b), (a, b.contiguous()), (wide[:, 50:178], b), (wide.t()[:, :128], b)):
        exact = (x.double() @ y.double()).float()
        found = dense.product(x, y, impl="cpp")
        assert torch.equal(found.isnan(), exact.isnan())
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=2e-5, equal_nan=True)
        assert torch.equal(found.nan_to_num(), dense.product(x, y, impl="cpp").nan_to_num())
        summed = dense.add_product_(plus.clone(), x, y, impl="cpp")
        torch.testing.assert_close(summed, exact + plus, rtol=1e-5, atol=2e-5, equal_nan=True)
        torch.testing.assert_close(
            dense.product(x, y, plus, impl="cpp"), summed, rtol=1e-5, atol=2e-5, equal_nan=True
        )
    grad, x = random(300, 96, F32, 4), random(300, 64, F32, 5)
    exact = (grad.double().t() @ x.double()).float()
    torch.testing.assert_close(
        dense.weight_gradient(grad, x, impl="cpp"), exact, rtol=1e-5, atol=5e-5
    )


def has_amx() -> bool:
    if missing():
        return False
    dense.empty_like(M, impl="cpp")  # loads the library
    return bool(ops.has_amx())


@pytest.mark.skipif(not has_amx(), reason="this processor has no AMX")
@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [(1, 16, 16), (255, 17, 33), (257, 32, 31), (600, 100, 16), (31, 640, 200)],
)
def test_tiles_sum_in_float32(rows: int, columns: int, width: int, threads) -> None:
    """Rounded to bfloat16 once; the same bits from any number of threads; NaN reaches its own
    column only.
    """
    grad, x = random(rows, columns, BF16, 0), random(rows, width, BF16, 1)
    exact = grad.double().t() @ x.double()
    x[rows // 2, 3] = float("nan")
    found = []
    for number in (1, 2, 3, 8):
        threads(number)
        found.append(ops.weight_gradient(grad, x))
    assert found[0][:, 3].isnan().all()
    others = [c for c in range(width) if c != 3]
    torch.testing.assert_close(
        found[0][:, others].double(), exact[:, others], rtol=2**-8, atol=1e-4
    )
    for other in found[1:]:
        assert torch.equal(found[0].view(torch.int16), other.view(torch.int16))


# -- numbers that are none -------------------------------------------------------------------------

ODD = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e38, 3.4e38, -1e-40, 1e-40]


def odd_pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every two of them at the same place, 11 columns."""
    a, b = zip(*itertools.product(ODD, repeat=2), strict=True)
    return torch.tensor(a).view(-1, 11).to(dtype), torch.tensor(b).view(-1, 11).to(dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_odd_numbers_go_through_as_in_the_reference(dtype: torch.dtype) -> None:
    a, b = odd_pairs(dtype)
    bias = torch.tensor(ODD)
    found: dict[Impl, list[Tensor]] = {"cpp": [], "reference": []}
    for impl, out in found.items():
        y, grad_x0 = a.clone(), b.clone()
        dense.bias_relu_(y, bias, impl=impl)
        out += [y, *dense.relu_backward(a, b, impl=impl), dense.cross(a, b, b, bias, impl=impl)]
        out += dense.cross_backward(a, b, a, bias, grad_x0, first=True, last=False, impl=impl)
        out += [grad_x0, *dense.beside(a.float(), b.float(), b.float(), dtype, impl=impl)]
    for got, want in zip(found["cpp"], found["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_relu_is_torchs_for_nan(dtype: torch.dtype, impl: Impl) -> None:
    x = torch.tensor([ODD], dtype=dtype, requires_grad=True)
    want = torch.relu(x)
    upstream = torch.arange(1.0, 12.0, dtype=dtype)[None]
    want.backward(upstream)
    y = x.detach().clone()
    dense.bias_relu_(y, torch.zeros(11), impl=impl)
    assert y[0, 6].isnan()
    torch.testing.assert_close(y, want.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(dense.relu_backward(upstream, y, impl=impl)[0], x.grad)


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    """Every kind of last bits: ties to even, up to infinity, below the least normal number."""
    bits = torch.arange(0, 1 << 32, 9973, dtype=torch.int64)
    x = bits.to(torch.int32).view(F32)[: len(bits) // 17 * 17].view(-1, 17)
    got = dense.beside(torch.ones(len(x), 1), torch.zeros(1, 1), x, BF16, impl="cpp")[0][:, 1:]
    want = x.to(BF16)
    known = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[known].view(torch.int16), want[known].view(torch.int16))


# -- arguments -------------------------------------------------------------------------------------


def test_gradients_may_lie_in_any_way() -> None:
    x, bias = random(5, 17, F32, 0), bias_of(17)
    for grad in (
        random(17, 5, F32, 1).t(),
        torch.ones(1, 1).expand(5, 17),
        random(5, 34, F32, 1)[:, ::2],
    ):
        for got, want in zip(
            dense.relu_backward(grad, x, impl="cpp"),
            dense.relu_backward(grad, x, impl="reference"),
            strict=True,
        ):
            torch.testing.assert_close(got, want)
        found: list[tuple[Tensor, ...]] = []
        for impl in ("cpp", "reference"):
            into = x.clone()
            both = dense.cross_backward(grad, x, x, bias, into, first=True, last=False, impl=impl)  # type: ignore[arg-type]
            found.append((*both, into))
        assert_near(*found)
        numbers = random(5, 1, F32, 3)
        both_wide = [
            dense.beside_backward(grad, grad[:, :16], numbers, 17, impl=i)
            for i in ("cpp", "reference")
        ]  # type: ignore[arg-type]
        assert_near(*both_wide)


WRONG: dict[str, Callable[[], object]] = {
    "cross: rows": lambda: dense.cross(M, M[:2], M, V, impl="cpp"),
    "cross: width": lambda: dense.cross(M, M, M[:, :4].contiguous(), V, impl="cpp"),
    "cross: dtypes": lambda: dense.cross(M, M.bfloat16(), M, V, impl="cpp"),
    "cross: product's memory": lambda: dense.cross(M, M, torch.ones(5, 3).t(), V, impl="cpp"),
    "cross: one vector": lambda: dense.cross(V, V, V, V, impl="cpp"),
    "cross: three dimensions": lambda: dense.cross(M[None], M[None], M[None], V, impl="cpp"),
    "cross: float64": lambda: dense.cross(
        M.double(), M.double(), M.double(), V.double(), impl="cpp"
    ),
    "cross: bias's length": lambda: dense.cross(M, M, M, V[:4], impl="cpp"),
    "cross: bias's dtype": lambda: dense.cross(M, M, M, V.bfloat16(), impl="cpp"),
    "cross: bias's shape": lambda: dense.cross(M, M, M, V[None], impl="cpp"),
    "cross: bias's memory": lambda: dense.cross(M, M, M, V[:1].expand(5), impl="cpp"),
    "cross_backward: grad_x0": lambda: dense.cross_backward(
        M, M, M, V, M[:1], first=True, last=True, impl="cpp"
    ),
    "cross_backward: its memory": lambda: dense.cross_backward(
        M, M, M, V, torch.ones(5, 3).t(), first=True, last=True, impl="cpp"
    ),
    "bias_relu_: bias": lambda: dense.bias_relu_(M, V[:4], impl="cpp"),
    "bias_relu_: memory": lambda: dense.bias_relu_(torch.ones(5, 3).t(), V, impl="cpp"),
    "relu_backward: dtypes": lambda: dense.relu_backward(M, M.bfloat16(), impl="cpp"),
    "weight_gradient: rows": lambda: ops.weight_gradient(M[:2].bfloat16(), M.bfloat16()),
    "weight_gradient: memory": lambda: ops.weight_gradient(
        M.t().bfloat16(), torch.ones(5, 3).bfloat16()
    ),
    "weight_gradient: dtype": lambda: ops.weight_gradient(M, M),
    "relu_backward: rows": lambda: dense.relu_backward(M[:2], M, impl="cpp"),
    "beside: rows": lambda: dense.beside(M, torch.ones(5, 2), M[:2], F32, impl="cpp"),
    "beside: columns": lambda: dense.beside(M, torch.ones(4, 2), M, F32, impl="cpp"),
    "beside: vectors": lambda: dense.beside(M, V, M, F32, impl="cpp"),
    "beside: dtype": lambda: dense.beside(M.double(), torch.ones(5, 2), M, F32, impl="cpp"),
    "beside_backward: narrow": lambda: dense.beside_backward(
        torch.ones(3, 11), torch.ones(3, 16), M, 2, impl="cpp"
    ),
    "beside_backward: rows": lambda: dense.beside_backward(
        torch.ones(2, 11), torch.ones(2, 17), M, 2, impl="cpp"
    ),
    "beside_backward: too wide": lambda: dense.beside_backward(
        torch.ones(3, 11), torch.ones(3, 17), M, 3, impl="cpp"
    ),
    "beside_backward: below 0": lambda: dense.beside_backward(
        torch.ones(3, 11), torch.ones(3, 32), M, -1, impl="cpp"
    ),
    "beside_backward: overflow": lambda: dense.beside_backward(
        torch.ones(3, 8), torch.ones(3, 24), torch.ones(3, 4), 1 << 62, impl="cpp"
    ),
    "beside_backward: a vector": lambda: dense.beside_backward(
        torch.ones(3, 11), torch.ones(3, 27), V, 2, impl="cpp"
    ),
    "beside_backward: a cube": lambda: dense.beside_backward(
        torch.ones(3, 11), torch.ones(3, 17), M[..., None], 2, impl="cpp"
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected|do not fit|no AMX"):
        WRONG[name]()


def test_torchs_products_refuse_what_does_not_fit() -> None:
    for a, b in ((M, M), (M, M.t().bfloat16()), (M[None], M.t())):
        with pytest.raises(RuntimeError):
            dense.product(a, b, impl="cpp")


@pytest.mark.parametrize(
    ("rows", "columns"), [(-1, 5), (-2048, -2048), ((1 << 42) + 1, 1 << 20), (1 << 40, 1 << 20)]
)
def test_impossible_sizes_are_an_error(rows: int, columns: int) -> None:
    with pytest.raises((RuntimeError, MemoryError)):
        ops.matrix(rows, columns, False)


def test_float64_goes_to_the_reference() -> None:
    x, bias = torch.randn(3, 5).double(), torch.randn(5).double()
    assert torch.equal(dense.cross(x, x, x, bias), x + x * (x + bias))
    y = x.clone()
    dense.bias_relu_(y, bias)
    assert torch.equal(y, (x + bias).relu())
    assert dense.relu_backward(x, y)[1].dtype == torch.float64
    wide, narrow = dense.beside(x, torch.ones(5, 2).double(), x, torch.float64)
    assert wide.dtype == narrow.dtype == torch.float64
    assert dense.empty_like(x).dtype == dense.product(x, x.t()).dtype == torch.float64


def test_only_two_implementations() -> None:
    with pytest.raises(UserError, match="impl: 'fast' is not one of"):
        dense.empty_like(M, impl="fast")  # type: ignore[arg-type]


def test_an_empty_sum_is_added_to() -> None:
    """A product of no columns is 0, whatever was in the memory."""
    for rows in (3, LARGE // 4):
        ops.matrix(rows, 4, False).fill_(7)
        a, b, plus = torch.ones(rows, 0), torch.ones(0, 4), torch.ones(rows, 4)
        assert not dense.product(a, b, impl="cpp").any()
        assert torch.equal(dense.product(a, b, plus, impl="cpp"), plus)


SIGNATURES: dict[str, Callable[[], tuple[object, ...]]] = {
    "cross": lambda: (M, M, M, V),
    "cross_backward": lambda: (M, M, M, V, M.clone(), False, False),
    "bias_relu": lambda: (M.clone(), V),
    "relu_backward": lambda: (M, M),
    "beside": lambda: (M, torch.ones(5, 2), M, True),
    "beside_backward": lambda: (torch.ones(3, 11), torch.ones(3, 17), M, 2),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_torch_compile_is_told_the_truth(name: str) -> None:
    dense.empty_like(M, impl="cpp")  # loads what it is told
    torch.library.opcheck(
        getattr(ops, name).default,
        SIGNATURES[name](),
        test_utils=("test_schema", "test_faketensor"),
    )


# -- memory ----------------------------------------------------------------------------------------


def test_what_lives_is_not_overwritten() -> None:
    """Nor while only a view of it lives, or an alias elsewhere."""
    whole, of_view, of_alias = (ops.matrix(LARGE // 512, 512, False).fill_(i) for i in range(3))
    view, alias = of_view[5:, ::7].t(), of_alias.numpy()
    del of_view, of_alias
    for _ in range(20):
        ops.matrix(LARGE // 512, 512, False).fill_(9)
    assert (whole == 0).all()
    assert (view == 1).all()
    assert (alias == 2).all()


def test_what_backward_needs_is_not_overwritten() -> None:
    x = torch.randn(LARGE // 512, 512, requires_grad=True)
    y = dense.cross(x.detach(), x.detach(), x.detach(), torch.zeros(512), impl="cpp")
    want = y.clone()
    z = (x * y).sum()
    del y
    for _ in range(5):
        ops.matrix(LARGE // 512, 512, False).fill_(9)
    z.backward()
    assert torch.equal(x.grad, want)


def test_many_threads_share_the_memory() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        held: list[Tensor] = []
        for i in range(150):
            held.append(ops.matrix(LARGE // 512 + 64 * (i % 3), 512, False).fill_(number))
            if len(held) > 2 and not (held.pop(0) == number).all():
                wrong.append(number)

    team = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert not wrong


def alone(code: str) -> str:
    """What a process of its own prints."""
    start = "import torch\nfrom sparrow.kernels import dense, missing\nassert not missing()\n"
    start += "def mib():\n    return int(open('/proc/self/statm').read().split()[1]) * 4096 >> 20\n"
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_memory_is_given_again() -> None:
    """Whole, aligned, and what was used last comes first."""
    code = """
        one, two = (torch.ops.sparrow.matrix(1024, 512, False) for _ in range(2))
        place = one.data_ptr()
        assert place != two.data_ptr() and place % (2 << 20) == 0
        del two
        del one
        assert torch.ops.sparrow.matrix(1000, 512, False).data_ptr() == place
    """
    alone(code)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
SIZES = {
    "growing": "(4096 + 32 * i for i in range(200))",
    "shrinking": "(4096 + 32 * (200 - i) for i in range(200))",
    "any": "(256 + i * 7919 % 8000 for i in range(300))",
}


@linux
@pytest.mark.parametrize("sizes", SIZES)
def test_memory_of_sizes_that_do_not_come_again_is_let_go(sizes: str) -> None:
    code = f"""
        before = mib()
        for rows in {SIZES[sizes]}:
            torch.ops.sparrow.matrix(rows, 1024, False).fill_(1)
        print(mib() - before)
    """
    assert int(alone(code)) < 200  # MiB, of tensors of 16 to 40


@linux
@pytest.mark.parametrize("rows", [256, 4096])
def test_memory_that_nobody_takes_is_let_go(rows: int) -> None:
    code = f"""
        held = [torch.ops.sparrow.matrix(4096, 1024, False).fill_(1) for _ in range(20)]
        before = mib()
        del held
        for _ in range(600):
            torch.ops.sparrow.matrix({rows}, 1024, False)
        torch.ops.sparrow.matrix(9000, 1024, False)
        print(before - mib())
    """
    assert int(alone(code)) > 300


def test_tensors_alive_at_the_end_do_no_harm() -> None:
    code = """
        import atexit, builtins, sys, threading
        big = torch.ops.sparrow.matrix(1024, 1024, False).fill_(1)
        builtins.held = [big, big[3:].t()]
        sys.modules["held"] = [torch.ops.sparrow.matrix(1024, 1024, False)]
        class Cycle: pass
        c = Cycle(); c.c, c.t = c, torch.ops.sparrow.matrix(1024, 1024, False)
        atexit.register(lambda t=torch.ops.sparrow.matrix(1024, 1024, False): print(float(t.fill_(2).sum())))
        x = torch.randn(1024, 1024, requires_grad=True)
        from sparrow.layers.mlp import MLP
        graph = MLP(1024, (1024,))(x)
    """
    assert alone(code).strip() == str(2.0 * 1024 * 1024)
