"""Number formats: how near their values are, how fast a cast is, what emulation costs, and where
few bits lose.

    python benchmarks/number_formats.py                # under ten minutes
    python benchmarks/number_formats.py --quick        # under a minute, the same checks
    python benchmarks/number_formats.py --cases cast

`qsnr`: decibels of signal over error, on rows of N(0, |N(0, 1)|), as in arXiv 2302.08007. Then a sweep over the two
levels of BDR: bits of mantissa 2 to 8, blocks (k1) of 8 to 128, pairs (k2) of 1 to 8, bits of shift
(d2) 0 to 3. A point is on the front if no other has as few bits and more decibels. Bits are those
of storage, not of silicon.

`cast`: one thread, GB/s of bytes read and written, along rows and along columns: fp32 to rounded
bf16, and to codes and scales. Beside it stand the bandwidth of copying, which a cast may reach half
of, and torchao's `to_mx` where it is installed; along columns it is given a transposed copy, whose
making counts. Time is the thread's own, so that other programs do not count.

`step`: forward and backward of the products of a DCNv2 (the sizes of `vs_fuxictr.py`: 39 vectors of
16, three cross layers, an MLP of three times 400; 4,096 rows, one thread), in precisions that run
natively or are emulated. Sides take turns, and ratios are medians over turns. What is emulated has
no speed of its own: this is what emulating costs. Where there are bf16 units, other sides leave
them unused: so are processors that have none.

`loses`: E4M3 with scales of blocks beside one scale for the tensor, where numbers lie in a narrow range: ||Q(x) - x||
over ||x||. And products of 1 to 64 inputs or outputs, in bf16 over fp32: without casts, and as a candidate of
`sparrow numerics`, which takes fp32 and gives fp32.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import torch
from _peers.targets import print_target
from _peers.tiny import sized
from embedding_bag import target
from limits import _library
from row_formats import processor
from torch import Tensor

from sparrow.core.memory import keep_freed_memory
from sparrow.extensions.low_precision.candidates import bf16, fp32
from sparrow.interactions.cross import CrossNet
from sparrow.kernels import dense, missing
from sparrow.kernels.quantise import encode, rounded
from sparrow.layers.mlp import MLP, Head
from sparrow.layers.precision import Precision, computing
from sparrow.layers.precisions.bf16 import lacks_bf16
from sparrow.numerics.blocks import rounded as defined
from sparrow.numerics.elements import whole
from sparrow.numerics.formats import FORMATS, Format

EXPECTED = {"mx9": 46.6, "mx6": 28.4, "mx4": 15.8, "fp8": 31.5, "fp8-e5m2": 25.6}  # decibels
BDR = ("mx9", "mx6", "mx4")
CAST = ("mxfp8", "mxfp6", "mxfp4", "mxint8", "mx9", "mx6", "mx4", "fp8-rowwise")
TORCHAO = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
WIDE = 512  # inputs or outputs of a product of which the others are few


# -- nearness --------------------------------------------------------------------------------------


def drawn(rows: int) -> Tensor:
    """Rows of 1,024 normal numbers, whose deviation is a normal number's magnitude."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(rows, 1024, generator=random) * torch.randn(rows, 1, generator=random).abs()


def qsnr(x: Tensor, format: Format) -> float:
    """Decibels of signal over error."""
    error = (rounded(x, format) - x).double().square().sum() / x.double().square().sum()
    return -10 * math.log10(error)


def sweep(x: Tensor) -> dict[tuple[int, int, int, int], tuple[float, float]]:
    """Bits and decibels of each point (m, k1, k2, d2)."""
    found = {}
    for m, k1, k2, d2 in itertools.product(
        range(2, 9), (8, 16, 32, 64, 128), (1, 2, 4, 8), range(4)
    ):
        if d2 == 0 and k2 > 1:
            continue  # the same as k2 = 1
        format = Format(element=whole(m), block=k1, pair=k2, shift_bits=d2)
        found[m, k1, k2, d2] = (format.bits, qsnr(x, format))
    return found


def within(name: str, value: float, goal: float, by: float) -> None:
    """A line of a target that is not to be far away."""
    is_met = abs(value - goal) <= by
    print_target(name, f"{value:.2f}", f"{goal:.2f}, within {by}", is_met)


