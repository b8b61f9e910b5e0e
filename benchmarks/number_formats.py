"""Number formats: how near their values are, and how fast a cast is.

    python benchmarks/number_formats.py                # under five minutes
    python benchmarks/number_formats.py --quick        # under a minute, the same checks
    python benchmarks/number_formats.py --cases cast

`qsnr`: decibels of signal over error, on rows of N(0, |N(0, 1)|), as in arXiv 2302.08007. Then a sweep over the two
levels of BDR: bits of mantissa 2 to 8, blocks (k1) of 8 to 128, pairs (k2) of 1 to 8, bits of shift (d2) 0 to 3. A
point is on the front if no other has as few bits and more decibels. Bits are those of storage, not of silicon.

`cast`: one thread, GB/s of bytes read and written, along rows and along columns: fp32 to rounded bf16, and to codes and
scales. Beside it stand the bandwidth of copying, which a cast may reach half of, and torchao's `to_mx` where it is
installed; along columns it is given a transposed copy, whose making counts. Time is the thread's own, so that other
programs do not count.

`step`: forward and backward of the products of a DCNv2 (the sizes of `vs_fuxictr.py`: 39 vectors of 16, three cross
layers, an MLP of three times 400; 4,096 rows, one thread), in precisions that run natively or are emulated. Sides take
turns, and ratios are medians over turns. What is emulated has no speed of its own: this is what emulating costs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from embedding_bag import target
from limits import _library
from row_formats import processor
from torch import Tensor

from sparrow.core.memory import keep_freed_memory
from sparrow.interactions import CrossNet
from sparrow.kernels import missing
from sparrow.kernels.quantise import encode, rounded
from sparrow.layers import MLP, Head, Precision, computing
from sparrow.layers.precision import lacks_bf16
from sparrow.numerics import FORMATS, Format, whole
from sparrow.numerics import rounded as defined

EXPECTED = {"mx9": 46.6, "mx6": 28.4, "mx4": 15.8, "fp8": 31.5, "fp8-e5m2": 25.6}  # decibels
BDR = ("mx9", "mx6", "mx4")
CAST = ("mxfp8", "mxfp6", "mxfp4", "mxint8", "mx9", "mx6", "mx4", "fp8-rowwise")
TORCHAO = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}


# -- nearness ----------------------------------------------------------------------------------------------------------


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
    for m, k1, k2, d2 in itertools.product(range(2, 9), (8, 16, 32, 64, 128), (1, 2, 4, 8), range(4)):
        if d2 == 0 and k2 > 1:
            continue  # the same as k2 = 1
        format = Format(element=whole(m), block=k1, pair=k2, shift_bits=d2)
        found[m, k1, k2, d2] = (format.bits, qsnr(x, format))
    return found


def within(name: str, value: float, goal: float, by: float) -> None:
    """A line of a target that is not to be far away."""
    verdict = "met" if abs(value - goal) <= by else "missed"
    print(f"TARGET {name}: {value:.2f} (goal {goal:.2f}, within {by}) {verdict}")


def qsnr_case(quick: bool) -> None:
    """Print decibels of all formats and of the sweep's front."""
    x = drawn(1_000 if quick else 10_000)
    sample = x[:50]
    found = {}
    for name, format in FORMATS.items():
        assert torch.equal(rounded(sample, format), defined(sample, format)), name
        found[name] = qsnr(x, format)
        print(f"{name:<17} {format.bits:5.2f} bits  {found[name]:6.2f} dB")
    points = sweep(x[: 200 if quick else 2_000])
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


# -- speed -------------------------------------------------------------------------------------------------------------


def least_seconds(work: Callable[[], object], seconds: float) -> float:
    """The fastest of many calls, in the thread's own time."""
    work()
    taken, begin = [], time.perf_counter()
    while len(taken) < 5 or time.perf_counter() - begin < seconds:
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return min(taken)


def by_torchao(name: str, x: Tensor, axis: int) -> Callable[[], object] | None:
    """torchao's cast, whose codes and scales have been compared; None where there is none."""
    if name not in TORCHAO or importlib.util.find_spec("torchao") is None:
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
    """GB/s, and how many times as long torchao takes."""

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
    return Cast(x.numel() * (4 + dtype.itemsize) / values / 1e9, bytes_codes / codes / 1e9, theirs / codes)


