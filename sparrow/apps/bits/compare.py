"""The first product in which two models part, on rows that both know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparrow.apps.bits.calibrate import watched
from sparrow.core.errors import UserError
from sparrow.serving import Scorer
from sparrow.serving.products import join_inputs

PARTED = 1e-4  # relative: far above what another order of sums makes


@dataclass(frozen=True, kw_only=True)
class Parting:
    """How far two models lie apart around a product. Errors are relative, |b - a| / |a|.

    site: the product. inputs: of what it reads, made by all before it. outputs: of what it gives.
    """

    site: str
    inputs: float
    outputs: float


@dataclass(frozen=True, kw_only=True)
class Partings:
    """Every product of two models, in the order in which it runs, and by how much their scores
    differ at most.

    first: the first one whose outputs lie apart by more than PARTED; None where none does.
    """

    products: list[Parting]
    scores: float

    @property
    def first(self) -> Parting | None:
        """The first product whose inputs or outputs lie apart."""
        return next(
            (product for product in self.products if max(product.inputs, product.outputs) > PARTED),
            None,
        )


def partings(a: Scorer, b: Scorer) -> Partings:
    """Run two models on the golden rows of the first. Returns where their values part.

    Raises:
        UserError: when the models are not of one kind.
    """
    _, rows = a.golden_rows()
    a_values, a_scores = _run(a, rows)
    b_values, b_scores = _run(b, rows)
    if list(a_values) != list(b_values) or any(
        x.shape != b_values[site][0].shape for site, (x, _) in a_values.items()
    ):
        raise UserError(
            f"{b.folder.path}: not a model of the same kind as {a.folder.path}; compare models of"
            " one architecture"
        )
    products = [
        Parting(
            site=site, inputs=_apart(x, b_values[site][0]), outputs=_apart(y, b_values[site][1])
        )
        for site, (x, y) in a_values.items()
    ]
    return Partings(products=products, scores=float(np.abs(b_scores - a_scores).max()))


def _run(
    scorer: Scorer, rows: list[dict[str, object]]
) -> tuple[dict[str, tuple[Tensor, Tensor]], np.ndarray]:
    """Returns the inputs and outputs of each product, in order, and the scores."""
    values: dict[str, tuple[Tensor, Tensor]] = {}

    def see(site: str, parts: Sequence[Tensor], y: Tensor) -> None:
        values.setdefault(site, (join_inputs(parts).clone(), y.float().clone()))

    with watched(scorer.model, see):
        scores = scorer.score(rows)
    return values, scores


def _apart(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(a.double()))
    apart = float(torch.linalg.vector_norm(b.double() - a.double()))
    return apart / size if size else float(apart > 0)