def qsnr_case(quick: bool) -> None:
    """Print decibels of all formats and of the sweep's front."""
    x = drawn(sized(1_000, 50) if quick else 10_000)
    sample = x[:50]
    found = {}
    for name, format in FORMATS.items():
        assert torch.equal(rounded(sample, format), defined(sample, format)), name
        found[name] = qsnr(x, format)
        print(f"{name:<17} {format.bits:5.2f} bits  {found[name]:6.2f} dB")
    points = sweep(x[: sized(200, 10) if quick else 2_000])
    print(f"\nfront of {len(points)} points: m, k1, k2, d2; bits; dB")
    best = -math.inf
    for point, (bits, decibels) in sorted(points.items(), key=lambda one: (one[1][0], -one[1][1])):
        if decibels > best:
            print(f"{point!s:<18} {bits:6.3f}  {decibels:6.2f}")
            best = decibels
    print()
    for name, expected in EXPECTED.items():
        within(f"QSNR of {name}, dB", found[name], expected, 0.3)
    for name, m in zip(BDR, (7, 4, 2), strict=True):
        bits, decibels = points[m, 16, 2, 1]
        most = max(other for b, other in points.values() if b <= bits)
        within(f"{name} on the front, dB", decibels, most, 0.0)


# -- speed -----------------------------------------------------------------------------------------


def least_seconds(work: Callable[[], object], seconds: float) -> float:
    """The fastest of many calls, in the thread's own time."""
    work()
    taken, begin = [], time.perf_counter()
    while len(taken) < sized(5, 1) or time.perf_counter() - begin < seconds:
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return min(taken)


def by_torchao(name: str, x: Tensor, axis: int) -> Callable[[], object] | None:
    """torchao's cast, whose codes and scales have been compared; None where there is none."""
    if name not in TORCHAO or not HAS_TORCHAO:
        return None
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def work() -> tuple[Tensor, Tensor]:
        scales, codes = to_mx(x if axis == 1 else x.t().contiguous(), TORCHAO[name], 32)
        return scales, codes

    packed = encode(x, FORMATS[name], axis)
    scales, codes = work()
    assert torch.equal(scales.view(torch.uint8), packed.scales), name
    assert torch.equal(codes.view(torch.uint8), packed.codes), name
    return work


class Cast(NamedTuple):
    """GB/s, and how many times as long torchao takes, NaN where it has no such cast or is not
    installed.
    """

    values: float
    codes: float
    torchao: float


def measured(name: str, x: Tensor, axis: int, seconds: float) -> Cast:
    """Time a format along an axis; a part of the values has been compared."""
    format = FORMATS[name]
    dtype = torch.bfloat16 if format.is_exact_in_bf16 else torch.float32
    sample = x[:100, :200].contiguous()
    assert torch.equal(rounded(sample, format, axis), defined(sample, format, axis)), name
    values = least_seconds(lambda: rounded(x, format, axis, dtype=dtype), seconds)
    codes = least_seconds(lambda: encode(x, format, axis), seconds)
    work = by_torchao(name, x, axis)
    theirs = math.nan if work is None else least_seconds(work, seconds)
    bytes_codes = x.numel() * 4 + format.bytes_row(x.shape[axis]) * x.shape[1 - axis]
    return Cast(
        x.numel() * (4 + dtype.itemsize) / values / 1e9, bytes_codes / codes / 1e9, theirs / codes
    )


def copying(seconds: float) -> float:
    """GB/s of copying, bytes read and bytes written counted; without a C compiler, as torch
    copies.
    """
    one, two = (torch.ones(sized(256, 1) << 20, dtype=torch.uint8) for _ in range(2))
    library = _library()
    if library is None:
        return 2 * one.nbytes / least_seconds(lambda: two.copy_(one), seconds) / 1e9
    copy = least_seconds(lambda: library.copy(two.data_ptr(), one.data_ptr(), one.nbytes), seconds)
    return 2 * one.nbytes / copy / 1e9


