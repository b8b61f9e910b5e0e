"""Probabilities that are right on average: what a served model's scores pass through last.

One file per kind: file `x.py` has a dataclass `Config` with what was fitted, and `fitted`, which fits it. No kind turns
the order of two scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from sparrow.core import Batch
from sparrow.core.config import Family, from_dict, read_toml, to_dict, write_toml
from sparrow.core.errors import UserError
from sparrow.core.files import write_text
from sparrow.metrics import labelled

FILE = "calibrator.toml"
KINDS = Literal["none", "logistic", "isotonic"]
Scores = Callable[[Batch], Tensor]

_FAMILY = Family("sparrow.serving.calibrators")


class Calibrator(Protocol):
    """What a kind's `Config` offers."""

    def __call__(self, scores_B: Tensor) -> Tensor:
        """Returns probabilities [B] of the log on which it was fitted."""
        ...


def fitted(
    kind: str, scores_BT: Tensor, labels_BT: Tensor, weights_B: Tensor | None, names: Sequence[str]
) -> tuple[Calibrator, ...]:
    """Returns a calibrator for each label.

    Args:
        kind: "logistic" or "isotonic".
        scores_BT: probabilities, of rows that the model did not learn from.
        labels_BT: 0 or 1, NaN where one is missing.
        weights_B: of the rows.
        names: of the labels.

    Raises:
        UserError: when the labels of one are all alike.
    """
    fit: Any = import_module(f"{__name__}.{kind}")
    weights_B = torch.ones(len(scores_BT)) if weights_B is None else weights_B
    made = []
    for name, scores_B, labels_B in zip(names, scores_BT.double().T, labels_BT.double().T, strict=True):
        y_B, p_B, mass_B = labelled(labels_B, scores_B, weights_B.double())
        if not 0 < float((mass_B * y_B).sum()) < float(mass_B.sum()):
            raise UserError(f"--calibrate: label {name!r} is the same in all rows of the valid part; leave it out")
        made.append(fit.fitted(p_B, y_B, mass_B))
    return tuple(made)


def calibrated(score: Scores, calibrators: Sequence[Calibrator]) -> Scores:
    """Returns a function that scores a batch, [B, T], through calibrators."""
    if not calibrators:
        return score

    def passed(batch: Batch) -> Tensor:
        each = [of(scores_B) for of, scores_B in zip(calibrators, score(batch).T, strict=True)]
        return torch.stack(each, 1)

    return passed


def kind_of(calibrators: Sequence[Calibrator]) -> KINDS:
    """Returns of what kind they are."""
    return cast(KINDS, _FAMILY.name_of(calibrators[0]) if calibrators else "none")


def save(calibrators: Sequence[Calibrator], folder: Path) -> None:
    """Write a folder's file, if there are any."""
    each = [{"name": _FAMILY.name_of(of), **to_dict(of)} for of in calibrators]
    if each:
        text = write_toml({"labels": each}, header="What scores pass through, for each label.")
        write_text(folder / FILE, text)


def load(folder: Path) -> tuple[Calibrator, ...]:
    """Returns those of a folder.

    Raises:
        UserError: when the file cannot be read as such.
    """
    if not (folder / FILE).exists():
        return ()
    made: list[Calibrator] = []
    for number, settings in enumerate(read_toml(folder / FILE)["labels"]):
        place = f"{folder / FILE}: labels[{number}]"
        settings = dict(settings)
        made.append(from_dict(_FAMILY.config(settings.pop("name")), settings, place))
    return tuple(made)