def copying(seconds: float) -> float:
    """GB/s of copying, bytes read and bytes written counted; without a C compiler, as torch copies."""
    one, two = (torch.ones(256 << 20, dtype=torch.uint8) for _ in range(2))
    library = _library()
    if library is None:
        return 2 * one.nbytes / least_seconds(lambda: two.copy_(one), seconds) / 1e9
    copy = least_seconds(lambda: library.copy(two.data_ptr(), one.data_ptr(), one.nbytes), seconds)
    return 2 * one.nbytes / copy / 1e9


def cast_case(quick: bool) -> None:
    """Print GB/s of casts."""
    if missing():
        sys.exit(f"{missing()}: run `make setup`")
    seconds, rows = (0.3, 2048) if quick else (3.0, 8192)
    x = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(1))
    copy = copying(seconds)
    print(f"{processor()}, one thread; {rows} x 4096; copying {copy:.1f} GB/s")
    print(f"{'':<13} axis   to bf16  to codes   torchao's time over ours")
    found = {}
    for name, axis in itertools.product(CAST, (1, 0)):
        cast = found[name, axis] = measured(name, x, axis, seconds)
        print(f"{name:<13} {axis:>4} {cast.values:9.2f} {cast.codes:9.2f} {cast.torchao:10.2f}", flush=True)
    print()
    for axis in (1, 0):
        cast = found["mxfp8", axis]
        target(f"mxfp8 to bf16 over copying, axis {axis}", cast.values / copy, 0.5)
        target(f"mxfp8 to codes over copying, axis {axis}", cast.codes / copy, 0.5)
        target(f"torchao's time over ours, mxfp8, axis {axis}", cast.torchao, 4.0)


class _Dcnv2(torch.nn.Module):
    """The products of a DCNv2, behind its vectors."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.cross, self.deep = CrossNet(features, 3), MLP(features, (400, 400, 400))
        self.head = Head(features + 400, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cross(x), self.deep(x))
        return logits


def step_case(quick: bool) -> None:
    """Print the time of a step in several precisions, over that of bf16 and of fp32."""
    rows, turns = (1024, 5) if quick else (4096, 15)
    torch.manual_seed(0)
    model, x, names = _Dcnv2(39 * 16), torch.randn(rows, 39 * 16), ["fp32", "bf16", "mxfp8", "mxfp4", "mx9", "fp8"]

    def step(name: str) -> list[Tensor]:
        model.zero_grad()
        with computing(Precision(name), x.device):
            logits = model(x)
        logits.square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    exact = torch.cat([grad.flatten() for grad in step("fp32")])
    for name in names[1:]:  # near, and not the same
        found = torch.cat([grad.flatten() for grad in step(name)])
        apart = float((found - exact).norm() / exact.norm())
        assert 1e-4 < apart < 0.5, f"{name}: gradients lie {apart:.2g} apart"
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            start = time.thread_time()
            step(name)
            taken[name].append(time.thread_time() - start)
    has_units = not lacks_bf16(x.device)
    print(f"{processor()}, one thread, {'with' if has_units else 'without'} bf16 units; {rows} rows")
    print(f"{'':<6} ms of a step   over bf16   over fp32")
    over = {}
    for name in names:
        for other in ("bf16", "fp32"):
            pairs = zip(taken[name], taken[other], strict=True)
            over[name, other] = statistics.median(one / two for one, two in pairs)
        ratios = f"{over[name, 'bf16']:11.2f} {over[name, 'fp32']:11.2f}"
        print(f"{name:<6} {1e3 * statistics.median(taken[name]):12.1f} {ratios}")
    other, goal = ("bf16", 2.0) if has_units else ("fp32", 1.4)
    value = over["mxfp8", other]
    print(f"TARGET mxfp8 over {other}: {value:.2f} (goal at most {goal}) {'met' if value <= goal else 'missed'}")


CASES = {"qsnr": qsnr_case, "cast": cast_case, "step": step_case}


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer numbers and less time, the same checks")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for case in options.cases:
        CASES[case](options.quick)


if __name__ == "__main__":
    main()