def cast_case(quick: bool) -> None:
    """Print GB/s of casts."""
    if missing():
        sys.exit(f"{missing()}: run `make setup`")
    seconds, rows = sized((0.3, 2048), (0.0, 256)) if quick else (3.0, 8192)
    x = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(1))
    copy = copying(seconds)
    print(f"{processor()}, one thread; {rows} x 4096; copying {copy:.1f} GB/s")
    print(f"{'':<13} axis   to bf16  to codes   torchao's time over ours")
    found = {}
    for name, axis in itertools.product(CAST, (1, 0)):
        cast = found[name, axis] = measured(name, x, axis, seconds)
        theirs = (
            f"{cast.torchao:10.2f}"
            if cast.torchao > 0
            else "not installed"
            if name in TORCHAO
            else "has none"
        )
        print(f"{name:<13} {axis:>4} {cast.values:9.2f} {cast.codes:9.2f}   {theirs}", flush=True)
    print()
    for axis in (1, 0):
        cast = found["mxfp8", axis]
        target(f"mxfp8 to bf16 over copying, axis {axis}", cast.values / copy, 0.5)
        target(f"mxfp8 to codes over copying, axis {axis}", cast.codes / copy, 0.5)
        if HAS_TORCHAO:
            target(f"torchao's time over ours, mxfp8, axis {axis}", cast.torchao, 4.0)
        else:
            claim = f"torchao's time over ours, mxfp8, axis {axis}"
            print_target(claim, "not measured, torchao is not installed", 4.0, None)


