"""Precisions of matrix products. File `x.py` is the precision "x"; extensions have others, under
their names.

A member has a function `scheme(precision, device)`. Products of fp32 need none: they are computed
as they stand. The member RECIPES computes where sites have recipes of their own. It also has
functions for these: see `layers.precision`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparrow.core.config import Family

RECIPES = ".toml"  # no name that a person can give: it ends like a recipe file, and names none
PRECISIONS = Family(__name__)

Pass = tuple[str, ...]
"""The formats of two operands, by name."""


class Passes(Protocol):
    """The formats of the three products of a layer: y = x W^T, dx = dy W and dW = dy^T x."""

    @property
    def forward(self) -> Pass:
        """Of x and W."""
        ...

    @property
    def input_gradient(self) -> Pass:
        """Of dy and W."""
        ...

    @property
    def weight_gradient(self) -> Pass:
        """Of dy and x."""
        ...


class Way(Protocol):
    """How a product is computed where it is not as it stands."""

    @property
    def recipe(self) -> Passes:
        """The formats of its operands."""
        ...

    def by_units(self, formats: Pass, a: Tensor, b: Tensor) -> Tensor | None:
        """Returns a b by units of the device for these formats, fp32; None where it has none for
        these shapes.
        """
        ...

    def operands(
        self, formats: Pass, a: Tensor, b: Tensor, axes: tuple[int, int], out: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns both operands of a product rounded, in one type.

        Args:
            formats: one of the recipe's passes, or turned round.
            a, b: matrices, or several.
            axes: those that are summed over, -1 or -2.
            out: the type that the product is wanted in.
        """
        ...

    def weight(self, weight: Tensor, out: torch.dtype) -> Tensor:
        """Returns a weight [out, in] as the forward takes it: rounded, where that can be done
        once.
        """
        ...

    def with_weight(self, out: torch.dtype) -> Way:
        """Returns how the forward is computed of a weight that `weight` has made."""
        ...

    @property
    def rounds_weights_once(self) -> bool:
        """Whether W is rounded to the same numbers in its two products: where rounding looks at no
        neighbours.
        """
        ...


class Scheme(Protocol):
    """How the products of a model are computed in a precision on a device."""

    @property
    def between(self) -> torch.dtype:
        """The type of what stands between two products."""
        ...

    def way(self, own: Any, is_high: bool) -> Way | None:
        """Returns how a site computes; None in the type of its operands.

        Args:
            own: the recipe that the site was told.
            is_high: whether it ignores the recipe of all others.
        """
        ...

    def formats(self) -> dict[str, list[str]]:
        """Returns the formats that the device multiplies by itself ("native"), and those that it
        emulates.

        The latter are "emulated", by products in the types of "by". fp32 is left out.
        """
        ...

    def mixing(self, model: nn.Module) -> str:
        """Returns which sites make a row's score depend on the rows beside it, in words; "" if none
        does.
        """
        ...
