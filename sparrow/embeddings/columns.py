"""Pooled vectors of components -> those of tables, all in one call, where they are linear in
them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sparrow.core.functions import applied
from sparrow.embeddings.spec import Feature, TableSpec
from sparrow.kernels import Impl
from sparrow.kernels.project import Part, project, project_backward
from sparrow.layers.site import Site


class Columns:
    """Where the pooled vectors of components go among those of tables, which stand side by side as
    well.

    Args:
        features: of the tables, in their order.
        spec_of: feature -> its table.
        combines: table -> what makes its vectors, for tables that have such.
        products: features whose components' vectors may arrive multiplied.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        spec_of: Mapping[str, TableSpec],
        combines: Mapping[str, Any],
        products: Collection[str],
    ) -> None:
        self._combines = [
            (combines[spec.name], _dims(spec))
            for spec in _distinct(spec_of)
            if spec.name in combines
        ]
        self._products = bool(products)
        self._sites: list[Site] = []
        for combine in combines.values():
            self._sites += [module for module in combine.modules() if isinstance(module, Site)]
        self._is_linear = True
        numbers = {}  # table -> the number of its first matrix
        count = 0
        for spec in _distinct(spec_of):
            numbers[spec.name] = count
            if spec.name in combines and combines[spec.name].is_linear:
                count += sum(
                    weight is not None for _, weight in combines[spec.name].parts(_dims(spec))
                )
        self.parts: list[Part] = []
        self.width = first = 0
        for feature in features:
            spec = spec_of[feature.name]
            combine = combines.get(spec.name)
            # column, width, has a matrix
            moves: list[tuple[int, int, bool]] = [(0, spec.dim, False)]
            if combine is not None and combine.is_linear:
                self._is_linear &= not (
                    spec.addressing.traits.is_partial and feature.pooling == "mean"
                )
                dims = _dims(spec)
                moves = [
                    (at, dim, weight is not None)
                    for (at, weight), dim in zip(combine.parts(dims), dims, strict=True)
                ]
            else:
                self._is_linear &= combine is None or feature.name in products
            number = numbers[spec.name]
            for at, dim, has_matrix in moves:
                self.parts.append(Part(first, dim, self.width + at, number if has_matrix else -1))
                first += dim
                number += has_matrix
            self.width += spec.dim
        self._moves = any(part.first != part.to or part.weight >= 0 for part in self.parts)

    def fits(self, multiplied: bool) -> bool:
        """Whether this says all of a batch. multiplied: whether the vectors of products arrive
        multiplied.

        A recipe has its products one by one.
        """
        is_told = any(site.way is not None for site in self._sites)
        return (
            self._is_linear
            and self._products == multiplied
            and not is_told
            and not torch.compiler.is_compiling()
        )

    def __call__(self, x_BE: Tensor, impl: Impl) -> Tensor:
        """Returns the tables' vectors. x_BE: those of the components. impl: see
        `sparrow.kernels`.
        """
        if not self._moves:
            return x_BE
        weights: list[Tensor] = []
        for combine, dims in self._combines:
            if combine.is_linear:
                weights += [weight for _, weight in combine.parts(dims) if weight is not None]
        out: Tensor = applied(
            _Project, x_BE, self.parts, self.width, "auto" if impl == "triton" else impl, *weights
        )
        return out


class _Project(Function):
    @staticmethod
    def forward(
        ctx: Any, x_BE: Tensor, parts: Sequence[Part], width: int, impl: Impl, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_BE, *weights)
        ctx.parts = parts
        ctx.impl = impl
        return project(x_BE, weights, parts, width, impl=impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_BE, *weights = ctx.saved_tensors
        grad_x, grads = project_backward(grad, x_BE, weights, ctx.parts, impl=ctx.impl)
        return grad_x, None, None, None, *grads


def _dims(spec: TableSpec) -> list[int]:
    return [component.dim for component in spec.components]


def _distinct(spec_of: Mapping[str, TableSpec]) -> list[TableSpec]:
    return list({spec.name: spec for spec in spec_of.values()}.values())