class _Dcnv2(torch.nn.Module):
    """The products of a DCNv2, behind its vectors."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.cross, self.deep = CrossNet(features, 3), MLP(features, (400, 400, 400))
        self.head = Head(features + 400, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cross(x), self.deep(x))
        return logits


@contextmanager
def using_units(are_used: bool) -> Iterator[None]:
    """Within this context bf16 units are as they are, or as if there were none."""
    with (
        nullcontext() if are_used else patch.object(bf16, "missing", lambda device: "not used here")
    ):
        yield


def step_case(quick: bool) -> None:
    """Print the time of a step in several precisions, over that of bf16 and of fp32, with bf16
    units and without.
    """
    rows, turns = sized((1024, 5), (64, 1)) if quick else (4096, 15)
    torch.manual_seed(0)
    model, x, names = (
        _Dcnv2(39 * 16),
        torch.randn(rows, 39 * 16),
        ["fp32", "bf16", "mxfp8", "mxfp4", "mx9", "fp8"],
    )
    has_units = not lacks_bf16(x.device)
    groups = [True, False] if has_units else [False]

    def step(name: str, are_used: bool) -> list[Tensor]:
        model.zero_grad()
        with using_units(are_used), computing(Precision(name), x.device):
            logits = model(x)
        logits.square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    exact = torch.cat([grad.flatten() for grad in step("fp32", False)])
    for are_used, name in itertools.product(groups, names[1:]):  # near, and not the same
        found = torch.cat([grad.flatten() for grad in step(name, are_used)])
        apart = float((found - exact).norm() / exact.norm())
        assert 1e-4 < apart < 0.5, f"{name}: gradients lie {apart:.2g} apart"
    taken: dict[tuple[bool, str], list[float]] = {
        side: [] for side in itertools.product(groups, names)
    }
    for _ in range(turns):
        for are_used, name in taken:
            start = time.thread_time()
            step(name, are_used)
            taken[are_used, name].append(time.thread_time() - start)
    over = {}
    for are_used in groups:
        how = (
            "with bf16 units"
            if are_used
            else "as without bf16 units"
            if has_units
            else "without bf16 units"
        )
        print(f"{processor()}, one thread, {how}; {rows} rows")
        print(f"{'':<6} ms of a step   over bf16   over fp32")
        for name in names:
            for other in ("bf16", "fp32"):
                pairs = zip(taken[are_used, name], taken[are_used, other], strict=True)
                over[are_used, name, other] = statistics.median(one / two for one, two in pairs)
            ratios = "".join(f" {over[are_used, name, other]:11.2f}" for other in ("bf16", "fp32"))
            print(f"{name:<6} {1e3 * statistics.median(taken[are_used, name]):12.1f}{ratios}")
    for are_used in groups:
        other, goal, how = ("bf16", 2.0, "with") if are_used else ("fp32", 1.4, "without")
        value = over[are_used, "mxfp8", other]
        is_met = value <= goal
        print_target(
            f"mxfp8 over {other}, {how} bf16 units", f"{value:.2f}", f"at most {goal}", is_met
        )


# -- where it loses --------------------------------------------------------------------------------


def narrow_ranges(rows: int) -> None:
    """Print relative errors of E4M3 with one scale for the tensor, and with scales of blocks by
    both rules.
    """
    random = torch.Generator().manual_seed(2)
    normal, uniform = (
        torch.randn(rows, 1024, generator=random),
        torch.rand(rows, 1024, generator=random),
    )
    numbers = {
        "uniform, 0.5 to 1": 0.5 + uniform / 2,
        "uniform, 0 to 1": uniform,
        "N(0, 1)": normal,
        "N(0, |N(0, 1)|)": drawn(rows),
        "rows 2^(10 N(0, 1)) apart": normal * torch.randn(rows, 1, generator=random).mul(10).exp2(),
    }
    ways = {
        "one scale": FORMATS["fp8"],
        "floor": FORMATS["mxfp8"],
        "ceil": replace(FORMATS["mxfp8"], rule="ceil"),
    }
    print(
        f"relative error of E4M3 {'':<7}"
        + "".join(f"{way:>11}" for way in ways)
        + "   floor over one scale"
    )
    for name, x in numbers.items():
        errors = {}
        for way, format in ways.items():
            assert torch.equal(rounded(x[:50], format), defined(x[:50], format)), (name, way)
            errors[way] = 10 ** (-qsnr(x, format) / 20)
        cells = "".join(f"{error:>11.4f}" for error in errors.values())
        print(f"{name:<30}{cells}   {errors['floor'] / errors['one scale']:.2f}")


def ratio(one: Callable[[], object], other: Callable[[], object], turns: int) -> float:
    """How many times as long one takes as another, in the thread's own time: the median over pairs
    of turns.
    """
    calls, found = 1, []
    other()
    while True:  # so many that the clock can tell
        start = time.thread_time()
        for _ in range(calls):
            other()
        if time.thread_time() - start > 2e-3:
            break
        calls *= 2
    for _ in range(turns):
        taken = []
        for work in (one, other):
            start = time.thread_time()
            for _ in range(calls):
                work()
            taken.append(time.thread_time() - start)
        found.append(taken[0] / taken[1])
    return statistics.median(found)


def thin_products(rows: int, turns: int) -> None:
    """Print the time of products of a layer in bf16 over that in fp32, where it has few inputs or
    few outputs.
    """
    if lacks_bf16(torch.device("cpu")):
        print("no bf16 units: a product in bf16 takes longer at every size")
        return
    random = torch.Generator().manual_seed(3)
    print(
        f"{processor()}, one thread; bf16 over fp32, [{rows}, K] x [K, N], the other one is {WIDE};"
        " above 1 it loses"
    )
    print(f"{'':<4}{'K: product':>12}{'with casts':>12}{'N: product':>12}{'with casts':>12}")
    for thin in (1, 2, 4, 8, 16, 32, 64):
        cells = []
        for inputs, outputs in ((thin, WIDE), (WIDE, thin)):
            x, weight = (
                torch.randn(shape, generator=random)
                for shape in ((rows, inputs), (outputs, inputs))
            )
            a, b = x.bfloat16(), weight.bfloat16()
            exact = x.double() @ weight.double().t()
            found = bf16.multiply(x, weight.t())
            assert (found - exact).norm() < 0.01 * exact.norm(), (inputs, outputs)
            works = (
                lambda: dense.product(a, b.t()),  # noqa: B023
                lambda: dense.product(x, weight.t()),  # noqa: B023
            )
            cells.append(ratio(*works, turns))
            works = (
                lambda: bf16.multiply(x, weight.t()),  # noqa: B023
                lambda: fp32.multiply(x, weight.t()),  # noqa: B023
            )
            cells.append(ratio(*works, turns))
        print(f"{thin:<4}" + "".join(f"{cell:12.2f}" for cell in cells), flush=True)


def loses_case(quick: bool) -> None:
    """Print where formats of few bits lose."""
    narrow_ranges(sized(500, 50) if quick else 5_000)
    print()
    thin_products(*(sized((1024, 7), (64, 1)) if quick else (4096, 25)))


CASES = {"qsnr": qsnr_case, "cast": cast_case, "step": step_case, "loses": loses_case}


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer numbers and less time, the same checks"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for case in options.cases:
        CASES[case](options.quick)


if __name__ == "__main__":
    main()
