"""Writes oracles.safetensors beside this file: numbers, and what torchao, microxcaling and AMD
Quark make of them.

    PYTHONPATH=microxcaling:. python tests/numerics/record_oracles.py          # with torch, torchao, amd-quark
    PYTHONPATH=microxcaling:. python tests/numerics/record_oracles.py linear   # its `Linear` alone, with torch

microxcaling is a checkout of github.com/microsoft/microxcaling (7bc4195). The first import of AMD
Quark compiles. The numbers are stored, as random numbers may differ elsewhere. The script also
compares live what it does not store: more numbers, and microxcaling's `Linear` in all its formats
with products of operands that Sparrow rounds, bit for bit.

Left out of comparisons: torchao where the scale byte is 0, which it takes for half of it;
microxcaling in rows beside powers of two, where it takes a logarithm that is rounded up; and
subnormal numbers in AMD Quark, which makes them 0.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparrow.numerics.bits import unpack
from sparrow.numerics.blocks import encode, rounded
from sparrow.numerics.formats import FORMATS

RECORD = Path(__file__).with_name("oracles.safetensors")
MX = {  # ours, torchao's, microxcaling's
    "mxfp8": (torch.float8_e4m3fn, "fp8_e4m3"),
    "mxfp8-e5m2": (torch.float8_e5m2, "fp8_e5m2"),
    "mxfp6": ("fp6_e2m3", "fp6_e2m3"),
    "mxfp6-e3m2": ("fp6_e3m2", "fp6_e3m2"),
    "mxfp4": (torch.float4_e2m1fn_x2, "fp4_e2m1"),
    "mxint8": (None, "int8"),
}
LINEARS = ("mxfp8", "mxfp4")  # whose results are recorded


def numbers(rows: int, seed: int) -> Tensor:
    """Rows of many sizes [rows, 64]: ties, zeros, the largest and the least, one in four beside
    powers of two.
    """
    random = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(rows, 64, generator=random)
        * torch.randn(rows, 1, generator=random).mul(20).exp2()
    )
    x[::4] = x[::4].bfloat16().float()  # ties between elements
    powers = x[1::4].abs().log2().floor().exp2()
    x[1::4] = (
        torch.nextafter(powers, powers * torch.randint(-1, 2, powers.shape, generator=random))
        * x[1::4].sign()
    )
    x[2::8, ::3] = 0.0
    x[3::16, 5] = -3.3e38
    x[7::16] *= 2.0**-120
    return x


def by_torchao(x: Tensor, element: Any) -> tuple[Tensor, Tensor]:
    """Scales, and codes: a byte each, or two in a byte."""
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, codes = to_mx(x, element, 32)
    return scales.view(torch.uint8), codes.view(torch.uint8)


def by_microxcaling(x: Tensor, element: str, axis: int) -> Tensor:
    """Values."""
    from mx.mx_ops import quantize_mx_op
    from mx.specs import finalize_mx_specs

    specs = finalize_mx_specs(
        {"w_elem_format": element, "block_size": 32, "round": "even", "scale_bits": 8}
    )
    out: Tensor = quantize_mx_op(
        x, specs, elem_format=element, axes=[axis], round="even", block_size=32
    )
    return out


def by_quark(x: Tensor, name: str) -> Tensor:
    """Values. The package's own import wants transformers and more; a stand-in for it wants
    nothing.
    """
    if "quark.torch" not in sys.modules:
        place = importlib.util.find_spec("quark").submodule_search_locations[0]
        sys.modules["quark.torch"] = ModuleType("quark.torch")
        sys.modules["quark.torch"].__path__ = [f"{place}/torch"]
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx6_mx9

    bits = {"mx9": 8, "mx6": 5}[name]
    out: Tensor = fake_quantize_mx6_mx9(x, -1, 16, quant_bit=bits, sub_block_size=2)
    return out


def linear_of(
    element: str, x: Tensor, weight: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """microxcaling's Linear: y, dX and dW."""
    import mx
    from mx.specs import finalize_mx_specs

    specs = finalize_mx_specs(
        {
            "w_elem_format": element,
            "a_elem_format": element,
            "block_size": 32,
            "round": "even",
            "scale_bits": 8,
            "bfloat": 0,
            "fp": 0,
            "custom_cuda": False,
            "quantize_backprop": True,
        }
    )
    layer = mx.Linear(weight.shape[1], weight.shape[0], bias=False, mx_specs=specs)
    x = x.clone().requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(weight)
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad


