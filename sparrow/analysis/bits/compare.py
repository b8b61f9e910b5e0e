"""The first product in which two models part, on rows that both know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparrow.analysis.bits.calibrate import watched
from sparrow.core.errors import UserError
from sparrow.serving import Scorer
from sparrow.serving.products import joined

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
    """Every product of two models, in the order in which it runs, and by how much their scores differ at most.

    first: the first one whose outputs lie apart by more than PARTED; None where none does.
    """

    products: list[Parting]
    scores: float

    @property
    def first(self) -> Parting | None:
        """The first product whose inputs or outputs lie apart."""
        return next((one for one in self.products if max(one.inputs, one.outputs) > PARTED), None)


def partings(a: Scorer, b: Scorer) -> Partings:
    """Run two models on the rows that are kept with the first. Returns where their values part.

    Raises:
        UserError: when the models are not of one kind.
    """
    _, rows = a.kept()
    (ours, scores), (theirs, others) = _run(a, rows), _run(b, rows)
    if list(ours) != list(theirs) or any(x.shape != theirs[site][0].shape for site, (x, _) in ours.items()):
        raise UserError(
            f"{b.folder.path}: not a model of the same kind as {a.folder.path}; compare models of one architecture"
        )
    found = [
        Parting(site=site, inputs=_apart(x, theirs[site][0]), outputs=_apart(y, theirs[site][1]))
        for site, (x, y) in ours.items()
    ]
    return Partings(products=found, scores=float(np.abs(others - scores).max()))


def _run(scorer: Scorer, rows: list[dict[str, object]]) -> tuple[dict[str, tuple[Tensor, Tensor]], np.ndarray]:
    """Returns the inputs and outputs of each product, in order, and the scores."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def see(site: str, parts: Sequence[Tensor], y: Tensor) -> None:
        seen.setdefault(site, (joined(parts).clone(), y.float().clone()))

    with watched(scorer.model, see):
        scores = scorer.score(rows)
    return seen, scores


def _apart(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(a.double()))
    apart = float(torch.linalg.vector_norm(b.double() - a.double()))
    return apart / size if size else float(apart > 0)
