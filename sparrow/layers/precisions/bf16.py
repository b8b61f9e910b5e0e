"""bf16, in which operands are rounded to nearest. Where the device has no units for it, products of
these are in fp32.

The recipe of an extension gives the same bits; this is what it comes to where it is the only one.
"""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparrow.layers.precisions import Pass, Way

OLDEST = (8, 0)  # compute capability
PAIR = ("bf16", "bf16")


def missing(device: torch.device) -> str:
    """Returns why a device has no units for bf16, or "". Without, a product takes several times as
    long as in fp32.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= OLDEST:
            return ""
        major, minor = capability
        return f"this GPU has compute capability {major}.{minor}, 8.0 has bf16 units"
    if device.type != "cpu":
        return ""
    if platform.machine() in ("x86_64", "AMD64"):
        has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:  # torch knows of ARM; where it does not say, fp32 is what is never slow
        has_units = hasattr(torch.cpu, "get_capabilities") and bool(
            torch.cpu.get_capabilities().get("bf16")
        )
    return "" if has_units else "this processor has no bf16 units"


def lacks_bf16(device: torch.device) -> bool:
    """Returns whether bf16 is slower than fp32 there: on processors without units for it."""
    return bool(missing(device))


class Formats(NamedTuple):
    """See `Passes`."""

    forward: Pass = PAIR
    input_gradient: Pass = PAIR
    weight_gradient: Pass = PAIR


class Bf16Way(NamedTuple):
    """See `Way`. has_units: whether the device has some for bf16."""

    has_units: bool
    recipe: Formats = Formats()

    def _dtype(self, formats: Pass, out: torch.dtype) -> torch.dtype:
        is_narrow = self.has_units and formats == PAIR and out == torch.bfloat16
        return torch.bfloat16 if is_narrow else torch.float32

    def by_units(self, formats: Pass, a: Tensor, b: Tensor) -> Tensor | None:
        """See `Way`. Those for bf16 are torch's own."""
        return None

    def operands(
        self, formats: Pass, a: Tensor, b: Tensor, axes: tuple[int, int], out: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `Way`."""
        dtype = self._dtype(formats, out)
        return _rounded(a, formats[0], dtype), _rounded(b, formats[1], dtype)

    def weight(self, weight: Tensor, out: torch.dtype) -> Tensor:
        """See `Way`."""
        return _rounded(weight, "bf16", self._dtype(PAIR, out))

    def with_weight(self, out: torch.dtype) -> Way:
        """See `Way`."""
        as_it_is = "bf16" if self._dtype(PAIR, out) == torch.bfloat16 else "fp32"
        return self._replace(recipe=self.recipe._replace(forward=("bf16", as_it_is)))

    @property
    def rounds_weights_once(self) -> bool:
        """See `Way`."""
        return self.recipe.forward == PAIR


class Bf16(NamedTuple):
    """See `Scheme`. has_units: whether the device has some for bf16."""

    has_units: bool
    between: torch.dtype = torch.bfloat16

    def way(self, own: Any, is_high: bool) -> Way | None:
        """See `Scheme`."""
        assert own is None, "sites have recipes of their own in a precision that names them"
        return None if is_high else Bf16Way(self.has_units)

    def formats(self) -> dict[str, list[str]]:
        """See `Scheme`."""
        if self.has_units:
            return {"native": ["bf16"], "emulated": [], "by": []}
        return {"native": [], "emulated": ["bf16"], "by": ["fp32"]}

    def mixing(self, model: nn.Module) -> str:
        """See `Scheme`."""
        return ""


def scheme(precision: Any, device: torch.device) -> Bf16:
    """See the package."""
    return Bf16(not missing(device))


def _rounded(x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if name == "fp32" else x.to(torch.bfloat16).to(dtype)