def check_linear(element: str, name: str) -> None:
    """microxcaling's Linear, forward and backward, and three products of operands that Sparrow
    rounds.
    """
    random, format = torch.Generator().manual_seed(0), FORMATS[name]
    x, weight, grad = (
        torch.randn(shape, generator=random) for shape in ((90, 100), (70, 100), (90, 70))
    )
    y, grad_x, grad_weight = linear_of(element, x, weight, grad)
    assert torch.equal(y, torch.nn.functional.linear(rounded(x, format), rounded(weight, format)))
    assert torch.equal(grad_x, rounded(grad, format) @ rounded(weight, format, 0))
    assert torch.equal(grad_weight, rounded(grad, format, 0).t() @ rounded(x, format, 0))
    print(f"microxcaling's Linear in {element}: forward, dX, dW bitwise")


def linears() -> dict[str, Tensor]:
    """microxcaling's Linear on multiples of 1/128 below 4. Every sum is exact in fp32, so
    processors agree on bits.
    """
    random = torch.Generator().manual_seed(2)
    # a whole block and a short one along each axis
    shapes = {"x": (33, 34), "weight": (33, 34), "grad": (33, 33)}
    given = {
        name: (torch.randn(shape, generator=random) * 128).round().clamp(-511, 511) / 128
        for name, shape in shapes.items()
    }
    found = {f"linear {name}": x for name, x in given.items()}
    for name in LINEARS:
        results = linear_of(MX[name][1], **given)
        found |= {
            f"{name} linear {of}": x for of, x in zip(("y", "dx", "dw"), results, strict=True)
        }
    return found


def record_linears() -> None:
    """Record microxcaling's Linear anew, and keep the rest."""
    with safe_open(RECORD, "pt") as file:
        versions = file.metadata()
    for name, (_, microxcaling) in MX.items():
        check_linear(microxcaling, name)
    save_file({**load_file(RECORD), **linears()}, RECORD, versions)


def compared(what: str, theirs: Tensor, ours: Tensor, counts: Tensor) -> None:
    """Print how many are compared, which are all equal."""
    assert theirs.shape == ours.shape, what
    assert torch.equal(theirs[counts], ours[counts]), what
    print(f"{what}: equal, {int(counts.sum()):,} of {counts.numel():,} compared")


def main() -> None:
    """Record, and compare more than is recorded."""
    found: dict[str, Tensor] = {"numbers": numbers(32, 0)}
    many = numbers(20_000, 1)
    beside = torch.zeros_like(many, dtype=torch.bool)
    beside[1::4] = True
    for name, (torchao, microxcaling) in MX.items():
        format = FORMATS[name]
        if torchao is not None:
            found[f"{name} scales"], found[f"{name} codes"] = by_torchao(found["numbers"], torchao)
            scales, codes = by_torchao(many, torchao)
            packed = encode(many, format)
            compared(
                f"{name} scales, torchao",
                scales,
                packed.scales,
                torch.ones_like(scales, dtype=torch.bool),
            )
            ours = (
                packed.codes
                if format.element.bits != 6
                else unpack(packed.codes, 6, 64).to(torch.uint8)
            )
            counts = (scales > 0).repeat_interleave(codes.shape[1] // 2, 1)
            compared(f"{name} codes, torchao", codes, ours, counts)
        for axis in (0, 1):
            given = many[~beside[:, 0]] if axis == 0 else many
            counts = ~beside if axis == 1 else torch.ones_like(given, dtype=torch.bool)
            theirs = by_microxcaling(given, microxcaling, axis)
            compared(
                f"{name} values, axis {axis}, microxcaling",
                theirs,
                rounded(given, format, axis),
                counts,
            )
        found[f"{name} values"] = by_microxcaling(found["numbers"], microxcaling, 1)
        check_linear(microxcaling, name)
    for name in ("mx9", "mx6"):
        found[f"{name} values"] = by_quark(found["numbers"], name)
        compared(
            f"{name}, AMD Quark",
            by_quark(many, name),
            rounded(many, FORMATS[name]),
            many.abs() >= 2.0**-126,
        )
    found |= linears()
    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "torchao", "amd-quark")
    }
    save_file(found, RECORD, versions)
    print(f"{RECORD}: {RECORD.stat().st_size} bytes, {versions}")


if __name__ == "__main__":
    record_linears() if sys.argv[1:] == ["linear"] else main()
