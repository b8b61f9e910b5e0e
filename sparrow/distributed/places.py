"""Where a dense parameter is among the ranks: who has the same values, and which rows of the whole
this rank has.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

ATTRIBUTE = "_sparrow_place"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a dense parameter is. By default every rank has all of it.

    Args:
        dim: the ranks that hold the same values, as in `World.ranks`. The parameter's gradient is
            summed over them, its norm counts once for them, and the first of them writes it into a
            checkpoint.
        rows: which rows of the whole parameter this rank has, begin and end; None for all. The
            dense optimizer's state is divided alike.
    """

    dim: str = "all"
    rows: tuple[int, int] | None = None


EVERYWHERE = Place()


def put(parameter: nn.Parameter, place: Place) -> nn.Parameter:
    """Returns the parameter, which from now on is at a place."""
    setattr(parameter, ATTRIBUTE, place)
    return parameter


def place_of(parameter: nn.Parameter) -> Place:
    """Returns where a parameter is."""
    place: Place = getattr(parameter, ATTRIBUTE, EVERYWHERE)
    return place
