"""Recipes: in which formats the operands of a matrix product are, in its forward and in both of its
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparrow.core.errors import UserError, suggest
from sparrow.extensions.low_precision.candidates import Candidate
from sparrow.kernels import quantise
from sparrow.layers.precisions import Pass
from sparrow.numerics.formats import FORMATS, Format
from sparrow.numerics.rounding import Rounding


class Operand(NamedTuple):
    """How the operand of a product is rounded. format: None leaves it as it is."""

    format: Format | None
    how: Rounding = "nearest"

    @property
    def is_exact_in_bf16(self) -> bool:
        """Whether its values are bfloat16 numbers, but for those below 2**-126."""
        return self.format is not None and self.format.is_exact_in_bf16

    @property
    def is_scaled_as_one(self) -> bool:
        """Whether all of its numbers share one scale."""
        return self.format is not None and self.format.block == "tensor"


OPERANDS = {
    "fp32": Operand(None),
    "bf16-truncate": Operand(FORMATS["bf16"], "zero"),
    **{name: Operand(format) for name, format in FORMATS.items()},
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The formats of a product y = x W^T, named as in `numerics.FORMATS`, or "fp32", or
    "bf16-truncate".

    Each operand is rounded from the original, along the dimension that is summed over
    (microxcaling's recipe; OCP MX, arXiv 2310.10537). Gradients pass straight through the rounding.
    In the product of two activations the second one takes the place of W.

    Args:
        forward: of x and W, along the inputs.
        input_gradient: of dy and W in dx = dy W, along the outputs.
        weight_gradient: of dy and x in dW = dy^T x, along the batch.

    Raises:
        UserError: for a format that there is not.
    """

    forward: Pass
    input_gradient: Pass
    weight_gradient: Pass

    def __post_init__(self) -> None:
        for pass_name in ("forward", "input_gradient", "weight_gradient"):
            names = getattr(self, pass_name)
            if len(names) != 2:
                raise UserError(
                    f"{pass_name}: {list(names)} names {len(names)} format(s); name those of the"
                    " two operands"
                )
            for name in names:
                if name not in OPERANDS:
                    raise UserError(
                        f"{pass_name}: there is no format {name!r}{suggest(name, OPERANDS)}"
                    )

    @classmethod
    def of(
        cls, format: str, gradient: str | None = None, weight_gradient: str | None = None
    ) -> Recipe:
        """Returns a recipe.

        Args:
            format: of activations and weights.
            gradient: of dy, by default the same.
            weight_gradient: of both operands of dW, by default those above.
        """
        dy = gradient or format
        last = (dy, format) if weight_gradient is None else (weight_gradient, weight_gradient)
        return cls(forward=(format, format), input_gradient=(dy, format), weight_gradient=last)

    @property
    def passes(self) -> tuple[Pass, Pass, Pass]:
        """Its three products."""
        return self.forward, self.input_gradient, self.weight_gradient


def is_exact_in_bf16(formats: Pass) -> bool:
    """Returns whether both operands are bfloat16 numbers."""
    return all(OPERANDS[name].is_exact_in_bf16 for name in formats)


class RecipeWay(NamedTuple):
    """See `Way`: its recipe, whether this device has units for bf16, and candidates for other
    units.
    """

    recipe: Recipe
    has_bf16: bool
    units: tuple[Candidate, ...] = ()

    def dtype(self, formats: Pass, out: torch.dtype) -> torch.dtype:
        """Returns the type of a product's operands.

        It is bf16 where that holds their values, the device has units for it, and what becomes of
        the product is bf16 too. Else it is fp32, with the same factors.

        Args:
            formats: one of the recipe's passes.
            out: the type that the product is wanted in.
        """
        is_narrow = out == torch.bfloat16 and self.has_bf16 and is_exact_in_bf16(formats)
        return torch.bfloat16 if is_narrow else torch.float32

    def operands(
        self, formats: Pass, a: Tensor, b: Tensor, axes: tuple[int, int], out: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns both operands of a product rounded. axes: those that are summed over, -1 or -2;
        see `dtype`.
        """
        dtype = self.dtype(formats, out)
        return rounded(a, formats[0], axes[0], dtype), rounded(b, formats[1], axes[1], dtype)

    def by_units(self, formats: Pass, a: Tensor, b: Tensor) -> Tensor | None:
        """Returns a b by the candidate of these formats, fp32; None where there is none that takes
        these shapes.
        """
        for unit in self.units:
            if formats == unit.FORMATS and unit.takes(a, b):
                return unit.multiply(a, b).contiguous()
            if formats[::-1] == unit.FORMATS and unit.takes(b.mT, a.mT):
                return unit.multiply(b.mT, a.mT).mT.contiguous()
        return None

    @property
    def _forward_is_by_units(self) -> bool:
        forward = self.recipe.forward
        return any(unit.FORMATS in (forward, forward[::-1]) for unit in self.units)

    def weight(self, weight: Tensor, out: torch.dtype) -> Tensor:
        """Returns a weight [out, in] as the forward takes it: rounded, if no candidate does that.
        out: see `dtype`.
        """
        if self._forward_is_by_units:
            return weight
        return rounded(weight, self.recipe.forward[1], -1, self.dtype(self.recipe.forward, out))

    def with_weight(self, out: torch.dtype) -> RecipeWay:
        """Returns how the forward is computed of a weight that `weight` has made."""
        if self._forward_is_by_units:
            return self
        as_it_is = "bf16" if self.dtype(self.recipe.forward, out) == torch.bfloat16 else "fp32"
        return self._replace(
            recipe=replace(self.recipe, forward=(self.recipe.forward[0], as_it_is))
        )

    @property
    def rounds_weights_once(self) -> bool:
        """Whether W is rounded to the same numbers in its two products: where rounding looks at no
        neighbours.
        """
        (_, first), (_, second) = self.recipe.forward, self.recipe.input_gradient
        format = OPERANDS[first].format
        return first == second and format is not None and format.block is None


def rounded(x: Tensor, name: str, axis: int, dtype: torch.dtype) -> Tensor:
    """Returns the values of an operand.

    Args:
        x: a matrix, or several.
        name: the format's.
        axis: along which its blocks run, -1 or -2.
        dtype: bfloat16 if it holds the values, or float32.
    """
    format, how = OPERANDS[name]
    if format is None:
        return x.to(dtype)
    if not x.is_contiguous() and x.mT.is_contiguous():  # rounded where it lies
        return rounded(x.mT, name, -3 - axis, dtype).mT
    return quantise.rounded(x, format, axis, how, dtype=dtype)
